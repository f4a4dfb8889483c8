"""Packed tokens that attend and are not attended to: what transformers gives at padding, whose rows it computes."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from compare import assert_close
from conftest import Place
from families import make_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import offsets

import ftbert

# A relative bias, positions counted from padding ids, windows, rotary positions, causal layers.
FAMILIES = ["bert", "mpnet", "roberta", "modernbert", "nomic_bert", "qwen3"]
LENGTHS, KEYS = [9, 14, 6, 1, 12], [5, 14, 2, 1, 9]


@cache
def loaded(family: str, place: Place, attention: str) -> tuple[torch.nn.Module, ftbert.Model]:
    reference = make_model(family, "encoder", 0)
    return reference, ftbert.load(reference, device=place.device, dtype=place.dtype, attention=attention)


def texts(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Of ids that are no padding."""
    return list(torch.randint(5, 90, (sum(lengths),), generator=torch.Generator().manual_seed(seed)).split(lengths))


def run(model: ftbert.Model, rows: list[torch.Tensor], keys: list[int] | None, want: str = "tokens") -> torch.Tensor:
    device = model.device
    cu = offsets([len(row) for row in rows], str(device))
    given_keys = None if keys is None else torch.tensor(keys, dtype=torch.int32, device=device)
    return model.forward_packed(torch.cat(rows).to(device), cu, max(map(len, rows)), want=want, keys=given_keys)


@pytest.mark.parametrize("attention", ["auto", "general"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_at_padding(place: Place, family: str, attention: str) -> None:
    reference, model = loaded(family, place, attention)
    rows = texts(LENGTHS)
    for _ in range(3):  # on a GPU the second is recorded, the third repeated
        got = run(model, rows, KEYS)
    limit = 2e-5 if place.dtype == torch.float32 else 64 * place.eps
    for mine, row, keys in zip(got.split(LENGTHS), rows, KEYS, strict=True):
        mask = (torch.arange(len(row)) < keys).long()[None]
        with torch.no_grad():
            want = reference(input_ids=row[None], attention_mask=mask).last_hidden_state[0]
        # A row that sees no key through its window is transformers' own affair.
        seen = torch.arange(len(row)) < keys + 3 if family == "modernbert" else torch.ones(len(row), dtype=torch.bool)
        assert_close(mine[seen.to(mine.device)], want[seen], atol=limit, rtol=limit, what=family)
        assert_close(run(model, [row], [keys]), mine, atol=limit, rtol=limit)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    data=st.data(),
)
def test_what_is_no_key_reaches_nothing(place: Place, family: str, lengths: list[int], data: st.DataObject) -> None:
    """Keys' rows are those of the keys alone, a row behind them depends on itself and the keys, and all keys change
    nothing."""
    _, model = loaded(family, place, "auto")
    rows = texts(lengths)
    keys = [data.draw(st.integers(1, n)) for n in lengths]
    limit = 2e-6 if place.dtype == torch.float32 else 64 * place.eps
    got = run(model, rows, keys).split(lengths)
    alone = run(model, [row[:n] for row, n in zip(rows, keys, strict=True)], None).split(keys)
    for mine, other, n in zip(got, alone, keys, strict=True):
        assert_close(mine[:n], other, atol=limit, rtol=limit, what=family)
    shorter = run(model, [row[: max(n, len(row) - 1)] for row, n in zip(rows, keys, strict=True)], keys)
    for mine, other in zip(got, shorter.split([max(n, m - 1) for n, m in zip(keys, lengths, strict=True)]), strict=True):
        assert_close(mine[: len(other)], other, atol=limit, rtol=limit, what=family)
    assert_close(run(model, rows, lengths), run(model, rows, None), atol=limit, rtol=limit)
    ends = torch.tensor(lengths).cumsum(0) - 1
    assert_close(run(model, rows, keys, "last"), torch.cat(got)[ends.to(model.device)], atol=limit, rtol=limit)


def test_arguments_that_do_not_fit(device: str) -> None:
    _, model = loaded("bert", Place(device, torch.float32), "auto")
    rows = texts([4, 3])
    with pytest.raises(RuntimeError, match=r"keys: expected int32 \[2\]"):
        run(model, rows, [1, 2, 3])
    ids = torch.cat(rows).to(device)
    with pytest.raises(RuntimeError, match="keys: expected packed ids"):
        one = torch.tensor([1], dtype=torch.int32, device=device)
        model.module.forward_batch(ids[None], None, None, None, 0, ["tokens"], None, 0, one)
    with pytest.raises(RuntimeError, match="keys: a token that is not attended to has no state"):
        run(loaded("deberta-v2", Place(device, torch.float32), "auto")[1], rows, [1, 2])
    if device == "cpu":
        for keys in ([4, 4], [-1, 2]):
            with pytest.raises(RuntimeError, match="keys: expected 0 to [34], the tokens of sequence [01], got"):
                run(model, rows, keys)
