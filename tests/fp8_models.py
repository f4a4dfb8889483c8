"""Random models in folders, to be quantized."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB_WORDS
from families import make_model

from ftbert.quantization import cache, quantize

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 32},
}


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No words on calibration, no look at what 8 bits cost random weights, and a cache of the test's own."""
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "quantize", partial(quantize, any_loss=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_folder(family: str, task: str, dtype: torch.dtype, folder: Path) -> Path:
    """A random model stored in `dtype`, with a tokenizer."""
    sizes = {"vocab_size": 120, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
    return save(make_model(family, task, 0, **sizes | FAMILIES[family]).to(dtype), folder)


def save(model: Any, folder: Path) -> Path:
    """With a tokenizer of VOCAB_WORDS."""
    from transformers import BertTokenizerFast

    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCAB_WORDS) + "\n", encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
