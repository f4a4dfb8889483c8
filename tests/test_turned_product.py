"""Products of queries, keys and values that norm and turn heads before they round, by each kernel that contains it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place
from heads import NORMS, Norm, as_rotary, frequencies, norm_arguments
from own_kernels import VARIANTS, WORDS, have_warpgroups, supports, tile_kernel
from torch import Tensor

from ftbert._library import load_library
from ftbert.tuning import Product

load_library()
ops = torch.ops.ftbert
ALL = [(kernel, variant) for kernel in VARIANTS for variant in VARIANTS[kernel]]
# Of these a warp has whole rows of a tile.
WHOLE = [("wgmma_persistent", "128x128"), ("wgmma_persistent", "128x128 pairs")] + [("wgmma_tile", tile) for tile in ("64x64 half", "128x64", "128x128", "128x192")]
WHOLE_64 = [("mma_tile", tile) for tile in ("64x64 shared", "64x128", "96x128", "128x128")]  # heads of 64
POSITIONS = 50


@pytest.fixture
def turning(place: Place) -> Place:
    if place.device == "cpu" or place.dtype == torch.float32 or not tile_kernel():
        pytest.skip("for 16-bit elements on GPUs with kernels that turn heads")
    return place


def able(size: int, dims: int, interleaved: bool, norm: Norm) -> list[tuple[str, str]]:
    """wgmma_persistent turns whole heads in pairs half a head apart, behind RMSNorm or no norm."""
    if not have_warpgroups():
        return [one for one in WHOLE_64 if one in ALL and size == 64]
    columns = {one: int(one[1].split()[0].split("x")[1]) for one in WHOLE if one in ALL}
    in_registers = dims == size and not interleaved and norm[0] != "layer" and not norm[1]
    able = [one for one in columns if in_registers or one[0] != "wgmma_persistent"]
    return [one for one in able if size in (64, 128) and columns[one] % size == 0]


class Case:
    """qkv = a @ weight^T + bias, and what becomes of it."""

    def __init__(self, place: Place, m: int, heads: int, kv_heads: int, size: int, dims: int, norm: Norm, k: int = 200) -> None:
        generator = torch.Generator().manual_seed(m + size)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(place.device, place.dtype)

        n = (heads + 2 * kv_heads) * size
        self.place, self.heads, self.kv_heads, self.dims, self.norm = place, heads, kv_heads, dims, norm
        self.a, self.weight, self.bias = random(m, k), random(n, k) / math.sqrt(k), random(n)
        self.weights = [1 + 0.2 * random(size) for _ in range(4)]
        self.positions = torch.randint(0, POSITIONS, (m,), generator=generator).int().to(place.device)
        self.table = ops.rotary_table(frequencies(dims).to(place.device), 1.0, POSITIONS) if dims else None
        self.e4m3: tuple[Tensor, Tensor, dict[str, Any]] | None = None

    def quantise(self) -> None:
        """From here on a and weight hold numbers of E4M3, and the kernels read these."""
        a_scale = torch.tensor([0.013], device=self.place.device)
        weight_scale = self.weight.float().abs().amax(1) / 448
        a = (self.a.float() / a_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight = (self.weight.float() / weight_scale[:, None]).to(torch.float8_e4m3fn)
        self.e4m3 = a, weight, {"a_scale": a_scale, "weight_scale": weight_scale, "dtype": self.place.dtype}
        self.a, self.weight = a.double() * a_scale.double(), weight.double() * weight_scale.double()[:, None]

    def run(self, kernel: str, variant: str, bias: Tensor | None, interleaved: bool) -> Any:
        positions = self.positions if self.dims else None
        a, weight, scales = (self.a, self.weight, {}) if self.e4m3 is None else self.e4m3
        call = (a, weight, bias, positions, self.table, self.heads, kernel, variant, self.kv_heads, interleaved)
        return ops.linear_turned(*call, *norm_arguments(self.norm, self.weights), **scales)

    def want(self, bias: Tensor | None, interleaved: bool) -> Tensor:
        qkv = self.a.double() @ self.weight.double().T + (0 if bias is None else bias.double())
        angles = self.positions.double()[:, None] * frequencies(self.dims).to(self.place.device)
        return as_rotary(qkv, self.heads, self.kv_heads, angles, interleaved, self.norm, self.weights)

    def check(self, interleaved: bool, with_bias: bool = True) -> None:
        """By every variant that is able to: one rounding, as if the sums had not been stored in between."""
        m, (n, k) = self.a.shape[0], self.weight.shape
        bias = self.bias if with_bias else None
        kernels = able(n // (self.heads + 2 * self.kv_heads), self.dims, interleaved, self.norm)
        if not kernels:
            pytest.skip("no kernel of this GPU turns such heads")
        want, ran = self.want(bias, interleaved), 0
        for kernel, variant in kernels:
            if not supports(kernel, variant, Product(WORDS[self.place.dtype], n, k, with_bias), m):
                continue
            got, ran = self.run(kernel, variant, bias, interleaved), ran + 1
            # What is rounded before gamma may come out a bit apart.
            atol = 2e-4 + (4 * self.place.eps if self.norm[3] else 0)
            assert_close(got, want, atol=atol, rtol=0.6 * self.place.eps, what=f"{kernel} {variant}")
            assert torch.equal(got, self.run(kernel, variant, bias, interleaved)), (kernel, variant)
        assert ran


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size,dims", [(64, 64), (64, 32), (64, 24), (64, 8), (64, 0), (128, 128), (128, 64), (128, 72), (128, 0)])
def test_rules(turning: Place, size: int, dims: int, interleaved: bool, norm: Norm) -> None:
    Case(turning, 70, 3, 1, size, dims, norm).check(interleaved)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (12, 12), (4, 2), (16, 8), (7, 1)])
@pytest.mark.parametrize("m", [1, 15, 64, 130, 1000, 2049, 4500])
@pytest.mark.parametrize("size", [64, 128])
def test_rows_and_heads(turning: Place, m: int, heads: int, kv_heads: int, size: int) -> None:
    """Tiles of queries and keys, of keys and values, and past the last of them; many tiles a block."""
    Case(turning, m, heads, kv_heads, size, size, NORMS[3]).check(False)
    Case(turning, m, heads, kv_heads, size, size, NORMS[0], k=64).check(False, with_bias=False)
    if m < 4096:  # up to there wgmma_tile runs
        Case(turning, m, heads, kv_heads, size, size // 2, NORMS[0], k=64).check(True, with_bias=False)


@pytest.mark.parametrize("heads,kv_heads", [(12, 12), (4, 2), (7, 1)])
@pytest.mark.parametrize("m", [1, 130, 2049, 4500])
@pytest.mark.parametrize("size", [64, 128])
def test_operands_in_e4m3(turning: Place, m: int, heads: int, kv_heads: int, size: int) -> None:
    """As of the product and `rotary` behind it, but for the rounding in between: the sums of E4M3 are not exact."""
    if not have_warpgroups():
        pytest.skip("no GPU with products of E4M3")
    for norm in (NORMS[0], NORMS[3], NORMS[5]):
        case = Case(turning, m, heads, kv_heads, size, size, norm, k=208)
        case.quantise()
        assert case.e4m3 is not None
        a, weight, scales = case.e4m3
        qkv = ops.linear_e4m3(a, scales["a_scale"], weight, scales["weight_scale"], case.bias, turning.dtype, "none")
        rest = norm_arguments(norm, case.weights)
        want = ops.rotary(qkv, case.positions, case.table, heads, kv_heads, False, *rest)
        ran = 0
        for variant in VARIANTS["wgmma_persistent"]:
            asked = Product(f"e4m3 e4m3 {WORDS[turning.dtype]}", weight.shape[0], 208, True)
            if not supports("wgmma_persistent", variant, asked, m):
                continue
            got, ran = case.run("wgmma_persistent", variant, case.bias, False), ran + 1
            assert_close(got, want.double(), atol=8 * turning.eps, rtol=4 * turning.eps, what=variant)
            assert torch.equal(got, case.run("wgmma_persistent", variant, case.bias, False)), variant
        assert ran
    with pytest.raises(RuntimeError, match="e4m3|cannot"):
        case.run("wgmma_tile", "128x64", case.bias, False)


def test_a_position_outside_of_the_table(turning: Place) -> None:
    for norm, dims in ((NORMS[0], 32), (NORMS[3], 32), (NORMS[0], 64), (NORMS[3], 64)):
        case = Case(turning, 90, 2, 1, 64, dims, norm)
        inside = torch.ones(90, dtype=torch.bool, device=turning.device)
        outside = [0, 7, 8, 63, 64, 89]
        inside[outside] = False
        case.positions[outside] = torch.tensor([-1, POSITIONS, 2**31 - 1, -(2**31), POSITIONS, -1], dtype=torch.int32, device=turning.device)
        for kernel, variant in able(64, dims, False, norm):
            got = case.run(kernel, variant, case.bias, False)
            want = case.want(case.bias, False)
            assert bool(got[~inside, :192].isnan().all()), (kernel, variant)
            for rows, columns in ((inside, slice(0, 256)), (~inside, slice(192, 256))):
                assert_close(got[rows][:, columns], want[rows][:, columns], atol=2e-4, rtol=0.6 * turning.eps, what=variant)


def test_what_they_refuse(turning: Place) -> None:
    """Tiles without whole heads, other sizes of heads, pairs whose numbers no unit of four holds; rules that are not for
    registers."""
    for size, dims in ((64, 64), (128, 128), (32, 32), (96, 96), (64, 20), (64, 32)):
        for interleaved, norm in ((False, NORMS[0]), (True, NORMS[0]), (False, NORMS[1])):
            case = Case(turning, 64, 4, 4, size, dims, norm)
            for kernel, variant in ALL:
                if dims % 8 == 0 and (kernel, variant) in able(size, dims, interleaved, norm):
                    continue
                with pytest.raises(RuntimeError, match="cannot"):
                    case.run(kernel, variant, case.bias, interleaved)
