"""rms_norm, rope and silu_mul, the ops by llama.cpp's names, against float64."""

from __future__ import annotations

import pytest
import torch
from conftest import PLACES, Place, have_gpu
from torch import Tensor
from torch.nn.functional import silu

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert
EACH = pytest.mark.parametrize("place", PLACES, ids=str)


def random(place: Place, *shape: int, seed: int = 0) -> Tensor:
    if place.device == "cuda" and not have_gpu():
        pytest.skip("no GPU")
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(place.device, place.dtype)


def near(got: Tensor, expected: Tensor, place: Place) -> None:
    assert got.dtype == place.dtype
    scale = expected.abs().max().clamp(min=1)
    assert (got.double().cpu() - expected.double().cpu()).abs().max() <= 4 * place.eps * scale


@EACH
@pytest.mark.parametrize("rows,cols", [(1, 64), (3, 576), (7, 4096), (0, 64)])
def test_rms_norm(rows: int, cols: int, place: Place) -> None:
    x, weight = 3 * random(place, rows, cols), random(place, cols, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = ops.rms_norm(x, weight, 1e-5)
    near(got, expected, place) if rows else None
    assert got.shape == (rows, cols)


@EACH
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads,size", [(1, 32), (9, 64), (4, 128)])
def test_rope(heads: int, size: int, interleaved: bool, place: Place) -> None:
    x, positions = random(place, 5, heads, size), torch.tensor([0, 7, 3, 3, 99], dtype=torch.int32)
    frequencies = 10000.0 ** (-torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    table = ops.rotary_table(frequencies, 1.0, 100).to(place.device)
    angles = (positions[:, None].double() * frequencies)[:, None]
    wide = x.double().cpu()
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    expected = torch.stack(turned, -1).flatten(2) if interleaved else torch.cat(turned, -1)
    near(ops.rope(x, positions.to(place.device), table, interleaved), expected, place)


@EACH
def test_silu_mul(place: Place) -> None:
    x = 2 * random(place, 6, 192)
    near(ops.silu_mul(x), silu(x[:, ::2].double()) * x[:, 1::2].double(), place)


def test_what_does_not_fit_is_refused() -> None:
    x, table = torch.ones(2, 3, 8), ops.rotary_table(torch.ones(4, dtype=torch.float64), 1.0, 10)
    with pytest.raises(RuntimeError, match=r"table: expected contiguous Float \[positions, head_size/2, 2\]"):
        ops.rope(x, torch.zeros(2, dtype=torch.int32), table[:, :3].contiguous())
    with pytest.raises(RuntimeError, match="positions"):
        ops.rope(x, torch.tensor([0, 10], dtype=torch.int32), table)
    with pytest.raises(RuntimeError, match="weight"):
        ops.rms_norm(torch.ones(2, 8), torch.ones(7))
    with pytest.raises(RuntimeError, match="gate and up in turns"):
        ops.silu_mul(torch.ones(2, 7))
