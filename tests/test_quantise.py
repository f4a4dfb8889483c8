"""Results in E4M3: the kernels that store what a product in 8 bits reads, against torch's own rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from conftest import Place

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert
E4M3 = torch.float8_e4m3fn


def random(*shape: int, place: Place, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(place.dtype).to(place.device)


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).float().to(E4M3)


def assert_within_a_step(got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor, seldom: float = 0.02) -> None:
    """At most one step of E4M3 from the nearest number, and that seldom: where the exact one is near the middle."""
    numbers, expected = got.float(), rounded(exact, scale.double()).float()
    assert torch.equal(numbers.isnan(), expected.isnan())
    off, size = (numbers - expected).nan_to_num().abs(), expected.nan_to_num().abs()
    assert (off <= (size / 8).clamp(2.0**-9)).all(), off.max()
    assert (off > 0).float().mean() < seldom or got.numel() < 500


def scale_of(value: float, place: Place) -> torch.Tensor:
    return torch.tensor([value], device=place.device)


def sixteen_bits(place: Place) -> None:
    """Of what has no kernel elsewhere: a clear error there."""
    if place.dtype == torch.float32:
        pytest.skip("results of 16-bit kernels alone")


@pytest.mark.parametrize("rows,cols", [(0, 64), (1, 1), (3, 77), (5, 15), (65, 1536), (33, 768), (700, 24)])
@pytest.mark.parametrize("value", [1.0, 0.25, 0.0371, 3.0])
def test_quantise(place: Place, rows: int, cols: int, value: float) -> None:
    scale = scale_of(value, place)
    x = random(rows, cols, place=place, scale=8.0)
    got = ops.quantise(x, scale)
    assert got.dtype == E4M3 and torch.equal(got.view(torch.uint8), rounded(x.float(), scale).view(torch.uint8))
    apart = x.flatten()[1:]  # begins between 16 bytes
    if rows > 1:
        got = ops.quantise(apart[None].contiguous(), scale), ops.quantise(apart[None], scale)
        assert torch.equal(got[0].view(torch.uint8), got[1].view(torch.uint8))


def test_quantise_rounds_like_torch_everywhere(place: Place) -> None:
    """Every 16-bit number, so every tie, what is too small, too large, infinite, and no number."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    kind = torch.float16 if place.dtype == torch.float32 else place.dtype
    x = bits.view(kind).to(place.dtype).to(place.device)[None]
    one = scale_of(1.0, place)
    got, expected = ops.quantise(x, one), rounded(x.float(), one)
    number = ~x.isnan()
    assert torch.equal(got.float().isnan(), x.isnan())
    assert torch.equal(got.view(torch.uint8)[number], expected.view(torch.uint8)[number])
    assert got.float()[x == math.inf].item() == 448 and got.float()[x == -math.inf].item() == -448
    again = ops.quantise(got.to(place.dtype), one)  # numbers of E4M3 stay as they are
    assert torch.equal(again.float().nan_to_num(), got.float().nan_to_num())


@pytest.mark.parametrize("cols", [1, 26, 64, 384, 768, 1024, 1028, 4096, 9000])
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("kind", ["layer", "rms", "none"])
@pytest.mark.parametrize("stream", ["norm", "sum"])
def test_norms_and_their_copies(place: Place, rows: int, cols: int, kind: str, stream: str) -> None:
    sixteen_bits(place)
    x, residual, bias = (random(*shape, place=place, seed=i) for i, shape in enumerate([(rows, cols)] * 2 + [(cols,)]))
    gamma, beta = 1 + 0.2 * random(cols, place=place, seed=3), random(cols, place=place, seed=4)
    norm: list[Any] = [None, None, 1e-5] if kind == "none" else [gamma, beta, 1e-5, kind]
    copy = torch.full((rows, cols), 7.0, device=place.device).to(E4M3)
    scale = scale_of(0.0123, place)
    alone = ops.add_bias_input_layernorm(x, bias, residual, *norm, sum=stream == "sum")
    out, total = ops.add_bias_input_layernorm(
        x, bias, residual, *norm, sum=stream == "sum", copy=copy, copy_scale=scale
    )
    if stream == "sum":
        assert torch.equal(total, alone[1]) and out.numel() == 0
    else:
        assert torch.equal(out, alone[0]) and total.numel() == 0
    exact = x.double() + residual.double() + bias.double()
    if kind == "layer":
        exact = reference.layernorm(exact, gamma.double(), beta.double(), 1e-5)
    elif kind == "rms":
        exact = reference.rmsnorm(exact, gamma.double(), beta.double(), 1e-5)
    assert_within_a_step(copy, exact, scale)


