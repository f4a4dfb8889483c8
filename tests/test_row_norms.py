"""LayerNorm and RMSNorm of training against float64: results and gradients of every width, type and layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn
from training_norms import BF16, EPS, F16, F32, F64, check_gradients, exact, leaves, random

from ftbert import norm

# Of one element an access, of four, and of 16 bytes; widths that fill a shape and that do not; rows that no register holds.
COLS = [1, 7, 64, 100, 128, 256, 384, 500, 512, 768, 1001, 1024, 1152, 1536, 2048, 3000, 4096, 5001, 8192, 16384, 40_000]
# x, weight and result (None: x's).
TYPES = [(F32, F32, None), (F16, F16, None), (BF16, BF16, None), (BF16, F32, None), (F16, F32, F32), (BF16, F32, F32), (F32, F32, BF16), (F32, F16, F16)]
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", None: "x"}


def one_way_on_cpu(device: str, cols: int) -> None:
    if device == "cpu" and cols not in (7, 768, 1001):
        pytest.skip("on the CPU all widths are computed alike")


def some_rows(cols: int) -> int:
    return min(130, (1 << 17) // cols + 1)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("efficient", [False, True], ids=["from-x", "from-y"])
def test_gradients_of_every_width(device: str, cols: int, kind: str, efficient: bool) -> None:
    one_way_on_cpu(device, cols)
    if kind == "layer" and cols == 1:
        pytest.skip("LayerNorm of one number is 0")
    for types in TYPES[:3]:
        check_gradients(device, types, some_rows(cols), cols, kind, efficient)


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(NAMES[one] for one in types))
@pytest.mark.parametrize("cols", [100, 768, 1001, 1024, 8192, 20_000])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("efficient", [False, True], ids=["from-x", "from-y"])
def test_gradients_of_every_type(device: str, types: Any, cols: int, kind: str, efficient: bool) -> None:
    one_way_on_cpu(device, cols)
    check_gradients(device, types, some_rows(cols), cols, kind, efficient)
    check_gradients(device, types, 3, cols, kind, efficient, affine=False)


@pytest.mark.parametrize("x,residual", [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F16)], ids=str)
@pytest.mark.parametrize("cols", [64, 768, 1001, 4096, 8192, 20_000])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("efficient", [False, True], ids=["from-x", "from-y"])
def test_gradients_through_the_sum(device: str, x: Any, residual: Any, cols: int, kind: str, efficient: bool) -> None:
    one_way_on_cpu(device, cols)
    check_gradients(device, (x, x, None), some_rows(cols), cols, kind, efficient, residual=residual)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda dtype: NAMES[dtype])
@pytest.mark.parametrize("cols", [8192, 16384, 16392, 32_768, 32_776, 40_000])
def test_rows_at_the_limits_of_shared_memory(device: str, cols: int, dtype: torch.dtype) -> None:
    """What a call reads, a residual or the sum's gradient too, says whether a row finds room. On GPUs with more rows
    than multiprocessors, so that several of them share one."""
    rows = 3 if device == "cpu" else max(150, (1 << 22) // cols)
    for kind, efficient, (residual, read) in itertools.product(("layer", "rms"), (False, True), ((None, False), (dtype, False), (dtype, True))):
        check_gradients(device, (dtype, dtype, None), rows, cols, kind, efficient, residual=residual, sum_is_read=read)


@pytest.mark.parametrize("rows", [1, 2, 31, 133, 4097])
@pytest.mark.parametrize("cols", [96, 256, 1024])
def test_any_number_of_rows(device: str, rows: int, cols: int) -> None:
    if device == "cpu" and rows * cols > 400_000:
        pytest.skip("on the CPU all widths are computed alike")
    for kind, efficient in (("layer", False), ("rms", True)):
        check_gradients(device, (F32, F32, None), rows, cols, kind, efficient)
        check_gradients(device, (BF16, BF16, None), rows, cols, kind, efficient)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("cols", [64, 768, 8192])
def test_bases_between_boundaries(device: str, at: int, cols: int) -> None:
    for types in TYPES[:3]:
        for kind, efficient in (("layer", True), ("rms", False)):
            check_gradients(device, types, 9, cols, kind, efficient, at=at)


@pytest.mark.parametrize("offset", [1.0, -0.5])
@pytest.mark.parametrize("efficient", [False, True])
def test_weight_offset(device: str, offset: float, efficient: bool) -> None:
    for types in TYPES[:4]:
        check_gradients(device, types, 40, 640, "rms", efficient, offset=offset)


@pytest.mark.parametrize("shape,normalized", [((4, 5, 6), [5, 6]), ((2, 3, 4, 8), [8]), ((12,), [12]), ((3, 2, 7), [3, 2, 7])])
def test_shapes(device: str, shape: Any, normalized: Any) -> None:
    x, w, b = leaves(random(*shape, device=device), random(*normalized, device=device, seed=1), random(*normalized, device=device, seed=2))
    y = norm.fused_layer_norm_affine(x, w, b, normalized, EPS)
    wanted = nn.functional.layer_norm(x, normalized, w, b, EPS)
    assert_close(y, wanted, atol=1e-5)
    grad = random(*shape, device=device, seed=3)
    for one, other in zip(torch.autograd.grad(y, (x, w, b), grad), torch.autograd.grad(wanted, (x, w, b), grad), strict=True):
        assert_close(one, other, atol=2e-5)
    y = norm.fused_rms_norm_affine(x, w, normalized, None)
    assert_close(y, nn.functional.rms_norm(x, normalized, w), atol=1e-5)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.transpose(0, 1), lambda t: t[::2], lambda t: t[..., ::2], lambda t: t[:, :1].expand(-1, 6, -1), lambda t: t.permute(2, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_any_layout_of_rows_and_gradients(device: str, layout: int) -> None:
    base = random(8, 6, 64, device=device).requires_grad_()
    x = LAYOUTS[layout](base)
    weight = random(x.shape[-1], device=device, seed=1).requires_grad_()
    grad = LAYOUTS[layout](random(8, 6, 64, device=device, seed=2))
    for efficient in (False, True):
        got = norm.fused_rms_norm_affine(x, weight, x.shape[-1], EPS, efficient)
        wanted = exact(x.double(), weight.double(), None, "rms", EPS)
        assert_close(got, wanted, atol=1e-5)
        for one, other in zip(torch.autograd.grad(got, (base, weight), grad, retain_graph=True), torch.autograd.grad(wanted, (base, weight), grad.double(), retain_graph=True), strict=True):
            assert_close(one, other, atol=1e-4)
        torch.autograd.grad(got.sum(), base, retain_graph=True)  # an expanded gradient


@pytest.mark.parametrize("cols", [768, 5001])
def test_rows_far_from_zero_and_constant_rows(device: str, cols: int) -> None:
    x = random(4, cols, device=device) + 1000
    x[1] = 3.0
    y = norm.fused_layer_norm(x, cols, EPS)
    assert_close(y[[0, 2, 3]], exact(x.double(), None, None, "layer", EPS)[[0, 2, 3]], atol=2e-3)
    assert y[1].abs().max() < 1e-3
    zeros = torch.zeros(3, cols, device=device, requires_grad=True)
    out = norm.fused_rms_norm(zeros, cols, EPS)
    (grad,) = torch.autograd.grad(out.sum(), zeros)
    assert not out.any() and torch.allclose(grad, torch.full_like(grad, EPS**-0.5))


def test_not_a_number_stays_in_its_row(device: str) -> None:
    x = random(9, 768, device=device, dtype=BF16)
    x[4, 7] = float("nan")
    y, rest = norm.fused_layer_norm(x, 768), torch.arange(9) != 4
    assert y[4].isnan().all() and torch.equal(y[rest], norm.fused_layer_norm(x[rest], 768))


def test_what_does_not_ask_for_gradients(device: str) -> None:
    """Frozen weights (LoRA), frozen rows, and a sum or a result that nobody reads."""
    x, r, w, b = leaves(*(random(5, 64, device=device, seed=i) for i in range(2)), *(random(64, device=device, seed=i) for i in (2, 3)))
    full = torch.autograd.grad(norm.fused_layer_norm_affine(x, w, b, 64).sum(), (x, w, b))
    (grad,) = torch.autograd.grad(norm.fused_layer_norm_affine(x, w.detach(), b.detach(), 64).sum(), x)
    assert torch.equal(grad, full[0])
    for asked, wanted in ((w, full[1]), (b, full[2])):
        frozen = [one if one is asked else one.detach() for one in (w, b)]
        assert torch.equal(torch.autograd.grad(norm.fused_layer_norm_affine(x.detach(), *frozen, 64).sum(), asked)[0], wanted)
    y, total = norm.fused_add_layer_norm(x, r, w, b)
    (of_sum,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    assert torch.equal(of_sum, torch.ones_like(x))
    (of_y,) = torch.autograd.grad(y.sum(), r, retain_graph=True)
    both = torch.autograd.grad(y.sum() + total.sum(), (x, r))
    assert_close(both[0], of_y + of_sum, atol=1e-6)
    assert torch.equal(*both)
    assert not norm.fused_layer_norm_affine(x.detach(), w.detach(), b.detach(), 64).requires_grad


def test_float64(device: str) -> None:
    x, w, b = leaves(random(4, 33, device=device, dtype=F64), random(33, device=device, dtype=F64, seed=1), random(33, device=device, dtype=F64, seed=2))
    for efficient in (False, True):
        torch.autograd.gradcheck(lambda *given, e=efficient: norm.fused_layer_norm_affine(*given, 33, EPS, e), (x, w, b))
        torch.autograd.gradcheck(lambda *given, e=efficient: norm.fused_rms_norm_affine(*given, 33, EPS, e), (x, w))
        residual = random(4, 33, device=device, dtype=F64, seed=3).requires_grad_()
        torch.autograd.gradcheck(lambda *given, e=efficient: norm.fused_add_layer_norm(*given, EPS, e), (x, residual, w, b))
