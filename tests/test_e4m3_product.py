"""Products of E4M3 matrices with their scales, against the dequantised operands in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from conftest import Place
from own_kernels import VARIANTS, WHOLE_TILES, WORDS, have_warpgroups, multiplies, supports
from torch import Tensor

from ftbert._library import load_library
from ftbert.checkpoint import activations
from ftbert.tuning import Bench, Product

load_library()
ops = torch.ops.ftbert
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
KERNELS = ("wgmma_persistent", "wgmma_tile") if have_warpgroups() else ("mma_tile",)
OF_TILE = "64x32 half", "64x32 k4 half", "64x96 half", "64x32 pair", "64x48 pair"
# Of the instruction's sums, which keep 14 bits: parts of the sums' own size. In the mean 0.0005 to 0.0013 were measured.
MEAN, MOST = 0.003, 0.02


@pytest.fixture
def ada(place: Place) -> Place:
    if place.device == "cpu" or place.dtype == torch.float32 or not multiplies("e4m3"):
        pytest.skip("for 16-bit streams on GPUs from 8.9 on")
    return place


class Case:
    """a [m, k] and weight [n, k] in E4M3, a's scale, one or n of the weight, and a bias."""

    def __init__(self, place: Place, m: int, n: int, k: int, by_rows: bool = True) -> None:
        generator = torch.Generator().manual_seed(m + n + k)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.place, self.m, self.n, self.k = place, m, n, k
        self.a, self.weight = (random(rows, k).to(E4M3).to(place.device) for rows in (m, n))
        self.a_scale = torch.tensor([0.37], device=place.device)
        scales = random(n).exp() if by_rows else torch.tensor([1.7])
        self.weight_scale = (scales / math.sqrt(k)).to(place.device)
        self.bias = random(n).to(place.dtype).to(place.device)

    def call(
        self, activation: str = "none", gated: bool = False, bias: bool = True, out_scale: float | None = None,
        kernel: str = "", variant: str = "",
    ) -> Tensor:  # fmt: skip
        scale = None if out_scale is None else torch.tensor([out_scale], device=self.place.device)
        vector = self.bias if bias else None
        return ops.linear_e4m3(
            self.a, self.a_scale, self.weight, self.weight_scale, vector, self.place.dtype, activation, gated, scale,
            kernel, variant,
        )  # type: ignore[no-any-return]  # fmt: skip

    def sums(self, bias: bool = True) -> Tensor:
        total = self.a.double() @ self.weight.double().T * self.a_scale.double() * self.weight_scale.double()
        return total + self.bias.double() if bias else total

    def noise(self) -> Tensor:
        """The most that a sum may be off, [n]."""
        return MOST * math.sqrt(self.k) * self.a_scale.double() * self.weight_scale.double().expand(self.n)

    def check(self, made: list[Tensor], activation: str, gated: bool, bias: bool, out_scale: float | None) -> None:
        sums, eps = self.sums(bias), self.place.eps
        off = self.noise() + eps * sums.abs()
        if gated:
            want = reference.gate(sums, activation)
            activated = reference.activation(sums[:, ::2], activation).abs()
            off = 1.13 * off[:, ::2] * (sums[:, 1::2].abs() + off[:, 1::2]) + activated * off[:, 1::2]
        else:
            want, off = reference.activation(sums, activation), 1.13 * off
        off = off + 2 * eps * (1 + want.abs())
        if out_scale is not None:
            want = want.clamp(-LARGEST * out_scale, LARGEST * out_scale)
            off = off + 2**-4 * (want.abs() + off) + 2**-10 * out_scale
        for stored in made:
            assert stored.dtype == (self.place.dtype if out_scale is None else E4M3) and stored.shape == want.shape
            difference = (stored.double() * (out_scale or 1) - want).abs()
            assert (difference <= off).all(), f"{(difference / off).max():.3g} of what may be"
            if activation == "none" and not gated and out_scale is None:
                raw = (difference - eps * want.abs()).clamp(min=0) / self.noise() * MOST
                assert raw.pow(2).mean().sqrt() < MEAN


def parts(variant: str) -> int:
    """Of k, whose sums meet in the end."""
    return math.prod(2 if word in ("pair", "shared") else int(word[1:]) if word[0] == "k" else 1 for word in variant.split()[1:])


