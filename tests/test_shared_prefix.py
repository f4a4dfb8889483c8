"""Texts that begin alike: their common tokens are computed once, and results stay what they are."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Place, places_here
from families import make_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from language_models import FAMILIES, error, loaded
from torch import Tensor

import ftbert
from ftbert.text import next_logits
from ftbert.text.batching import Batch, pack
from ftbert.text.shared_prefix import LEAST, apart, shared_tokens, worth_sharing
from ftbert.text.tokens import tokens_of

CPU = Place("cpu", torch.float32)
HERE = places_here()
VOCAB = 90  # ids that every family has
Rows = list[list[int]]


def batch_of(rows: Rows) -> Batch:
    return pack(tokens_of(rows), np.arange(len(rows)))


def packed(rows: Rows, place: Place) -> tuple[Tensor, Tensor]:
    cu = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    return torch.tensor([one for row in rows for one in row], dtype=torch.int64).to(place.device), cu.to(place.device)


def random_ids(lengths: list[int], seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def limit(place: Place) -> float:
    """Of the mean square of a row."""
    return 1e-10 if place.dtype == torch.float32 else 64 * place.eps**2


@functools.cache
def one_by_one(family: str, place: Place, text: tuple[int, ...]) -> Tensor:
    """[tokens, hidden] of a text by itself, on the CPU."""
    return loaded(family, place).forward_packed(*packed([list(text)], place), len(text)).float().cpu()


@given(rows=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=5))
def test_tokens_that_all_texts_begin_with(rows: Rows) -> None:
    """Each keeps one of its own, of which there are logits."""
    shared = shared_tokens(batch_of(rows))
    shortest = min(map(len, rows), default=0)
    alike = next((n for n in range(shortest) if len({row[n] for row in rows}) > 1), shortest)
    assert shared == (min(alike, max(shortest - 1, 0)) if len(rows) > 1 else 0)


@given(prefix=st.lists(st.integers(0, 9), min_size=1, max_size=4), rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=2, max_size=5))
def test_apart(prefix: list[int], rows: Rows) -> None:
    whole = batch_of([prefix + row for row in rows])
    got, want = apart(whole, len(prefix)), batch_of([prefix, *rows])
    assert np.array_equal(got.ids, want.ids) and np.array_equal(got.cu_seqlens, want.cu_seqlens)
    assert (got.ids.dtype, got.cu_seqlens.dtype, got.longest) == (np.int64, np.int32, whole.longest)


@settings(max_examples=60, deadline=None)
@example(place=HERE[-1], family="llama", prefix=1, spare=0, lengths=[1, 0, 1], seed=0)  # one query each: a step
@example(place=HERE[-1], family="qwen3", prefix=60, spare=0, lengths=[0], seed=0)
@example(place=HERE[-1], family="mistral", prefix=3, spare=9, lengths=[], seed=0)
@given(
    place=st.sampled_from(HERE), family=st.sampled_from(FAMILIES), prefix=st.integers(1, 60), spare=st.integers(0, 9),
    lengths=st.lists(st.one_of(st.integers(0, 2), st.integers(0, 36)), max_size=9), seed=st.integers(0, 3),
)  # fmt: skip
def test_results_are_those_of_whole_texts(
    place: Place, family: str, prefix: int, spare: int, lengths: list[int], seed: int
) -> None:
    """Every row that can be read, in the order given: texts of no token, and of one, and the prefix alone among them."""
    model, (common, *rows) = loaded(family, place), random_ids([prefix, *lengths], seed)
    ids, cu = packed([common, *rows], place)
    longest = min(prefix + max(lengths, default=0) + spare, 96)

    def made(want: str, **more: Any) -> Tensor:
        return model.forward_packed(ids, cu, longest, want=want, shared_prefix=prefix, **more).float().cpu()

    of_each = [one_by_one(family, place, tuple(common))]
    of_each += [one_by_one(family, place, tuple(common + row))[prefix:] for row in rows]
    tokens, last, states = made("tokens"), made("last"), made("hidden_states")
    every_third = torch.arange(0, len(ids), 3).flip(0)
    assert error(tokens, torch.cat(of_each)) < limit(place)
    assert torch.equal(states[-1], tokens) or error(states[-1], tokens) < limit(place)
    some = made("rows", rows=every_third.to(place.device))
    assert error(some, torch.cat(of_each)[every_third]) < limit(place)
    for got, want in zip(last, of_each, strict=True):
        assert error(got[None], want[-1:]) < limit(place) if len(want) else not got.any()


@pytest.mark.parametrize("lengths", [[380, 128, 128, 380], [33, *(n % 40 for n in range(3, 300, 7))]])
def test_threads_wait_for_the_prefix(place: Place, lengths: list[int]) -> None:
    """Where two would begin with texts of their own, the second one's shorter than the prefix; more texts than a block
    of the GPU's kernel writes to."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 128}
    reference = make_model("llama", "causal_lm", 0, max_position_embeddings=800, **heads)
    model, (common, *rows) = ftbert.load(reference, device=place.device, dtype=place.dtype), random_ids(lengths, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = model.forward_packed(*packed([common, *rows], place), 760, want="last", shared_prefix=len(common))[1:]
        whole = model.forward_packed(*packed([common + row for row in rows], place), 760, want="last")
    finally:
        torch.set_num_threads(threads)
    kept = [i for i, row in enumerate(rows) if row]
    assert error(got[kept].float().cpu(), whole[kept].float().cpu()) < limit(place)
    one = model.forward_packed(*packed([common, rows[2]], place), 760, want="last", shared_prefix=len(common))[1:]
    assert error(one.float().cpu(), got[2:3].float().cpu()) < limit(place)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_are_the_same(place: Place, side: str) -> None:
    model, (common, *rows) = loaded("qwen3", place), random_ids([20, 3, 30, 1], 2)
    ids, mask = torch.zeros(3, 50, dtype=torch.int64), torch.zeros(3, 50, dtype=torch.int64)
    for i, row in enumerate(rows):
        n = len(common + row)
        there = slice(50 - n, 50) if side == "left" else slice(0, n)
        ids[i, there], mask[i, there] = torch.tensor(common + row), 1
    inputs = (ids.to(place.device), mask.to(place.device), None)
    (want,) = model.module.forward_batch(*inputs, None, 0, ["last"])
    got = model.forward_packed(*packed([common, *rows], place), 50, want="last", shared_prefix=20)[1:]
    assert error(got.float().cpu(), want.float().cpu()) < limit(place)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_whole_texts(place: Place, family: str) -> None:
    model, (common, *rows) = loaded(family, place), random_ids([17, 30, 11, 1, 8, 19], 0)
    batch = batch_of([common + row for row in rows])

    def scores(of: Batch, shared: int) -> Tensor:
        ids, cu = (torch.from_numpy(one).to(model.device) for one in (of.ids, of.cu_seqlens))
        return next_logits(model, (ids, cu, of.longest, None), [7, 9], shared)

    want, got = scores(batch, 0), scores(apart(batch, shared_tokens(batch)), 17)
    limit = 1e-5 if place.dtype == torch.float32 else 64 * place.eps
    assert got.shape == want.shape == (5, 1) and float((got - want).abs().max()) < limit * float(want.abs().max())


def test_where_it_is_worth_it() -> None:
    model = loaded("qwen3", CPU)
    assert worth_sharing(model, batch_of([[1] * 30 + [2], [1] * 30 + [3]]), 30)
    assert not worth_sharing(model, batch_of([[1] * 3 + [2] * 99, [1] * 3 + [3] * 99]), 3)
    assert not worth_sharing(model, batch_of([[1, 2, 3]]), 0)
    both_ways = ftbert.load(make_model("qwen3", "causal_lm", 0, is_causal=False))
    general = ftbert.load(make_model("qwen3", "causal_lm", 0), attention="general")
    for other in (both_ways, general, ftbert.load(make_model("bert", "masked_lm", 0))):
        assert not worth_sharing(other, batch_of([[1] * 30 + [2], [1] * 30 + [3]]), 30)


def test_each_device_has_its_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved of 40 tokens, 20, and a number of tokens beside it."""
    model, batch = loaded("qwen3", CPU), batch_of([[1] * 10 + [2] * 3 for _ in range(3)] + [[1] * 10])
    for tokens, part, worth in ((0, 0.4, True), (0, 0.7, False), (30, 0.4, True), (31, 0.4, False)):
        monkeypatch.setitem(LEAST, "cpu", type(LEAST["cpu"])(tokens, part))
        assert worth_sharing(model, batch, 10) == worth


def test_calls_that_do_not_fit(place: Place) -> None:
    model = loaded("llama", place)
    ids, cu = packed([[1, 2, 3, 4], [5, 6], [7]], place)

    def call(ids: Tensor, cu: Tensor, longest: int, prefix: int, of: Any = model) -> Any:
        return of.forward_packed(ids, cu, longest, want="last", shared_prefix=prefix)

    call(ids, cu, 6, 4)
    for words, arguments in {
        r"shared_prefix: expected the number of tokens of the first sequence.*got 8": (ids, cu, 6, 8),
        r"shared_prefix: .* got -1": (ids, cu, 6, -1),
        r"shared_prefix: .* got 4": (ids[:0], cu[:1], 6, 4),
    }.items():
        with pytest.raises(RuntimeError, match=words):
            call(*arguments)
    with pytest.raises(RuntimeError, match="shared_prefix: expected packed ids"):
        model.module.forward_batch(ids[None], None, None, None, 0, ["last"], None, 4)
    if place.device == "cpu":
        with pytest.raises(RuntimeError, match="expected the 4 tokens of the first sequence, .* got 3"):
            call(ids, cu, 6, 3)
        with pytest.raises(RuntimeError, match="with the prefix of 4 tokens, got 5 for sequence 1 of 2 more"):
            call(ids, cu, 5, 4)
    encoder = ftbert.load(make_model("bert", "encoder", 0), device=place.device, dtype=place.dtype)
    general = ftbert.load(make_model("llama", "causal_lm", 0), device=place.device, dtype=place.dtype, attention="general")
    for other, words in ((encoder, "its tokens see those that follow"), (general, "its attention runs by the general path")):
        with pytest.raises(RuntimeError, match=f"this model has no cache of keys and values: {words}"):
            call(ids, cu, 6, 4, other)


@settings(max_examples=40, deadline=None)
@given(place=st.sampled_from(HERE), prefix=st.integers(0, 9), gaps=st.lists(st.integers(0, 3), max_size=20), heads=st.integers(1, 40), seed=st.integers(0, 9))
def test_a_repeated_prefix(place: Place, prefix: int, gaps: list[int], heads: int, seed: int) -> None:
    """Bit for bit, and no other row changes; where it would lie in itself or past the end none does."""
    begins, at = [], prefix
    for gap in gaps:
        begins.append(at + gap)
        at += gap + prefix
    rows = at + seed % 3
    order = np.random.default_rng(seed).permutation([*begins, *range(min(prefix, 2)), rows - prefix + 1, -1, 2**31 - 1])
    keys, values = (torch.randn(rows, 8 * heads).to(place.dtype).to(place.device) for _ in range(2))
    wanted = [keys.clone(), values.clone()]
    for want in wanted:
        for begin in begins:
            want[begin : begin + prefix] = want[:prefix]
    torch.ops.ftbert.repeat_prefix(torch.tensor(order, dtype=torch.int32, device=place.device), prefix, keys, values)
    assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"begins": torch.zeros(2, dtype=torch.int64)}, "begins: expected"),
        ({"begins": torch.zeros(2, 2, dtype=torch.int32)}, r"begins: expected int32 \[n\]"),
        ({"prefix": 6}, "prefix: expected 0 to 5 rows, got 6"),
        ({"prefix": -1}, "prefix: expected 0 to 5 rows, got -1"),
        ({"values": torch.zeros(4, 8)}, r"values: expected contiguous Float \[5, 8\]"),
        ({"keys": torch.zeros(8, 5).T}, "keys: expected a contiguous tensor of rank 2"),
    ],
)
def test_arguments_of_the_kernel(change: dict[str, object], words: str) -> None:
    right: dict[str, Any] = {"begins": torch.tensor([2, 3], dtype=torch.int32), "prefix": 2, "keys": torch.zeros(5, 8), "values": torch.zeros(5, 8)}
    torch.ops.ftbert.repeat_prefix(**right)
    with pytest.raises(RuntimeError, match=words):
        torch.ops.ftbert.repeat_prefix(**right | change)
