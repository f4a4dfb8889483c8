"""ftbert.optimize under transformers' pipelines and sentence-transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from conftest import VOCAB_WORDS
from optimized import TEXTS, fallbacks, make

import ftbert
from ftbert.optimization import PatchedForward


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB_WORDS) + "\n", encoding="utf-8")
    return BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=128)


def flat(result: Any) -> list[Any]:
    """The numbers and strings of nested lists and dicts, in order."""
    result = list(result.items()) if isinstance(result, dict) else result
    return [x for item in result for x in flat(item)] if isinstance(result, list | tuple) else [result]


TASKS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "feature-extraction": ("encoder", TEXTS, {}),
    "text-classification": ("sequence_classification", TEXTS, {"top_k": None}),
    "token-classification": ("token_classification", TEXTS, {}),
    "fill-mask": ("masked_lm", [f"word4 [MASK] {text}" for text in TEXTS], {}),
    "zero-shot-classification": (
        "sequence_classification", TEXTS, {"candidate_labels": ["word1", "word2 word3", "q"]}),
    "question-answering": ("question_answering", [], {"question": TEXTS, "context": [" ".join(TEXTS)] * len(TEXTS)}),
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("task", TASKS)
def test_pipelines(task: str, batch_size: int, family: str, tokenizer: Any) -> None:
    from transformers import pipeline
    from transformers.pipelines import PIPELINE_REGISTRY

    if task not in PIPELINE_REGISTRY.get_supported_tasks():
        pytest.skip(f"transformers has no pipeline for {task} any more; test_every_family_and_head covers the model")
    head, texts, keywords = TASKS[task]
    model = make(family, head, **({"label2id": {"entailment": 0, "no": 1, "so": 2}} if "zero" in task else {}))
    pipe = pipeline(task, model=model, tokenizer=tokenizer)
    arguments = [texts] if texts else []
    expected = pipe(*arguments, batch_size=batch_size, **keywords)
    assert ftbert.optimize(pipe) is pipe
    got = pipe(*arguments, batch_size=batch_size, **keywords)
    if task == "feature-extraction":  # it returns the rows of padding too
        lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
        got, expected = ([one[0][:n] for one, n in zip(all_, lengths, strict=True)] for all_ in (got, expected))
    for one, other in zip(flat(got), flat(expected), strict=True):
        assert one == pytest.approx(other, abs=1e-4) if isinstance(other, float | np.floating) else one == other
    assert not fallbacks(pipe.model)
    ftbert.undo(pipe)
    assert "forward" not in vars(pipe.model.base_model)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_sentence_transformer(pooling: str, tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    parts = pytest.importorskip("sentence_transformers")
    from sentence_transformers import models

    words = models.Transformer(str(tiny_bert(tmp_path)))
    model = parts.SentenceTransformer(modules=[words, models.Pooling(64, pooling_mode=pooling)], device="cpu")
    expected = model.encode(TEXTS)
    assert ftbert.optimize(model) is model
    assert_close(torch.from_numpy(model.encode(TEXTS)), torch.from_numpy(expected), atol=1e-5)
    patched = [part.forward for part in model.modules() if isinstance(part.forward, PatchedForward)]
    assert [forward.fallbacks for forward in patched] == [{}]
    tokens = model.encode(TEXTS[0], output_value="token_embeddings")
    assert_close(tokens, ftbert.undo(model).encode(TEXTS[0], output_value="token_embeddings"), atol=1e-5)


@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoder(labels: int, tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    parts = pytest.importorskip("sentence_transformers")
    folder = tiny_bert(tmp_path)
    make("bert", "sequence_classification", num_labels=labels).save_pretrained(folder)
    model = parts.CrossEncoder(str(folder), device="cpu")
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    expected = model.predict(pairs)
    ftbert.optimize(model)
    assert_close(torch.from_numpy(model.predict(pairs)), torch.from_numpy(expected), atol=1e-4)
