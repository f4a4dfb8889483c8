"""LayerNorm and RMSNorm of training: results and gradients against plain torch in float64, and what users do with them."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ftbert import norm
from ftbert.norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, patch, unpatch

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Of one element an access, of four, and of 16 bytes; widths that fill a shape and that do not; rows that no register holds.
COLS = [1, 7, 64, 100, 128, 256, 384, 500, 512, 768, 1001, 1024, 1152, 1536, 2048, 3000, 4096, 5001, 8192, 16384, 40_000]
# x, weight and result (None: x's).
TYPES = [(F32, F32, None), (F16, F16, None), (BF16, BF16, None), (BF16, F32, None), (F16, F32, F32), (BF16, F32, F32), (F32, F32, BF16), (F32, F16, F16)]
NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16", F64: "fp64", None: "x"}
EPS = 1e-5


def random(*shape: int, device: str, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def vectors(cols: int, kind: str, device: str, dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor | None]:
    """Weights of either sign, none near 0."""
    weight = 1 + 0.3 * random(cols, device="cpu", seed=3).clamp(-2, 2)
    weight[::5] *= -1
    bias = random(cols, device=device, dtype=dtype, seed=4) if kind == "layer" else None
    return (weight - offset).to(dtype).to(device), bias


def exact(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, offset: float = 0.0) -> Tensor:
    """In float64, differentiable."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias


