"""Attention of one query a sequence over keys in a cache: on a GPU a kernel whose blocks share a sequence's keys."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from compare import assert_close
from conftest import Place, places_here
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert
HERE = places_here()
SIZES = reference.FUSED_SIZES
# Around the edges of steps and of splits, which have 8 keys to 256 by head size and type.
EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700]


def expected(q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, scale: float, left: int) -> Tensor:
    """q [heads * size] stands at the last of the keys [keys, kv_heads * size]; in float64."""
    seen = slice(max(0, len(k) - 1 - left) if left >= 0 else 0, None)
    size = len(q) // heads
    q, k, v = q.double().view(kv_heads, -1, size), *(x.double()[seen].view(-1, kv_heads, size) for x in (k, v))
    weights = (torch.einsum("ghs,kgs->ghk", q, k) * scale).softmax(-1)
    return torch.einsum("ghk,kgs->ghs", weights, v).flatten()


def check(
    place: Place, lengths: list[int], kv_heads: int, shared: int, size: int, left: int = -1, positions: int = 0,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Lengths of sequences in slots of a cache, in reverse; behind them lies NaN."""
    heads, positions, count = kv_heads * shared, positions or max(lengths) + 3, len(lengths)
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).to(place.dtype).to(place.device)

    q = random(count, heads * size) * factor
    cache = random(count * positions, 2 * kv_heads * size)
    begin = [slot * positions for slot in reversed(range(count))]
    for first, length in zip(begin, lengths, strict=True):
        cache[first + length : first + positions] = float("nan")
    k, v = cache.split(kv_heads * size, dim=1)
    begin_k = torch.tensor(begin, dtype=torch.int32, device=place.device)
    end_k = begin_k + torch.tensor(lengths, dtype=torch.int32, device=place.device)
    scale = 1 / math.sqrt(size)

    def run() -> Tensor:
        cu = reference.offsets([1] * count, place.device)
        return ops.attention_apart(q, k, v, cu, begin_k, 1, heads, kv_heads, scale, left, 0, end_k)

    got = run()
    for i, (first, length) in enumerate(zip(begin, lengths, strict=True)):
        rows = slice(first, first + length)
        want = expected(q[i], k[rows], v[rows], heads, kv_heads, scale, left) if length else q[i].double() * 0
        assert_close(got[i], want, atol=max(6e-6 * factor, 4 * place.eps), what=f"sequence {i} of {length} keys")
    assert torch.equal(got, run())  # whichever block ends last
    return got


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [1, 2, 3, 4, 7, 8])
def test_heads_that_share_keys(place: Place, size: int, shared: int) -> None:
    check(place, [300, 1, 77], 2, shared, size)


def test_more_keys_than_a_cluster_divides(place: Place) -> None:
    check(place, [1300, 5000, 31], 1, 2, 64)


@pytest.mark.parametrize("size", SIZES)
def test_lengths_around_the_edges_of_splits(place: Place, size: int) -> None:
    for count in (4, 8):  # the bound on keys is that of all slots: of eight it is more than a cluster has
        for i in range(0, len(EDGES), count):
            check(place, EDGES[i : i + count], 1, 2, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("left", [0, 5, 64, 200, 10_000])
def test_windows(place: Place, size: int, left: int) -> None:
    check(place, [1, 6, 64, 65, 66, 300, 520], 2, 2, size, left)


def test_a_short_text_in_a_long_slot_and_many_splits(place: Place) -> None:
    """The bound on keys is that of the slots: most blocks have no keys."""
    for positions in (4000, 5000):  # blocks of a cluster, and more of them
        check(place, [3], 1, 1, 128, positions=positions)
        check(place, [positions - 1], 1, 1, 64, positions=positions)
        check(place, [2500], 1, 4, 128, positions=positions)


def test_large_scores(place: Place) -> None:
    """All weight on one key of a split, and splits without weight."""
    check(place, [600, 33], 2, 2, 64, factor=50.0)


def test_more_heads_and_sequences_than_blocks_that_split(place: Place) -> None:
    check(place, [130] * 40, 16, 1, 32)
    check(place, [900, 3, 1100] * 6, 8, 1, 128)  # whole keys to a block, round after round


def test_sequences_without_keys_or_queries(place: Place) -> None:
    check(place, [40, 0, 3], 2, 2, 64)
    q = torch.randn(2, 128).to(place.device, place.dtype)
    for edges in (30, 60, 85), (600, 650, 1500):  # keys that one block reads, and several
        k = torch.randn(edges[2] + 5, 64).to(place.device, place.dtype)
        cu, begin, end = (
            torch.tensor(x, dtype=torch.int32, device=place.device) for x in ([0, 1, 1, 2], [0, *edges[:2]], edges)
        )
        got = ops.attention_apart(q, k, k, cu, begin, 1, 2, 1, 0.2, -1, 0, end)
        for i, seen in enumerate((slice(edges[0]), slice(*edges[1:]))):
            want = expected(q[i], k[seen], k[seen], 2, 1, 0.2, -1)
            assert_close(got[i], want, atol=max(6e-6, 4 * place.eps))


@settings(max_examples=40, deadline=None)
@given(
    place=st.sampled_from(HERE),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 9),
    size=st.sampled_from(SIZES),
    left=st.one_of(st.just(-1), st.integers(0, 320)),
)
def test_any_shape(place: Place, lengths: list[int], kv_heads: int, shared: int, size: int, left: int) -> None:
    check(place, lengths, kv_heads, shared, size, left)


def test_a_key_that_is_not_a_number_reaches_its_sequence_alone(place: Place) -> None:
    q, k = torch.ones(2, 64).to(place.device, place.dtype), torch.ones(400, 64).to(place.device, place.dtype)
    k[150] = float("nan")
    begin = torch.tensor([0, 200], dtype=torch.int32, device=place.device)
    got = ops.attention_apart(q, k, k, reference.offsets([1, 1], place.device), begin, 1, 1, 1, 1.0, -1, 0, begin + 200)
    assert bool(got[0].isnan().all()) and bool((got[1] == 1).all())
