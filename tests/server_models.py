"""Models for servers in tests, and comparisons of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from served import with_head

import ftbert
from ftbert.server import Settings
from ftbert.server.describe import describe

TEXTS = ["word1 word2 a b", "word3", "the cat word9 word8 word7 " * 3, "word4 word5!", "word6 word7 word8 word9 c d"]


def headed(folder: Path, tiny_bert: Callable[..., Path], labels: int = 1, bias: float = 0.0, **config: Any) -> Path:
    """A random BERT with a classification head; config: entries of its config.json."""
    found = with_head(folder, labels, tiny_bert)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(found)
    with torch.no_grad():
        model.classifier.bias += bias
    model.save_pretrained(found)
    path = found / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return found


def as_crossencoder(folder: Path, **values: Any) -> Path:
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder", **values}))
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
    (folder / "modules.json").write_text(json.dumps(modules))  # without it the other file does not count
    return folder


def embedder(folder: Path, tiny_bert: Callable[..., Path], prompts: dict[str, str], **values: Any) -> Path:
    """A SentenceTransformer's folder. values: of sentence_bert_config.json."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    parts = [Transformer(str(tiny_bert(folder))), Pooling(64, "mean", include_prompt=False)]
    SentenceTransformer(modules=parts, prompts=prompts, device="cpu").save(str(folder / "st"))
    path = folder / "st" / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder / "st"


def close(got: Any, want: Any, atol: float = 3e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=atol)


def in_order(found: list[dict[str, Any]], key: str) -> list[float]:
    return [one[key] for one in sorted(found, key=lambda one: int(one["index"]))]


def described(folder: Path, **settings: Any) -> Any:
    return describe(ftbert.load(folder), "m", "m", Settings((("m", str(folder)),), **settings))