def doubles(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def leaves(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def unit(*dtypes: torch.dtype | None) -> float:
    return max(torch.finfo(one).eps for one in dtypes if one is not None)


def call(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, kind: str, efficient: Any = False, offset: float = 0.0, dtype: Any = None) -> Any:
    """(y, sum) by the inner function, which the public ones call."""
    from ftbert.norm.functional import norm as any_norm

    return any_norm(x, residual, weight, bias, x.shape[-1:], EPS, kind, efficient, offset, dtype)


def check_gradients(
    device: str, types: tuple[Any, Any, Any], rows: int, cols: int, kind: str, efficient: bool, offset: float = 0.0,
    residual: torch.dtype | None = None, affine: bool = True, at: int = 0,
) -> None:  # fmt: skip
    """Result and all gradients. at: how many elements each base lies behind a boundary."""
    of_x, of_weight, of_y = types

    def placed(t: Tensor) -> Tensor:
        room = torch.empty(t.numel() + at, dtype=t.dtype, device=t.device)
        room[at:] = t.flatten()
        return room[at:].view(t.shape).requires_grad_()

    x = placed(random(rows, cols, device=device, dtype=of_x, scale=2) + 1)
    r = None if residual is None else placed(random(rows, cols, device=device, dtype=residual, seed=1))
    weight, bias = vectors(cols, kind, device, of_weight, offset) if affine else (None, None)
    weight, bias = (None if one is None else placed(one) for one in (weight, bias))
    y, total = call(x, r, weight, bias, kind, efficient, offset, of_y)
    inputs = [one for one in (x, r, weight, bias) if one is not None]
    of_sum = of_x if r is None else torch.promote_types(of_x, residual)
    assert y.dtype == (of_y or of_sum) and y.shape == x.shape
    grad = random(rows, cols, device=device, dtype=y.dtype, seed=5)
    grad_sum = None if r is None else random(rows, cols, device=device, dtype=of_sum, seed=6)
    got = torch.autograd.grad([y] if r is None else [y, total], inputs, [grad] if r is None else [grad, grad_sum])

    xd, rd, wd, bd = doubles(x, r, weight, bias)
    sd = xd
    if r is not None:
        assert torch.equal(total, x + r)
        sd = total.detach().double() + (xd + rd - (xd + rd).detach())  # as it is stored, for it is what is normalised
    yd = exact(sd, wd, bd, kind, EPS, offset)
    if r is not None:
        yd = yd + 0 * sd
    double = [one for one in (xd, rd, wd, bd) if one is not None]
    outs, grads = ([yd], [grad.double()]) if r is None else ([yd, sd], [grad.double(), grad_sum.double()])
    wanted = torch.autograd.grad(outs, double, grads)
    e = unit(y.dtype)
    assert_close(y, yd, atol=8 * e if y.dtype != F32 else 2e-5, rtol=2 * e, what="y")
    # From the result each number of a row comes back with the result's rounding, relative to weight and bias.
    restored = (8 if bias is not None else 4) * e if efficient else 0.0
    rstd = float((sd.var(-1, correction=0) if kind == "layer" else sd.square().mean(-1)).add(EPS).rsqrt().max().detach())
    for one, true, leaf in zip(got, wanted, inputs, strict=True):
        assert one.dtype == leaf.dtype and one.shape == leaf.shape
        own = unit(leaf.dtype)
        if one.dim() == 2:
            atol = (8 * max(own, 1e-6) + 8 * restored) * max(1.0, rstd)
            assert_close(one, true, atol=atol + (own * 8 if r is not None else 0), rtol=2 * own, what="rows")
        else:
            size = math.sqrt(rows)
            assert_close(one, true, atol=(2e-5 + 4 * restored) * size + own, rtol=2 * own + 1e-5, what="vector")


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


@pytest.mark.parametrize("rows", [1, 2, 31, 133, 4097])
@pytest.mark.parametrize("cols", [96, 256, 1024])
def test_any_number_of_rows(device: str, rows: int, cols: int) -> None:
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


def test_no_rows(device: str) -> None:
    x, w, b = leaves(torch.zeros(0, 3, 64, device=device), torch.ones(64, device=device), torch.ones(64, device=device))
    for efficient in (False, True):
        y = norm.fused_layer_norm_affine(x, w, b, 64, memory_efficient=efficient)
        grads = torch.autograd.grad(y.sum(), (x, w, b))
        assert y.shape == x.shape == grads[0].shape and not grads[1].any() and not grads[2].any()


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


@pytest.mark.parametrize("kind,efficient", [("layer", False), ("rms", True)])
def test_two_runs_are_the_same_bits(device: str, kind: str, efficient: bool) -> None:
    def run() -> list[Tensor]:
        x, w = leaves(random(3000, 768, device=device, dtype=BF16), random(768, device=device, dtype=BF16, seed=1))
        y, _ = call(x, None, w, None, kind, efficient)
        y.backward(random(3000, 768, device=device, dtype=BF16, seed=2))
        return [y, x.grad, w.grad]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_float64(device: str) -> None:
    x, w, b = leaves(random(4, 33, device=device, dtype=F64), random(33, device=device, dtype=F64, seed=1), random(33, device=device, dtype=F64, seed=2))
    for efficient in (False, True):
        torch.autograd.gradcheck(lambda *given, e=efficient: norm.fused_layer_norm_affine(*given, 33, EPS, e), (x, w, b))
        torch.autograd.gradcheck(lambda *given, e=efficient: norm.fused_rms_norm_affine(*given, 33, EPS, e), (x, w))
        residual = random(4, 33, device=device, dtype=F64, seed=3).requires_grad_()
        torch.autograd.gradcheck(lambda *given, e=efficient: norm.fused_add_layer_norm(*given, EPS, e), (x, residual, w, b))


# ---- memory ---------------------------------------------------------------------------------------------------------


def saved_by(make: Callable[[], Tensor]) -> set[int]:
    """The addresses of the tensors that autograd keeps."""
    kept: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        kept.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        make()
    return kept


def test_what_is_kept(device: str) -> None:
    w = torch.ones(64, device=device, requires_grad=True)
    leaf = random(5, 64, device=device).requires_grad_()
    for x, auto in ((leaf, False), (leaf * 2, True), (leaf.exp(), False), (leaf.tanh(), False), (leaf + leaf, True), (nn.functional.linear(leaf, leaf[:, :64].T @ leaf), True)):
        for efficient in (False, True, "auto"):
            made: list[Tensor] = []
            kept = saved_by(lambda x=x, e=efficient, made=made: made.append(norm.fused_rms_norm_affine(x, w, 64, EPS, e)))  # type: ignore[func-returns-value, arg-type]
            from_output = auto if efficient == "auto" else bool(efficient)
            places = [one.untyped_storage().data_ptr() for one in (x, made[0])]
            assert [place in kept for place in places] == [not from_output, from_output], (efficient, x.grad_fn)
    with pytest.raises(ValueError, match="memory_efficient: expected True, False or 'auto', got 'yes'"):
        norm.fused_rms_norm_affine(leaf, w, 64, EPS, "yes")


def test_weights_of_zero_from_the_result(device: str) -> None:
    """No gradient, as documented; the other columns' are there, and nothing is infinite."""
    x, w, b = leaves(random(50, 64, device=device), random(64, device=device, seed=1), random(64, device=device, seed=2))
    with torch.no_grad():
        w[3], w[5] = 0, 1e-7
    norm.fused_layer_norm_affine(x, w, b, 64, EPS, True).backward(random(50, 64, device=device, seed=3))
    assert w.grad[3] == 0 and w.grad.isfinite().all() and x.grad.isfinite().all() and (w.grad[6:] != 0).all()


def test_zeros_are_warned_of_where_they_are_loaded() -> None:
    class Efficient(FusedLayerNorm):
        pass

    module = Efficient(8, memory_efficient=True)
    state = module.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(state)
    state["weight"][2] = 0
    with pytest.warns(UserWarning, match="Efficient: some weights are 0 or near it. With memory_efficient their"):
        module.load_state_dict(state)


# ---- torch's machinery ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_opcheck(device: str, kind: str, efficient: bool, residual: bool) -> None:
    x, r = random(3, 4, 64, device=device).requires_grad_(), random(3, 4, 64, device=device, seed=1).requires_grad_()
    w, b = (one if one is None else one.requires_grad_() for one in vectors(64, kind, device, F32))
    for dtype in (F32, BF16):
        arguments = (x, r if residual else None, w, b, [64], EPS, kind, 0.0, dtype, efficient)
        # With a gradient of what is normalised alone: that of a gradient is refused.
        torch.library.opcheck(torch.ops.ftbert.norm_forward.default, arguments)
    y, total, mean, rstd = (one.detach() for one in torch.ops.ftbert.norm_forward(*arguments[:8], F32, efficient))
    saved = y if efficient else total if residual else x.detach()
    arguments = (y, total if residual else None, saved, efficient, mean, rstd, w.detach(), None if b is None else b.detach(), [64], EPS, kind, 0.0, F32, True, b is not None)
    torch.library.opcheck(torch.ops.ftbert.norm_backward.default, arguments)


class Block(nn.Module):
    """Pre-norm, with the sum in the norm."""

    def __init__(self, efficient: Any = False) -> None:
        super().__init__()
        self.first = FusedLayerNorm(64, memory_efficient=efficient)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.weight = nn.Parameter(torch.ones(64))
        self.efficient = efficient

    def forward(self, x: Tensor) -> Tensor:
        y, total = norm.fused_add_rms_norm(self.down(self.up(self.first(x)).relu()), x, self.weight, 1e-6, self.efficient)
        return y * total.tanh()


def gradients(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    run(x).square().mean().backward()
    made = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("efficient", [False, True, "auto"])
def test_compiled_without_a_break(device: str, efficient: Any) -> None:
    torch.manual_seed(0)
    block = Block(efficient).to(device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    for rows in (7, 12, 20):  # then of any size
        x = random(rows, 64, device=device)
        for one, other in zip(gradients(block, compiled, x), gradients(block, block, x), strict=True):
            assert_close(one, other, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device: str, reentrant: bool) -> None:
    block = Block("auto").to(device)
    x = random(9, 64, device=device)
    wanted = gradients(block, block, x)
    got = gradients(block, lambda x: checkpoint(block, x, use_reentrant=reentrant), x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


AUTOCAST = [(F32, BF16), (BF16, BF16), (F16, BF16), (F64, F64)]


@pytest.mark.parametrize("given,result", AUTOCAST, ids=lambda dtype: NAMES[dtype])
def test_autocast_gives_its_type_as_apex_does(device: str, given: torch.dtype, result: torch.dtype) -> None:
    x = random(4, 64, device=device, dtype=given).requires_grad_()
    modules = [FusedLayerNorm(64), FusedRMSNorm(64), MixedFusedLayerNorm(64), MixedFusedRMSNorm(64)]
    for module in modules:
        module.to(device, F64 if given == F64 else F32)
        with torch.autocast(device, BF16):
            y = module(x)
            y2, total = norm.fused_add_rms_norm(x, x, module.weight)
        assert y.dtype == y2.dtype == result and total.dtype == given
        y.float().sum().backward()
        assert x.grad is not None and x.grad.dtype == given and module.weight.grad.dtype == module.weight.dtype
        outside = module(x)
        assert outside.dtype == (module.weight.dtype if "Mixed" in type(module).__name__ else given)


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_scripted(device: str, kind: Any) -> None:
    for eps in (1e-5, None) if "RMS" in kind.__name__ else (1e-5,):
        module = kind(64, eps=eps).to(device)
        scripted = torch.jit.script(module)
        stored = io.BytesIO()
        torch.jit.save(scripted, stored)
        stored.seek(0)
        for dtype in (F32, BF16):
            x = random(3, 64, device=device, dtype=dtype)
            with torch.no_grad():
                wanted = module(x)
                assert torch.equal(scripted(x), wanted) and torch.equal(torch.jit.load(stored)(x), wanted)
            stored.seek(0)


def test_twice_is_refused(device: str) -> None:
    x, w = leaves(random(3, 64, device=device), torch.ones(64, device=device))
    (grad,) = torch.autograd.grad(norm.fused_rms_norm_affine(x, w, 64).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate ftbert's norms twice"):
        grad.sum().backward()


WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda x, w: norm.fused_layer_norm(x, 63), r"x: expected a shape that ends in normalized_shape \[63\], got .*\[3, 64\]"),
    (lambda x, w: norm.fused_layer_norm(x, []), "normalized_shape"),
    (lambda x, w: norm.fused_layer_norm(x, [2, 3, 64]), "normalized_shape"),
    (lambda x, w: norm.fused_rms_norm(x, 64, 0.0), "eps: expected more than 0, got 0"),
    (lambda x, w: norm.fused_rms_norm(x, 64, -1e-5), "eps: expected more than 0"),
    (lambda x, w: norm.fused_rms_norm(x, 64, float("nan")), "eps: expected more than 0"),
    (lambda x, w: norm.fused_rms_norm_affine(x, w[:63], 64), r"weight: expected normalized_shape \[64\], got .*\[63\]"),
    (lambda x, w: norm.fused_layer_norm_affine(x, w, w[:1], 64), "bias: expected normalized_shape"),
    (lambda x, w: norm.fused_layer_norm_affine(x, w.int(), w, 64), "weight: expected float32"),
    (lambda x, w: norm.fused_layer_norm(x.int(), 64), "x: expected float32"),
    (lambda x, w: norm.fused_add_rms_norm(x, x[:2], w), r"residual: expected .*\[3, 64\]"),
    (lambda x, w: norm.fused_layer_norm(x[:, :0], 0), "normalized_shape: expected 1 to"),
    (lambda x, w: norm.fused_layer_norm_affine(x, w.cpu() if x.is_cuda else w.to(torch.complex64), w, 64), "weight: expected"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_what_is_wrong_is_said(device: str, at: int) -> None:
    wrong, words = WRONG[at]
    with pytest.raises(RuntimeError, match=words):
        wrong(random(3, 64, device=device), torch.ones(64, device=device))


# ---- patch ----------------------------------------------------------------------------------------------------------


class Unlike(LlamaRMSNorm):
    """By its name one of transformers', by what it computes none."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


def mixed_model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    kinds = [nn.LayerNorm(64), nn.Linear(64, 64), nn.RMSNorm(64), nn.LayerNorm(64, bias=False), nn.LayerNorm(64, elementwise_affine=False)]
    model = nn.Sequential(*kinds, LlamaRMSNorm(64), nn.Linear(64, 64), Qwen3RMSNorm(64), Gemma3RMSNorm(64), Unlike(64)).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("efficient", [False, True, "auto"])
def test_patch_changes_speed_alone(device: str, efficient: Any) -> None:
    model = mixed_model(device)
    kinds, state = [type(m) for m in model], model.state_dict()
    x = random(11, 64, device=device)
    wanted = gradients(model, model, x)
    assert patch(model, efficient) is model
    assert [isinstance(m, kind) for m, kind in zip(model, kinds, strict=True)] == [True] * len(kinds)
    assert [type(m) is kind for m, kind in zip(model, kinds, strict=True)] == [kind in (nn.Linear, Unlike) for kind in kinds]
    assert state.keys() == model.state_dict().keys() and all(a.data_ptr() == b.data_ptr() for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for one, true in zip(gradients(other, other, x), wanted, strict=True):
            assert_close(one, true, atol=2e-5 * (10 if efficient else 1))
    patch(model, False)
    assert all(m.memory_efficient is False for m in model if hasattr(m, "memory_efficient"))
    assert unpatch(model) is model and [type(m) for m in model] == kinds
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, model, x), wanted, strict=True))
    assert not any("memory_efficient" in vars(m) or "weight_offset" in vars(m) for m in model)


def test_patch_keeps_the_types_of_transformers(device: str) -> None:
    for kind in (LlamaRMSNorm, Gemma3RMSNorm):
        for weights in (F32, BF16):
            module = nn.Sequential(kind(64)).to(device, weights)
            for dtype in (F32, BF16):
                x = random(3, 64, device=device, dtype=dtype)
                wanted = module(x)
                got = patch(module)(x)
                unpatch(module)
                assert got.dtype == wanted.dtype
                assert_close(got, wanted, atol=2 * unit(dtype, weights), rtol=2 * unit(dtype, weights))


def test_patched_norms_are_called_as_torchs_are() -> None:
    """By the names of torch's arguments; one whose forward a wrapper has replaced stays as it is."""
    x, model = random(3, 8, device="cpu"), nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8)])
    inner = model[2].forward
    model[2].forward = lambda x: inner(x) + 1
    wanted = [model[0](input=x), model[1](x=x), model[2](x)]
    patch(model)
    assert [type(one) for one in model] == [FusedLayerNorm, FusedRMSNorm, nn.LayerNorm]
    for got, want in zip([model[0](input=x), model[1](x=x), model[2](x)], wanted, strict=True):
        assert_close(got, want, atol=1e-6)
    meta = patch(nn.Sequential(nn.LayerNorm(8, device="meta")))
    assert meta(x.to("meta")).shape == (3, 8)


def test_patch_and_weights_of_zero() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    with torch.no_grad():
        model[1].weight[3] = 0
    patch(model)
    assert [m.memory_efficient for m in model] == ["auto", False]
    with pytest.warns(UserWarning, match="patch: 1 have weights that are 0 or near it"):
        patch(model, True)


def test_patch_leaves_ftberts_own_and_refuses_what_has_no_norm() -> None:
    with pytest.raises(ValueError, match="model: expected one with nn.LayerNorm"):
        patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="memory_efficient: expected"):
        patch(nn.LayerNorm(2), "always")
    own = nn.Sequential(FusedRMSNorm(8, weight_offset=1.0), nn.LayerNorm(8))
    assert not own[0].weight.any()
    unpatch(patch(own))
    assert type(own[0]) is FusedRMSNorm and own[0].weight_offset == 1.0


@torch.no_grad()
def test_streams_and_graphs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = random(4096, 768, device="cuda", dtype=BF16)
    wanted = norm.fused_layer_norm(x, 768)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = norm.fused_layer_norm(x, 768)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(got, wanted)
    with torch.enable_grad():
        leaf, w = x.clone().requires_grad_(), torch.ones(768, device="cuda", dtype=BF16, requires_grad=True)
        grad = random(4096, 768, device="cuda", dtype=BF16, seed=1)
        true = torch.autograd.grad(norm.fused_rms_norm_affine(leaf, w, 768, EPS, True), (leaf, w), grad)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = norm.fused_rms_norm_affine(leaf, w, 768, EPS, True)
            grads = torch.autograd.grad(y, (leaf, w), grad)
    for _ in range(3):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(grads, true, strict=True))


def test_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU at most")
    check_gradients("cuda:1", (BF16, BF16, None), 100, 768, "layer", False)


def test_beyond_2_to_the_31_elements() -> None:
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("no GPU with 40 GB left")
    rows, cols = (1 << 31) // 1024 + 3, 1024
    x = torch.randn(rows, cols, device="cuda", dtype=BF16).requires_grad_()
    y = norm.fused_layer_norm(x, cols)
    (grad,) = torch.autograd.grad(y, x, y)
    for part in (slice(0, 8), slice(rows - 8, rows)):
        leaf = x.detach()[part].clone().requires_grad_()
        few = norm.fused_layer_norm(leaf, cols)
        assert torch.equal(y[part], few) and torch.equal(grad[part], torch.autograd.grad(few, leaf, few)[0])


# ---- models ---------------------------------------------------------------------------------------------------------


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2))


