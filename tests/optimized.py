"""Small models of transformers, calls of them, and what an optimized one must have in common with the original."""

from __future__ import annotations

from typing import Any

import torch
from compare import assert_close
from conftest import VOCAB_WORDS
from families import make_model, masks_of

from ftbert.checkpoint import POOLED
from ftbert.converters.families import FAMILIES
from ftbert.converters.head_tables import rows_of
from ftbert.live_check import encoder_of
from ftbert.optimization import PatchedForward

TEXTS = ["word1 word2, word3!", "a", "the quick brown fox word7 word8 word9 word10 jumps", "word30 word31 z"]


def make(family: str, task: str = "encoder", **overrides: Any) -> Any:
    """A small random model of transformers, in eval mode."""
    return make_model(family, task, 2, **{"vocab_size": len(VOCAB_WORDS), "max_position_embeddings": 130, **overrides})


def some_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Ragged, with holes where `masks_of` has them; ids [4, 30], or [4, 2, 30] for multiple choice."""
    seq, generator = 30, torch.Generator().manual_seed(30)
    shape = (4, 2, seq) if "MultipleChoice" in type(model).__name__ else (4, seq)
    mask = (torch.arange(seq) < torch.randint(2, seq + 1, (*shape[:-1], 1), generator=generator)).long()
    if "holes" in masks_of(model):
        mask[0, ..., 5:9] = 0
    family = encoder_of(model).config.model_type
    pooled = [row.source for row in rows_of(family) if row.task == POOLED]
    if pooled == ["last"]:  # of the last column
        mask = mask.flip(-1)
    ids = torch.randint(5, len(VOCAB_WORDS), shape, generator=generator)
    if FAMILIES[family].decoder or pooled:  # their heads go by the ids
        ids[mask == 0] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(**inputs)


def check_same(got: Any, expected: Any, mask: torch.Tensor | None, atol: float = 1e-4) -> None:
    """Same class and fields, equal at kept tokens."""
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.device == expected.device
        kept: Any = ... if mask is None or got.shape[: mask.dim()] != mask.shape else mask.bool()
        assert_close(got[kept], expected[kept], atol=atol)
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            check_same(one, other, mask, atol)
    elif hasattr(expected, "keys"):  # no cache
        assert list(got.keys()) == list(expected.keys())
        for key in expected:
            check_same(got[key], expected[key], mask, atol)


def fallbacks(model: Any) -> dict[str, int]:
    forward = encoder_of(model).forward
    assert isinstance(forward, PatchedForward)
    return forward.fallbacks