def able(kernel: str, variant: str, m: int, n: int, k: int) -> bool:
    if kernel == "mma_tile":
        return variant in WHOLE_TILES
    if kernel == "wgmma_persistent":
        return "pairs" not in variant or -(-n // 128) % 2 == 0
    return variant in OF_TILE and m <= 32 * int(variant.split("x")[0]) and -(-k // 128) >= parts(variant)


def variants(case: Case, c: str = "", activation: str = "none", gated: bool = False) -> Iterator[tuple[str, str]]:
    """Kernels and their variants."""
    asked = Product(f"e4m3 e4m3 {c or WORDS[case.place.dtype]}", case.n, case.k, True, activation, gated=gated)
    for kernel, of_kernel in VARIANTS.items():
        for variant in of_kernel:
            found = supports(kernel, variant, asked, case.m)
            assert found == (kernel in KERNELS and able(kernel, variant, case.m, case.n, case.k)), (kernel, variant)
            if found:
                yield kernel, variant


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


SHAPES = [
    (1, 384, 16), (63, 400, 48), (65, 768, 768), (128, 1152, 384), (129, 256, 144), (200, 4096, 768), (300, 1040, 1040),
    (1000, 16, 128), (1027, 2304, 768), (2300, 1040, 208), (4100, 3072, 768), (5000, 768, 3072), (4999, 528, 272),
]  # fmt: skip


@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("activation,gated", [("none", False), ("gelu", False), ("silu", True), ("gelu", True)])
@pytest.mark.parametrize("by_rows", [True, False], ids=["scales by rows", "one scale"])
def test_e4m3_product(ada: Place, m: int, n: int, k: int, activation: str, gated: bool, by_rows: bool) -> None:
    """Sums in the order of k are the same bits whatever kernel and tile; those in parts are the same in each call."""
    case = Case(ada, m, n, k, by_rows)
    for out_scale, bias in itertools.product((None, 0.011), (True, False)):
        found = list(variants(case, "" if out_scale is None else "e4m3", activation, gated))
        made = {one: case.call(activation, gated, bias, out_scale, *one) for one in found}
        case.check(list(made.values()), activation, gated, bias, out_scale)
        whole = [stored for (_, variant), stored in made.items() if parts(variant) == 1]
        assert all(same(whole[0], other) for other in whole)
        assert all(same(stored, case.call(activation, gated, bias, out_scale, *one)) for one, stored in made.items())
        chosen = case.call(activation, gated, bias, out_scale)
        assert any(same(chosen, stored) for stored in made.values())


@pytest.mark.parametrize("m", [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 129, 191, 193, 255, 257, 300])
@pytest.mark.parametrize("n,k", [(16, 16), (48, 1040), (208, 528), (800, 400)])
def test_small_whole_numbers_are_exact(ada: Place, m: int, n: int, k: int) -> None:
    """At edges of tiles in all directions: 14 bits hold every sum, and what follows rounds once."""
    case = Case(ada, m, n, k)
    generator = torch.Generator().manual_seed(m)

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float().cuda()

    case.a, case.weight = whole(1, m, k).to(E4M3), whole(1, n, k).to(E4M3)
    case.a_scale, case.weight_scale = torch.tensor([0.5]).cuda(), 2 ** whole(2, n)
    case.bias = whole(8, n).to(ada.dtype)
    for bias, out_scale in itertools.product((True, False), (None, 0.25)):
        want = case.sums(bias).to(ada.dtype)
        if out_scale is not None:
            want = (want.float() / out_scale).clamp(-LARGEST, LARGEST).to(E4M3)
        for one in variants(case, "" if out_scale is None else "e4m3"):
            got = case.call("none", False, bias, out_scale, *one)
            assert got.dtype == want.dtype and torch.equal(got.float(), want.float()), one


def test_linear_runs_the_kernel_of_the_plan(ada: Place) -> None:
    """Of two whose sums differ: one divides k."""
    for c, out_scale in ((WORDS[ada.dtype], None), ("e4m3", 0.05)):
        for m, n, k, kernel in ((64, 768, 3072, KERNELS[-1]), (16384, 768, 3072, KERNELS[0])):
            case = Case(ada, m, n, k)
            chosen = Bench(Product(f"e4m3 e4m3 {c}", n, k, True), m).chosen()
            assert chosen.kernel == kernel
            wanted = case.call(out_scale=out_scale, kernel=kernel, variant=chosen.variant)
            assert same(case.call(out_scale=out_scale), wanted)


@pytest.mark.parametrize("activation", sorted(set(activations().values())))
@pytest.mark.parametrize("gated", [False, True])
def test_every_activation(ada: Place, activation: str, gated: bool) -> None:
    """Those that no kernel stores in E4M3 come back in the stream's type."""
    case = Case(ada, 300, 512, 192)
    for out_scale in (None, 0.02):
        narrow = out_scale is not None and (gated or activation in ("none", "gelu"))
        got = case.call(activation, gated, True, out_scale)
        case.check([got], activation, gated, True, out_scale if narrow else None)


@pytest.mark.parametrize("out_scale", [1.0, 0.02, 1e-4])
def test_a_result_in_e4m3_is_the_16_bit_one_rounded(ada: Place, out_scale: float) -> None:
    """To the nearest number, and beyond 448 to that."""
    case = Case(ada, 777, 784, 768)
    for one in variants(case, "e4m3"):
        made = case.call("none", False, True, None, *one).float()
        scaled = made * (1 / torch.tensor(out_scale)).item()
        wanted = scaled.clamp(-LARGEST, LARGEST).to(E4M3)
        assert (wanted.float().abs() == LARGEST).any() == (out_scale < 1)
        assert same(case.call("none", False, True, out_scale, *one), wanted)


@pytest.mark.parametrize("out_scale", [None, 0.05])
@pytest.mark.parametrize("activation,gated", [("none", False), ("gelu", False), ("silu", True)])
def test_what_is_no_number_stays_where_it_is(ada: Place, activation: str, gated: bool, out_scale: float | None) -> None:
    case = Case(ada, 200, 256, 544)
    found = list(variants(case, "" if out_scale is None else "e4m3", activation, gated))
    clean = [case.call(activation, gated, True, out_scale, *one).float() for one in found]
    case.a.view(torch.uint8)[7, 3] = case.weight.view(torch.uint8)[20, 500] = 0x7F
    lost = torch.zeros_like(clean[0], dtype=torch.bool)
    lost[7] = lost[:, 10 if gated else 20] = True
    for one, before in zip(found, clean, strict=True):
        got = case.call(activation, gated, True, out_scale, *one).float()
        assert torch.equal(got.isnan(), lost) and torch.equal(got[~lost], before[~lost]), one


@pytest.mark.parametrize("out_scale", [None, 0.05])
def test_rows_of_zeros_and_no_rows(ada: Place, out_scale: float | None) -> None:
    case = Case(ada, 150, 272, 528)
    case.a = torch.zeros_like(case.a)
    for one in variants(case, "" if out_scale is None else "e4m3"):
        got = case.call("none", False, True, out_scale, *one).float() * (out_scale or 1)
        assert (got == got[0]).all() and (got[0] - case.bias.float()).abs().max() <= (2**-4 * 4 if out_scale else 0)
    case.a = case.a[:0]
    assert case.call(out_scale=out_scale).shape == (0, 272)


def test_what_kernels_support(ada: Place) -> None:
    for n, k in ((768, 776), (776, 768)):
        for c, (kernel, of_kernel) in itertools.product((WORDS[ada.dtype], "e4m3"), VARIANTS.items()):
            asked = Product(f"e4m3 e4m3 {c}", n, k, True)
            assert not any(supports(kernel, variant, asked, 64) for variant in of_kernel), (asked, kernel)


def test_operands_that_are_not_aligned_are_refused(ada: Place) -> None:
    case = Case(ada, 16, 64, 512)
    case.weight_scale = torch.ones(65, device="cuda")[1:]
    for kernel, variant in variants(case):
        with pytest.raises(RuntimeError, match="scales aligned to 16 bytes"):
            case.call(kernel=kernel, variant=variant)


@pytest.mark.parametrize("m,kernel", [(64, KERNELS[-1]), (8192, KERNELS[0])])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_the_tuner_times_it(ada: Place, activation: str, m: int, kernel: str) -> None:
    for c in (WORDS[ada.dtype], "e4m3"):
        bench = Bench(Product(f"e4m3 e4m3 {c}", 768, 512, True, activation), m)
        found = [(one.kernel, one.variant) for one in bench.own()]
        assert found == [(k, v) for k in KERNELS for v in VARIANTS[k] if able(k, v, m, 768, 512)]
        assert bench.chosen().kernel == kernel
        for one in bench.own():
            assert bench.error(one) < (0.07 if c == "e4m3" else 0.02) and 0 < bench.microseconds(one) < 1000


def arguments(device: str, dtype: torch.dtype, **others: Any) -> list[Any]:
    numbers = torch.ones(32, 64).to(E4M3).to(device)
    given = {
        "a": numbers, "a_scale": torch.ones(1, device=device), "weight": numbers,
        "weight_scale": torch.ones(32, device=device), "bias": None, "dtype": dtype, "activation": "none",
        "gated": False, "out_scale": None,
    }  # fmt: skip
    return list((given | others).values())


def test_elsewhere_it_is_refused(place: Place) -> None:
    """On the CPU, on GPUs below 8.9, beside fp32."""
    if place.device == "cuda" and place.dtype != torch.float32 and multiplies("e4m3"):
        pytest.skip("is computed")
    words = f"no product on {place.device} multiplies {WORDS[place.dtype]} by a matrix stored as e4m3"
    with pytest.raises(RuntimeError, match=words):
        ops.linear_e4m3(*arguments(place.device, place.dtype))


@pytest.mark.parametrize("others,words", [
    ({"a": torch.ones(32, 64)}, "a: expected float8_e4m3fn"),
    ({"weight": torch.ones(32, 48).to(E4M3)}, "weight: expected contiguous"),
    ({"a_scale": torch.ones(2)}, r"a_scale: expected contiguous Float \[1\] on"),
    ({"weight_scale": torch.ones(31)}, r"weight_scale: expected contiguous Float \[1\] or \[32\]"),
    ({"weight_scale": torch.ones(32).double()}, "weight_scale: expected contiguous Float"),
    ({"out_scale": torch.ones(32)}, "out_scale: expected"),
    ({"bias": torch.ones(31)}, r"bias: expected contiguous Float \[32\]"),
    ({"activation": "mish"}, "unknown activation"),
    ({"weight": torch.ones(31, 64).to(E4M3), "weight_scale": torch.ones(31), "gated": True}, "rows of gate and up in turns"),
])  # fmt: skip
def test_wrong_arguments(others: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        ops.linear_e4m3(*arguments("cpu", torch.float32, **others))