def test_copies_of_rows_that_are_no_numbers_or_too_large(place: Place) -> None:
    sixteen_bits(place)
    x = random(6, 64, place=place)
    x[1, 5], x[2], x[3] = math.nan, 0, x[3] * 1e3
    ones, zeros = torch.ones_like(x[0]), torch.zeros_like(x[0])
    copy, scale = torch.zeros(6, 64, device=place.device).to(E4M3), scale_of(1e-3, place)
    out, _ = ops.add_bias_input_layernorm(x, None, None, ones, zeros, 1e-5, sum=False, copy=copy, copy_scale=scale)
    got = copy.float()
    assert got[1].isnan().all() and not got[2].any() and not got[[0, 2, 3, 4, 5]].isnan().any()
    large = out.float().abs() > 0.45
    assert (got[large & ~out.isnan()].abs() == 448).all() and got.nan_to_num().abs().max() == 448


@pytest.mark.parametrize("cols", [1, 26, 312, 768, 4100])
@pytest.mark.parametrize("kind,factor", [("layer", 1.0), ("layer", 8.0), ("rms", 1.0), ("none", 1.0), ("none", 8.0)])
def test_embeddings_and_their_copies(place: Place, cols: int, kind: str, factor: float) -> None:
    sixteen_bits(place)
    word, position = random(50, cols, place=place), random(40, cols, place=place, seed=1)
    gamma, beta = 1 + 0.2 * random(cols, place=place, seed=3), random(cols, place=place, seed=4)
    norm: list[Any] = [None, None, 1e-5] if kind == "none" else [gamma, beta, 1e-5, kind]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (70,), generator=generator).to(place.device)
    places = torch.randint(0, 40, (70,), generator=generator).int().to(place.device)
    places[5] = 40  # no row of the table
    largest = 0.02 if norm[0] is not None else 0.11  # rows that no norm makes small reach 8 * 5
    copy, scale = torch.zeros(70, cols, device=place.device).to(E4M3), scale_of(largest, place)
    alone = ops.embeddings_layernorm(ids, None, None, places, word, position, None, *norm, scale=factor)
    got = ops.embeddings_layernorm(
        ids, None, None, places, word, position, None, *norm, scale=factor, copy=copy, copy_scale=scale
    )
    assert torch.equal(got.nan_to_num(), alone.nan_to_num()) and copy[5].float().isnan().all()
    kept = torch.arange(70) != 5
    words = (word[ids].float() * torch.tensor(factor)).to(place.dtype) if factor != 1 else word[ids]
    exact = words.double()[kept] + position.double()[places.long()[kept]]
    if kind == "layer":
        exact = reference.layernorm(exact, gamma.double(), beta.double(), 1e-5)
    elif kind == "rms":
        exact = reference.rmsnorm(exact, gamma.double(), beta.double(), 1e-5)
    if kind == "layer" and factor == 1:
        assert_within_a_step(copy.float()[kept], exact, scale)
    else:  # of the sums as they were stored
        assert (copy.float()[kept] * scale - got[kept].float()).abs().max() <= got[kept].float().abs().max() / 8


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu", "tanh", "none"])
@pytest.mark.parametrize("rows,cols", [(0, 64), (1, 1), (3, 77), (65, 1536), (700, 24)])
def test_activations_and_gates(place: Place, rows: int, cols: int, activation: str) -> None:
    sixteen_bits(place)
    x, bias, scale = random(rows, 2 * cols, place=place), random(2 * cols, place=place, seed=1), scale_of(0.011, place)
    for b in (bias, None):
        total = x.double() + (0 if b is None else b.double())
        got = ops.add_bias_act(x, b, activation, scale)
        assert_within_a_step(got, reference.activation(total, activation), scale)
        got = ops.add_bias_gate(x, b, activation, scale)
        assert got.shape == (rows, cols)
        assert_within_a_step(got, reference.gate(total, activation), scale)


