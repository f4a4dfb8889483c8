"""Texts that begin alike: their common tokens are computed once, and scores stay what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import Place
from families import make_model
from hypothesis import given
from hypothesis import strategies as st
from language_models import FAMILIES, loaded

import ftbert
from ftbert.text import shared_prefix
from ftbert.text.batching import Batch, pack
from ftbert.text.scoring import next_logits
from ftbert.text.shared_prefix import logits_behind, shared_tokens, worth_sharing
from ftbert.text.tokens import tokens_of

CPU = Place("cpu", torch.float32)


def batch_of(rows: list[list[int]]) -> Batch:
    return pack(tokens_of(rows), np.arange(len(rows)))


@given(rows=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=5))
def test_tokens_that_all_texts_begin_with(rows: list[list[int]]) -> None:
    """Each keeps one of its own, of which there are logits."""
    shared = shared_tokens(batch_of(rows))
    shortest = min(map(len, rows), default=0)
    alike = next((n for n in range(shortest) if len({row[n] for row in rows}) > 1), shortest)
    assert shared == (min(alike, max(shortest - 1, 0)) if len(rows) > 1 else 0)


@pytest.mark.parametrize("cache", [1, 1 << 17, 1 << 28])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_whole_texts(
    place: Place, family: str, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of one text, of a few, and all at once."""
    monkeypatch.setattr(shared_prefix, "_CACHE_BYTES", cache)
    model, generator = loaded(family, place), torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in (30, 11, 1, 8, 19)]
    batch = batch_of([[*range(5, 22), *row] for row in rows])
    shared = shared_tokens(batch)
    assert shared == 17

    def upload(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)

    whole = next_logits(model, (upload(batch.ids), upload(batch.cu_seqlens), batch.longest, None), [7, 9])
    got = logits_behind(model, batch, upload, shared, [7, 9]).float()
    limit = 2e-6 if place.dtype == torch.float32 else 64 * place.eps
    assert float((got[:, :1] - got[:, 1:] - whole).abs().max()) < limit * float(got.abs().max())


def test_where_it_is_worth_it() -> None:
    model = loaded("qwen3", CPU)
    assert worth_sharing(model, batch_of([[1] * 30 + [2], [1] * 30 + [3]]), 30)
    assert not worth_sharing(model, batch_of([[1] * 30 + [2] * 99, [1] * 30 + [3] * 99]), 30)
    assert not worth_sharing(model, batch_of([[1, 2, 3]]), 0)
    both_ways = ftbert.load(make_model("qwen3", "causal_lm", 0, is_causal=False))
    general = ftbert.load(make_model("qwen3", "causal_lm", 0), attention="general")
    for other in (both_ways, general, ftbert.load(make_model("bert", "masked_lm", 0))):
        assert not worth_sharing(other, batch_of([[1] * 30 + [2], [1] * 30 + [3]]), 30)
