"""LayerNorm, RMSNorm and their gradients in functions of PyTorch: what runs on the CPU, and in float64 everywhere.

Sums are made in float32 for 16-bit rows, else in the rows' type. The arguments are those of the ops (ops.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float,
    kind: str, weight_offset: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """norm(x + residual) in dtype, the sum (empty without a residual), mean (empty for kind rms) and 1 / deviation of
    each row. Differentiable where its arguments are."""
    check("x", x, weight, bias, shape, eps, kind)
    if residual is not None:
        _check_like("residual", residual, x)
    total = x if residual is None else x + residual
    wide = sums_type(total.dtype)
    h = total.to(wide).reshape(-1, math.prod(shape))
    mean = h.new_empty(0)
    if kind == "layer":
        mean = h.mean(-1)
        h = h - mean[:, None]
    rstd = (h.square().mean(-1) + eps).rsqrt()
    y = h * rstd[:, None]
    if weight is not None:
        y = y * (weight.to(wide).flatten() + weight_offset)
    if bias is not None:
        y = y + bias.to(wide).flatten()
    return y.to(dtype).reshape(x.shape), x.new_empty(0) if residual is None else total.contiguous(), mean, rstd


def backward(
    grad: Tensor, grad_sum: Tensor | None, saved: Tensor, from_output: bool, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float, kind: str, weight_offset: float,
    dtype: torch.dtype, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of what was normalised, in dtype, of weight and of bias (empty unless asked for). saved: what was
    normalised, or the result, whose weights nearer to 0 than eps then count as eps or -eps."""
    check("saved", saved, weight, bias, shape, eps, kind)
    _check_like("grad", grad, saved)
    if grad_sum is not None:
        _check_like("grad_sum", grad_sum, saved)
    wide, cols = sums_type(saved.dtype), math.prod(shape)
    _check_rows("rstd", rstd, saved.reshape(-1, cols))
    g, x = (one.to(wide).reshape(-1, cols) for one in (grad, saved))
    gamma = None if weight is None else weight.to(wide).flatten() + weight_offset
    if from_output:
        x = x if bias is None else x - bias.to(wide).flatten()
        if gamma is not None:
            x = x / torch.where(gamma >= 0, gamma.clamp_min(eps), gamma.clamp_max(-eps))
    else:
        if kind == "layer":
            if mean is None:
                raise RuntimeError("mean: expected that of each row, got None")
            _check_rows("mean", mean, x)
            x = x - mean[:, None]
        x = x * rstd[:, None]
    a = g if gamma is None else g * gamma
    slope = a - x * (a * x).mean(-1, keepdim=True)
    if kind == "layer":
        slope = slope - a.mean(-1, keepdim=True)
    grad_x = (slope * rstd[:, None]).reshape(saved.shape)
    if grad_sum is not None:
        grad_x = grad_x + grad_sum
    none = saved.new_empty(0)
    return (
        grad_x.to(dtype),
        (g * x).sum(0).reshape(weight.shape).to(weight.dtype) if weight_grad and weight is not None else none,
        g.sum(0).reshape(bias.shape).to(bias.dtype) if bias_grad and bias is not None else none,
    )


def sums_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float, kind: str
) -> None:
    """The words of csrc/binding/training_norm_ops.cpp."""
    if kind not in ("layer", "rms"):
        raise RuntimeError(f"kind: expected layer or rms, got {kind}")
    if not eps > 0:
        raise RuntimeError(f"eps: expected more than 0, got {eps:g}")
    check_storage(name, x)
    if x.dtype not in FLOATS:
        raise RuntimeError(f"{name}: expected float32, float16, bfloat16 or float64, got {describe(x)}")
    shape = list(shape)
    if not shape or x.dim() < len(shape) or list(x.shape[x.dim() - len(shape) :]) != shape:
        raise RuntimeError(f"{name}: expected a shape that ends in normalized_shape {shape}, got {describe(x)}")
    if not 0 < math.prod(shape) < 1 << 30:
        raise RuntimeError(f"normalized_shape: expected 1 to 2^30 - 1 elements, got {shape}")
    if bias is not None and kind == "rms":
        raise RuntimeError("bias: expected none beside kind rms")
    for which, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_storage(which, vector)
        if vector.dtype not in FLOATS or vector.device != x.device:
            raise RuntimeError(
                f"{which}: expected float32, float16, bfloat16 or float64 on {x.device}, got {describe(vector)}"
            )
        if list(vector.shape) != shape:
            raise RuntimeError(f"{which}: expected normalized_shape {shape}, got {describe(vector)}")


def _check_like(name: str, t: Tensor, x: Tensor) -> None:
    check_storage(name, t)
    if t.dtype not in FLOATS or t.device != x.device or t.shape != x.shape:
        raise RuntimeError(f"{name}: expected floats {list(x.shape)} on {x.device}, got {describe(t)}")


def _check_rows(name: str, t: Tensor, rows: Tensor) -> None:
    check_storage(name, t)
    if t.dtype not in (torch.float32, torch.float64) or t.device != rows.device or t.shape != rows.shape[:1]:
        raise RuntimeError(f"{name}: expected float32 [{rows.shape[0]}] on {rows.device}, got {describe(t)}")


def check_storage(name: str, t: Tensor) -> None:
    """It may have been resized since, and torch would read behind it."""
    reach = t.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    if t.numel() and t.untyped_storage().nbytes() < reach * t.element_size():
        raise RuntimeError(f"{name}: expected a dense tensor, got one whose storage is too short for it")


def describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}"
