"""Norms of training against float64: numbers, layouts, and calls with all their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from compare import assert_close
from torch import Tensor
from torch.nn import functional

from ftbert.norm import fused_batch_norm
from ftbert.norm.functional import norm

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
EPS = 1e-5
ACTIVATIONS = ["none", "relu", "silu"]


def random(*shape: int, device: str, dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def leaves(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def unit(*dtypes: torch.dtype | None) -> float:
    return max(torch.finfo(one).eps for one in dtypes if one is not None)


def same_bits(some: Any, others: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# ---- LayerNorm and RMSNorm -------------------------------------------------------------------------------------------


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


def any_norm(x: Tensor, residual: Tensor | None, weight: Any, bias: Any, kind: str, efficient: Any = False, offset: float = 0.0, dtype: Any = None) -> Any:
    """(y, sum) by the inner function, which the public ones call."""
    return norm(x, residual, weight, bias, x.shape[-1:], EPS, kind, efficient, offset, dtype)


def check_gradients(
    device: str, types: tuple[Any, Any, Any], rows: int, cols: int, kind: str, efficient: bool, offset: float = 0.0,
    residual: torch.dtype | None = None, sum_is_read: bool = True, affine: bool = True, at: int = 0,
) -> None:  # fmt: skip
    """Result and all gradients. types: of x, weight and result (None: x's). sum_is_read: x + residual has a gradient of
    its own. at: how many elements each base lies behind a boundary."""
    of_x, of_weight, of_y = types

    def placed(t: Tensor) -> Tensor:
        room = torch.empty(t.numel() + at, dtype=t.dtype, device=t.device)
        room[at:] = t.flatten()
        return room[at:].view(t.shape).requires_grad_()

    x = placed(random(rows, cols, device=device, dtype=of_x, scale=2) + 1)
    r = None if residual is None else placed(random(rows, cols, device=device, dtype=residual, seed=1))
    weight, bias = vectors(cols, kind, device, of_weight, offset) if affine else (None, None)
    weight, bias = (None if one is None else placed(one) for one in (weight, bias))
    y, total = any_norm(x, r, weight, bias, kind, efficient, offset, of_y)
    inputs = [one for one in (x, r, weight, bias) if one is not None]
    of_sum = of_x if r is None else torch.promote_types(of_x, residual)
    assert y.dtype == (of_y or of_sum) and y.shape == x.shape
    grad = random(rows, cols, device=device, dtype=y.dtype, seed=5)
    grad_sum = None if r is None or not sum_is_read else random(rows, cols, device=device, dtype=of_sum, seed=6)
    got = torch.autograd.grad([y] if grad_sum is None else [y, total], inputs, [grad] if grad_sum is None else [grad, grad_sum])

    xd, rd, wd, bd = (None if t is None else t.detach().double().requires_grad_() for t in (x, r, weight, bias))
    sd = xd
    if r is not None:
        assert torch.equal(total, x + r)
        sd = total.detach().double() + (xd + rd - (xd + rd).detach())  # as it is stored, for it is what is normalised
    yd = exact(sd, wd, bd, kind, EPS, offset)
    double = [one for one in (xd, rd, wd, bd) if one is not None]
    outs, grads = ([yd], [grad.double()]) if grad_sum is None else ([yd, sd], [grad.double(), grad_sum.double()])
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


# ---- BatchNorm -------------------------------------------------------------------------------------------------------


def layouts(shape: tuple[int, ...]) -> list[str]:
    return ["contiguous", "last"] if len(shape) > 2 else ["contiguous"]


def arranged(t: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return t.contiguous()
    if layout == "last":
        return t.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "odd base":  # one element behind an aligned one
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)
    wide = torch.empty(t.shape[0], *[2 * n for n in t.shape[1:]], dtype=t.dtype, device=t.device)
    return wide[(slice(None), *[slice(None, None, 2)] * (t.dim() - 1))].copy_(t)  # "strided"


class Case:
    """One call and its gradients, ours and float64's from the same numbers."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, layout: str = "contiguous", *,
        activation: str = "relu", training: bool = True, addend: bool = True, affine: bool = True,
        vectors: torch.dtype = F32, seed: int = 5,
    ) -> None:  # fmt: skip
        def rows(at: int, scale: float = 1.0) -> Tensor:
            return arranged(random(*shape, device=device, dtype=dtype, seed=seed + at, scale=scale), layout)

        def vector(at: int, scale: float) -> Tensor:
            return random(shape[1], device=device, dtype=vectors, seed=seed + at, scale=scale)

        self.x = arranged(rows(0, 2.0) + 0.75, layout)
        self.addend = rows(1) if addend else None
        self.dy = rows(2)
        self.weight = 1 + vector(3, 0.3) if affine else None
        self.bias = vector(4, 0.3) if affine else None
        self.running_mean, self.running_var = vector(5, 0.2), 1 + vector(6, 0.2).abs()
        self.activation, self.training, self.dtype = activation, training, dtype

    def inputs(self) -> list[Tensor | None]:
        return [self.x, self.addend, self.weight, self.bias]

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        given = [t if t is None else t.detach().requires_grad_() for t in self.inputs()]
        x, addend, weight, bias = given
        assert x is not None
        running = self.running_mean.clone(), self.running_var.clone()
        y = fused_batch_norm(
            x, *running, weight, bias, addend, training=self.training, activation=self.activation, momentum=0.3
        )
        self.after = running
        y.backward(self.dy)
        return y.detach(), [None if t is None else t.grad for t in given]

    def reference(self, passes: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """passes: where the gradient of relu does, which near 0 is a matter of rounding."""
        given = [t if t is None else t.detach().double().requires_grad_() for t in self.inputs()]
        x, addend, weight, bias = given
        running = self.running_mean.double(), self.running_var.double()
        z = functional.batch_norm(x, *running, weight, bias, self.training, 0.3, 1e-5)
        z = z if addend is None else z + addend
        y = {"none": z, "relu": z * passes, "silu": functional.silu(z)}[self.activation]
        self.expected_after = running
        y.backward(self.dy.double())
        return y.detach(), [None if t is None else t.grad for t in given]

    def check(self) -> None:
        y, grads = self.run()
        expected, expected_grads = self.reference(y > 0)
        assert y.dtype == self.dtype and y.shape == self.x.shape
        _close("y", y, expected, 1.0)
        # dx is a difference of terms of this size, sums are of as many terms.
        dims = [0, *range(2, self.x.dim())]
        var = self.x.double().var(dims, correction=0) if self.training else self.running_var.double()
        root = (var + 1e-5).rsqrt()
        term = (root if self.weight is None else root * self.weight.double().abs()).max().item()
        sums = self.dy.double().abs().sum(dims).max().item()
        scales = {"x": term * self.dy.double().abs().max().item(), "addend": 1.0, "weight": sums, "bias": sums}
        for (name, scale), got, want, given in zip(scales.items(), grads, expected_grads, self.inputs(), strict=True):
            assert (got is None) == (want is None), name
            if got is not None and want is not None and given is not None:
                assert got.dtype == given.dtype, name
                _close(name, got, want, scale)
        for got, want in zip(self.after, self.expected_after, strict=True):
            _close("running", got, want, 1.0)


def _close(name: str, got: Tensor, want: Tensor, scale: float) -> None:
    """Apart by few roundings of numbers as large as the largest, or as `scale` if that is more."""
    assert got.shape == want.shape, name
    if want.numel() == 0:
        return
    error = (got.double() - want).abs().max().item()
    eps = torch.finfo(got.dtype).eps
    bound = (8 if eps < 1e-6 else 2) * eps * max(scale, want.abs().max().item())
    assert error <= bound, f"{name}: {error:.3g} apart, at most {bound:.3g}"
