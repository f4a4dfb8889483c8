"""q8_0 and Q8_1 by themselves: rounding to the bit, the way into a product's layout, and products against exact sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from compare import assert_close
from conftest import Place
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from ftbert._library import load_library
from ftbert.quantization import q8_0_blocks

load_library()
ops = torch.ops.ftbert
ACTIVATIONS = ["none", "gelu", "gelu_tanh", "relu", "silu", "tanh"]
SIZES = st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 160]))
FLOATS = arrays.arrays(np.float32, SIZES, elements=st.floats(-1e4, 1e4, width=32))


def rounded(x: Tensor) -> Tensor:
    """Half away from zero."""
    magnitude = x.double().abs()
    return (magnitude.floor() + (magnitude - magnitude.floor() >= 0.5)).copysign(x).to(torch.int8)


def q8_1(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(x.shape[0], -1, 32)
    scales = blocks.abs().amax(2) / 127
    numbers = torch.where(scales[..., None] > 0, blocks / scales[..., None], 0.0).clamp(-127, 127)
    return rounded(numbers).view(x.shape), scales


# ---- rounding --------------------------------------------------------------------------------------------------------


@given(FLOATS)
@settings(max_examples=150, deadline=None)
def test_weights_are_rounded_as_llama_cpp_does(rows: np.ndarray) -> None:
    gguf = pytest.importorskip("gguf")
    values, scales = q8_0_blocks(torch.from_numpy(rows))
    with np.errstate(all="ignore"):
        blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0).reshape(*scales.shape, 34)
    np.testing.assert_array_equal(values.numpy().view(np.uint8).reshape(*scales.shape, 32), blocks[..., 2:])
    np.testing.assert_array_equal(scales.numpy().view(np.uint8).reshape(*scales.shape, 2), blocks[..., :2])


@given(FLOATS)
@settings(max_examples=150, deadline=None)
def test_rows_are_rounded_as_defined(rows: np.ndarray) -> None:
    numbers, scales = ops.quantize_q8_1(torch.from_numpy(rows))
    want, of_blocks = q8_1(torch.from_numpy(rows))
    assert torch.equal(scales, of_blocks) and torch.equal(numbers, want)


def test_halves_are_rounded_away_from_zero() -> None:
    """Of a block whose scale is 1; the other is one of zeros."""
    row = torch.zeros(1, 64)
    below = float(np.nextafter(np.float32(0.5), np.float32(0)))
    row[0, :9] = torch.tensor([127, 0.5, -0.5, 1.5, -1.5, 2.5, below, -126.5, 64.49])
    for numbers, scales in (q8_0_blocks(row), ops.quantize_q8_1(row)):
        assert numbers[0, :9].tolist() == [127, 1, -1, 2, -2, 3, 0, -127, 64] and not numbers[0, 9:].any()
        assert scales.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(wrong: float) -> None:
    row = torch.ones(1, 64)
    row[0, 40] = wrong
    with pytest.raises(ValueError, match="not finite"):
        q8_0_blocks(row)
    numbers, scales = ops.quantize_q8_1(row)
    assert scales[0, 1].isnan() and scales[0, 0] == 1 / 127 and (numbers[0, :32] == 127).all()


def test_what_is_stored_stands_for(place: Place) -> None:
    values, scales = (one.to(place.device) for one in weights(24, 96))
    want = values.float() * scales.float().repeat_interleave(32, 1)
    assert torch.equal(ops.dequantize_q8_0(values, scales, place.dtype), want.to(place.dtype))
    again = q8_0_blocks(want.cpu())
    assert torch.equal(again[0], values.cpu()) and torch.equal(again[1], scales.cpu())


# ---- products --------------------------------------------------------------------------------------------------------


def weights(n: int, k: int, whole: bool = False) -> tuple[Tensor, Tensor]:
    """The whole range of numbers, the largest of it in each block; scales of 1, or such that sums are of order 1."""
    random = torch.Generator().manual_seed(n * k)
    values = torch.randint(-127, 128, (n, k), generator=random).to(torch.int8)
    values[:, ::32] = 127
    scales = torch.ones(n, k // 32) if whole else torch.rand(n, k // 32, generator=random) / math.sqrt(k) / 40 + 1e-4
    return values, scales.half()


def rows(m: int, k: int, whole: bool = False) -> Tensor:
    random = torch.Generator().manual_seed(m + k)
    if not whole:
        return torch.randn(m, k, generator=random)
    x = torch.randint(-127, 128, (m, k), generator=random).float()
    x[:, 5::32] = -127
    return x


def multiply(
    x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, activation: str, gated: bool = False
) -> Tensor:
    return ops.product(x, values, bias, activation, gated, scales)


def exact(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """float64 [m, n] of what is stored of both."""
    numbers, of_rows = q8_1(x)
    left = numbers.double() * of_rows.double().repeat_interleave(32, 1)
    return left @ (values.double() * scales.double().repeat_interleave(32, 1)).T


@pytest.mark.parametrize("n,k", [(8, 64), (40, 192), (104, 1024)])
def test_sums_are_exact(n: int, k: int) -> None:
    values, scales = weights(n, k, whole=True)
    for m in (*range(1, 20), 70, 300):
        x = rows(m, k, whole=True)
        assert torch.equal(multiply(x, values, scales, None, "none").double(), exact(x, values, scales)), m


@pytest.mark.parametrize("weight", [-128, -127, 127])
@pytest.mark.parametrize("x", [-127.0, 127.0])
def test_the_largest_sums_do_not_overflow(x: float, weight: int) -> None:
    values, scales = torch.full((40, 256), weight, dtype=torch.int8), torch.ones(40, 8).half()
    got = multiply(torch.full((3, 256), x), values, scales, None, "none")
    assert torch.equal(got, torch.full((3, 40), 256 * x * weight))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m,n,k", [(1, 40, 64), (5, 96, 576), (70, 136, 1536)])
def test_what_follows_the_sums(place: Place, m: int, n: int, k: int, activation: str, gated: bool) -> None:
    """On a GPU of rows as they are or in blocks: which, the plan says."""
    if place.device == "cuda" and place.dtype == torch.float32:
        pytest.skip("no product on a GPU takes float32 beside q8_0")
    x, (values, scales) = rows(m, k).to(place.dtype), weights(n, k)
    for bias in (torch.randn(n).to(place.dtype), None):
        sums = exact(x.float(), values, scales) + (0 if bias is None else bias.double())
        expected = reference.gate(sums, activation) if gated else reference.activation(sums, activation)
        there = [None if one is None else one.to(place.device) for one in (x, values, scales, bias)]
        got = multiply(*there, activation, gated).double().cpu()
        if place.device == "cpu":
            assert_close(got, expected, atol=3e-6, rtol=3e-6)
        else:
            assert (got - expected).norm() < 0.02 * expected.norm()


def test_a_row_is_the_same_in_any_batch() -> None:
    x, (values, scales) = rows(300, 576), weights(136, 576)
    whole = multiply(x, values, scales, None, "none")
    for first, last in ((0, 1), (5, 7), (9, 12), (100, 105), (30, 47), (290, 300)):
        part = multiply(x[first:last].contiguous(), values, scales, None, "none")
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("m,n,k", [(1, 1000, 640), (4, 2304, 576), (500, 96, 320)])
def test_threads_change_nothing(m: int, n: int, k: int) -> None:
    x, (values, scales), before, made = rows(m, k), weights(n, k), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(multiply(x, values, scales, None, "gelu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_a_row_that_is_no_number_stays_alone() -> None:
    x, (values, scales) = rows(11, 128), weights(40, 128)
    before = multiply(x, values, scales, None, "none")
    x[3, 100] = math.inf
    after = multiply(x, values, scales, None, "none")
    assert after[3].isnan().all()
    assert torch.equal(after[[*range(3), *range(4, 11)]], before[[*range(3), *range(4, 11)]])


def test_no_rows() -> None:
    assert multiply(torch.zeros(0, 64), *weights(8, 64), None, "none").shape == (0, 8)


@pytest.mark.parametrize("place,value,words", [
    (0, torch.zeros(2, 32), r"weight: expected int8 \[n, 32\] on cpu, got Char \[8, 64\]"),
    (1, torch.zeros(8, 64), r"weight: expected int8 \[n, k\], k a multiple of 32, got Float"),
    (2, torch.ones(8, 2), r"scales: expected float16 \[n, k / 32\] beside .*, got Float"),
    (2, torch.ones(8, 4).half(), r"scales: expected float16"),
    (3, torch.zeros(7), r"bias: expected contiguous Float \[8\]"),
    (4, "mish", "unknown activation 'mish'"),
])  # fmt: skip
def test_what_is_wrong_is_named(place: int, value: Any, words: str) -> None:
    arguments: list[Any] = [torch.zeros(2, 64), *weights(8, 64), None, "none"]
    assert multiply(*arguments).shape == (2, 8)
    arguments[place] = value
    with pytest.raises(RuntimeError, match=words):
        multiply(*arguments)


@pytest.mark.parametrize("n,k", [(7, 64), (8, 96)])
def test_other_sizes_are_refused(n: int, k: int) -> None:
    with pytest.raises(RuntimeError, match=rf"rows in multiples of 8 and columns of 64, got \[{n}, {k}\]"):
        multiply(torch.zeros(1, k), *weights(n, k), None, "none")
