"""The CPU's int8 product against exact sums in float64, in which all of them fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from byte_row_parts import byte_rows
from compare import assert_close
from torch import Tensor

from ftbert._library import build_info, load_library

load_library()
ops = torch.ops.ftbert
ACTIVATIONS = ["none", "gelu", "gelu_tanh", "relu", "silu", "tanh"]
MOST_DEPTH = 2**31 // (255 * 128)


def have_int8() -> bool:
    try:
        product(torch.zeros(1, 16), torch.zeros(1), torch.zeros(1), torch.zeros(1, 16), torch.ones(1))
    except RuntimeError as error:
        assert "stored as int8 without" in str(error), error
        return False
    return True


def product(
    q: Tensor, scale: Tensor, zero: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None,
    activation: str = "none", gated: bool = False,
) -> Tensor:  # fmt: skip
    rows = byte_rows(q, scale, zero)
    return ops.int8_product(rows, weight.to(torch.int8), scales.float(), bias, activation, gated)  # type: ignore[no-any-return]


def numbers(m: int, n: int, k: int, weight: int = 127) -> dict[str, Tensor]:
    """The whole range of bytes, scales that give results of order 1."""
    random = torch.Generator().manual_seed(m * n + k)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=random)

    return {
        "q": whole(0, 255, m, k), "scale": torch.rand(m, generator=random) / 100, "zero": whole(0, 255, m),
        "weight": whole(-weight, weight, n, k), "scales": torch.rand(n, generator=random) / math.sqrt(k) / 50,
    }  # fmt: skip


def sums(q: Tensor, zero: Tensor, weight: Tensor) -> Tensor:
    return (q - zero[:, None]).double() @ weight.double().T


def ones(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**case, "scale": torch.ones_like(case["scale"]), "scales": torch.ones_like(case["scales"])}


pytestmark = pytest.mark.skipif(
    not have_int8(), reason=f"{build_info()['cpu_isa']} has no instructions for int8 products"
)


@pytest.mark.parametrize("n,k", [(1, 16), (7, 63), (32, 64), (33, 65), (70, 500), (100, 1030), (64, 2100)])
def test_sums_are_exact(n: int, k: int) -> None:
    for m in (*range(1, 71), 200):
        case = ones(numbers(m, n, k, weight=min(127, 2**24 // (255 * k))))
        assert torch.equal(product(**case).double(), sums(case["q"], case["zero"], case["weight"])), m


@pytest.mark.parametrize("m,n,k", [(1, 34, 3072), (300, 64, 768), (29, 100, 4100), (3, 33, MOST_DEPTH)])
def test_sums_that_floats_do_not_hold_are_rounded_once(m: int, n: int, k: int) -> None:
    case = ones(numbers(m, n, k))
    assert torch.equal(product(**case), sums(case["q"], case["zero"], case["weight"]).float())


@pytest.mark.parametrize("q,zero", [(255, 0), (255, 255), (0, 255), (0, 0), (255, 128)])
@pytest.mark.parametrize("weight", [-128, -127, 127])
def test_the_largest_sums_do_not_overflow(q: int, zero: int, weight: int) -> None:
    m, n, k = 17, 33, MOST_DEPTH
    one = torch.ones(m)
    got = product(torch.full((m, k), q), one, one * zero, torch.full((n, k), weight), torch.ones(n))
    assert torch.equal(got, torch.full((m, n), float((q - zero) * weight * k)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m,n,k", [(1, 2, 16), (13, 34, 100), (200, 96, 768), (70, 130, 1100)])
def test_what_follows_the_sums(m: int, n: int, k: int, activation: str, gated: bool) -> None:
    case = numbers(m, n, k)
    plain = sums(case["q"], case["zero"], case["weight"]) * case["scale"].double()[:, None] * case["scales"].double()
    for bias in (torch.randn(n), None):
        x = plain + (0 if bias is None else bias.double())
        expected = reference.gate(x, activation) if gated else reference.activation(x, activation)
        assert_close(product(**case, bias=bias, activation=activation, gated=gated), expected, atol=2e-6, rtol=2e-6)


def test_rows_stand_alone() -> None:
    """A row that is no number stays one, one of zeros gives the bias, and neither changes its neighbours."""
    case, bias = numbers(40, 70, 130), torch.randn(70)
    before = product(**case, bias=bias)
    case["scale"][3], case["scale"][20] = math.nan, 0.0
    case["q"][20] = case["zero"][20] = 0
    after = product(**case, bias=bias)
    assert after[3].isnan().all() and torch.equal(after[20], bias)
    others = [i for i in range(40) if i not in (3, 20)]
    assert torch.equal(after[others], before[others])
    for activation in ACTIVATIONS:
        assert product(**case, activation=activation)[3].isnan().all()
        assert product(**case, activation=activation, gated=True)[3].isnan().all()
    for first, last in ((0, 1), (5, 22), (7, 40)):  # the rows behind are not read: they are no numbers
        among = byte_rows(case["q"], torch.full((40,), math.nan), case["zero"])
        among[first:last] = byte_rows(case["q"], case["scale"], case["zero"])[first:last]
        got = ops.int8_product(among[first:last], case["weight"].to(torch.int8), case["scales"], bias, "none", False)
        assert torch.equal(got, after[first:last]) or got[~got.isnan()].equal(after[first:last][~got.isnan()])


@pytest.mark.parametrize("m,n,k", [(1, 1000, 600), (16, 768, 768), (500, 96, 300), (500, 2304, 1100)])
def test_threads_change_nothing(m: int, n: int, k: int) -> None:
    case, before = numbers(m, n, k), torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(product(**case, activation="gelu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_no_rows() -> None:
    assert product(**numbers(0, 34, 20)).shape == (0, 34)
    assert product(**numbers(0, 34, 20), gated=True).shape == (0, 17)


def right() -> list[Any]:
    return [torch.zeros(2, 128, dtype=torch.uint8), torch.zeros(6, 60, dtype=torch.int8), torch.ones(6), None, "none", False]


@pytest.mark.parametrize("place,value,words", [
    (0, torch.zeros(2, 64, dtype=torch.uint8), r"rows: expected contiguous uint8 \[m, 128\] for a k of 60, got Byte \[2, 64\]"),
    (0, torch.zeros(2, 128), "rows: expected contiguous uint8"),
    (1, torch.zeros(6, 60), r"weight: expected int8 \[n, k\], k at most 65793, got Float"),
    (1, torch.zeros(6, MOST_DEPTH + 1, dtype=torch.int8), "k at most 65793"),
    (1, torch.zeros(0, 60, dtype=torch.int8), "weight: expected int8"),
    (2, torch.ones(5), r"scales: expected contiguous float32 \[6\], got Float \[5\]"),
    (3, torch.ones(7), r"bias: expected contiguous Float \[6\]"),
    (4, "mish", "unknown activation 'mish'"),
])  # fmt: skip
def test_what_is_wrong_is_named(place: int, value: Any, words: str) -> None:
    assert ops.int8_product(*right()).shape == (2, 6)
    arguments = right()
    arguments[place] = value
    with pytest.raises(RuntimeError, match=words):
        ops.int8_product(*arguments)


def test_a_gate_wants_pairs() -> None:
    case = numbers(2, 5, 20)
    with pytest.raises(RuntimeError, match="rows of gate and up in turns"):
        product(**case, gated=True)