@pytest.mark.parametrize(
    "lengths",
    [[1], [16, 9, 0, 16], [30] * 500, [5, 1, 0, 17, 64, 2], [128, 100, 3], [190, 70], [512], [300, 511] * 40],
    ids=lambda lengths: f"{len(lengths)} to {max(lengths)}",
)
@pytest.mark.parametrize("heads,head_size", [(3, 32), (2, 64), (2, 128), (2, 80), (1, 256)])
@pytest.mark.parametrize("left,right", [(-1, -1), (-1, 0), (40, 40)])
def test_attention(place: Place, lengths: list[int], heads: int, head_size: int, left: int, right: int) -> None:
    """Stored by the kernel, or quantised behind it: as the result in the stream's type, rounded once more."""
    if place.device == "cpu" and sum(lengths) > 2000:
        pytest.skip("much, for one kernel")
    qkv = random(sum(lengths), 3 * heads * head_size, place=place)
    cu, scale = reference.offsets(lengths, place.device), scale_of(2.0**-8, place)
    words = {"left": left, "right": right}
    plain = ops.attention(qkv, cu, max(lengths), heads, **words)
    got = ops.attention(qkv, cu, max(lengths), heads, **words, out_scale=scale)
    assert got.dtype == E4M3 and got.shape == plain.shape
    # Keys in two parts are added up in float, and rounded to E4M3 alone: ties of 16 bits are none there.
    assert_within_a_step(got, plain.double(), scale, 0.1)


def test_attention_of_keys_that_are_no_numbers(place: Place) -> None:
    qkv, scale = random(300, 3 * 128, place=place), scale_of(2.0**-8, place)
    qkv[7, 330] = math.nan  # a value of the first sequence's second head
    got = ops.attention(qkv, reference.offsets([100, 200], place.device), 200, 2, out_scale=scale).float()
    assert got[:100, 64:].isnan().any(0).sum() == 1 and not got[100:].isnan().any() and not got[:, :64].isnan().any()


def test_what_has_no_kernel_is_refused() -> None:
    x, vector, scale = torch.ones(2, 16), torch.ones(16), torch.ones(1)
    copy = torch.zeros(2, 16).to(E4M3)
    with pytest.raises(RuntimeError, match="expected an operand of byte rows, got e4m3"):
        ops.add_bias_input_layernorm(x, None, None, vector, vector, 1e-5, copy=copy, copy_scale=scale)
    with pytest.raises(RuntimeError, match="add_bias_act on the CPU works in place alone"):
        ops.add_bias_act(x, None, "relu", scale)
    with pytest.raises(RuntimeError, match="expected an operand of plain fp32, got e4m3"):
        ops.add_bias_gate(x, None, "relu", scale)
    with pytest.raises(RuntimeError, match="copy: expected with a scale"):
        ops.add_bias_input_layernorm(x, None, None, vector, vector, 1e-5, copy=copy)
    with pytest.raises(RuntimeError, match=r"copy: expected contiguous Float8_e4m3fn \[2, 16\]"):
        ops.add_bias_input_layernorm(x, None, None, vector, vector, 1e-5, copy=x, copy_scale=scale)
    with pytest.raises(RuntimeError, match="scale: expected one contiguous Float"):
        ops.quantise(x, torch.ones(2))
