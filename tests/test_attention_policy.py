"""Attention beyond BERT's: heads of keys that serve several of queries, another scale, windows, causal masks."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from compare import assert_close
from conftest import Place, have_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert

WINDOWS = [(0, 0), (5, -1), (-1, 0), (64, 64), (63, 0), (130, 5), (1000, 1000)]


def random(rows: int, cols: int, place: Place, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(place.dtype).to(place.device)


def has_fused(place: Place, heads: int, kv_heads: int, size: int, window: tuple[int, int]) -> bool:
    """A GPU has no fused kernel for fewer heads of keys nor for windows yet: the general path takes those."""
    return place.device == "cpu" or (size in (32, 64, 128) and heads == kv_heads and window == (-1, -1))


def fused(qkv: torch.Tensor, lengths: list[int], heads: int, kv_heads: int, scale: float | None, window: tuple[int, int]) -> torch.Tensor:
    cu = reference.offsets(lengths, qkv.device.type)
    return ops.attention(qkv, cu, max(lengths, default=0), heads, kv_heads=kv_heads, scale=scale, left=window[0], right=window[1])


def general(qkv: torch.Tensor, lengths: list[int], heads: int, kv_heads: int, scale: float, window: tuple[int, int]) -> torch.Tensor:
    cu, seq = reference.offsets(lengths, qkv.device.type), max(lengths, default=0)
    q, k, v = ops.add_qkv_bias(qkv, None, cu, seq, heads, kv_heads)
    scores = (q.float() @ k.float().transpose(-1, -2)).contiguous()
    weights = ops.softmax(scores, cu, scale, None, None, qkv.dtype, *window)
    return ops.transpose((weights.float() @ v.float()).to(qkv.dtype).contiguous(), cu, sum(lengths))


def check(place: Place, lengths: list[int], heads: int, kv_heads: int, size: int, scale: float | None, window: tuple[int, int]) -> None:
    qkv = random(sum(lengths), (heads + 2 * kv_heads) * size, place)
    want = reference.attention(qkv, lengths, heads, None, kv_heads, scale, *window)
    limit = max(6e-6, 4 * place.eps)
    assert_close(general(qkv, lengths, heads, kv_heads, scale or 1 / math.sqrt(size), window), want, atol=limit, what="general")
    if not has_fused(place, heads, kv_heads, size, window):
        with pytest.raises(RuntimeError, match="no fused kernel"):
            fused(qkv, lengths, heads, kv_heads, scale, window)
        return
    got = fused(qkv, lengths, heads, kv_heads, scale, window)
    assert_close(got, want, atol=limit, what="fused")
    assert torch.equal(got, fused(qkv, lengths, heads, kv_heads, scale, window))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [26, 32, 64, 128])
def test_heads_of_keys_serve_several_of_queries(place: Place, size: int, ratio: int, kv_heads: int) -> None:
    check(place, [33, 1, 200, 64], ratio * kv_heads, kv_heads, size, None, (-1, -1))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [26, 32, 64, 128])
@pytest.mark.parametrize("lengths", [[5, 1, 17], [300, 2, 140, 64], [700]], ids=str)
def test_windows(place: Place, lengths: list[int], size: int, window: tuple[int, int]) -> None:
    check(place, lengths, 2, 1, size, None, window)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scale(place: Place, scale: float) -> None:
    check(place, [70, 129], 2, 2, 32, scale, (-1, -1))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_rows_that_see_nothing_of_their_blocks_first_tile(place: Place, size: int) -> None:
    """Of a block of queries some reach back to a tile of keys in which others see none; their scores are far below."""
    if not has_fused(place, 1, 1, size, (1, 0)):
        pytest.skip("no fused kernel for windows on CUDA")
    qkv = random(256, 3 * size, place)
    qkv[:, :size] = qkv[:, :size].abs() + 1
    qkv[:, size : 2 * size] = -qkv[:, size : 2 * size].abs() - 1  # every score below -1 times size
    for window in [(1, 0), (3, 3), (40, 0), (70, 0)]:
        want = reference.attention(qkv, [256], 1, scale=2.0, left=window[0], right=window[1])
        got = fused(qkv, [256], 1, 1, 2.0, window)
        assert bool(got.isfinite().all()), window
        assert_close(got, want, atol=max(2e-3, 40 * place.eps), what=str(window))


def test_keys_outside_of_a_window_do_not_matter(place: Place) -> None:
    size, lengths, window = 64, [200], (16, 0)
    if not has_fused(place, 1, 1, size, window):
        pytest.skip("no fused kernel for windows on CUDA")
    qkv = random(200, 3 * size, place)
    want = fused(qkv, lengths, 1, 1, None, window)
    qkv[:50, size:] = float("nan")  # no query from 66 on sees these; of the same block some do
    assert torch.equal(fused(qkv, lengths, 1, 1, None, window)[128 + 16 :], want[128 + 16 :])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 4),
    size=st.sampled_from([8, 32, 48, 64]),
    left=st.integers(-1, 160),
    right=st.integers(-1, 160),
)
def test_any_shape(lengths: list[int], kv_heads: int, ratio: int, size: int, left: int, right: int) -> None:
    place = Place("cuda", torch.float16) if have_gpu() else Place("cpu", torch.float32)
    check(place, lengths, ratio * kv_heads, kv_heads, size, None, (left, right))


def test_arguments_that_do_not_fit(place: Place) -> None:
    qkv, cu = random(4, 6 * 32, place), reference.offsets([4], place.device)
    with pytest.raises(RuntimeError, match="heads a multiple of kv_heads"):
        ops.attention(qkv, cu, 4, 3, kv_heads=2)
    with pytest.raises(RuntimeError, match="left"):
        ops.attention(qkv, cu, 4, 2, left=-2)