def losses(model: nn.Module, ids: Tensor, steps: int = 8) -> list[float]:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
    return curve


def test_a_model_is_tuned_alike_and_keeps_less(device: str) -> None:
    model = tiny_llama().to(device)
    ids = torch.randint(0, 60, (4, 32), generator=torch.Generator().manual_seed(1)).to(device)
    wanted = losses(model, ids)
    patch(model)
    assert losses(model, ids) == pytest.approx(wanted, rel=2e-4) and wanted[-1] < wanted[0]

    def kept() -> int:
        """Bytes of activations."""
        sizes: dict[int, int] = {}
        held = []

        def pack(t: Tensor) -> Tensor:
            held.append(t)
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=ids).logits.sum()
        return sum(sizes.values())

    patch(model, False)
    plain = kept()
    for efficient in (True, "auto"):
        patch(model, efficient)
        norms = 2 * 3 + 1
        assert plain - kept() == pytest.approx(norms * ids.numel() * 64 * 4, rel=0.02)


def test_a_model_under_autocast(device: str) -> None:
    from conftest import make_bert

    model = make_bert().to(device).train()
    ids = torch.randint(5, 100, (4, 20), generator=torch.Generator().manual_seed(1)).to(device)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast(device, BF16):
            out = model(input_ids=ids).last_hidden_state
        out.float().square().mean().backward()
        return [out.detach().float(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    model.config._attn_implementation = "eager"
    wanted = run()
    patch(model)
    got = run()
    assert len(got) == len(wanted)
    for one, true in zip(got, wanted, strict=True):
        assert (one - true).norm() <= 0.05 * true.norm() + 1e-4
