"""torch.ops.ftbert.norm_forward and norm_backward: the CPU's implementation, shapes and gradients.

The schemas and the CUDA implementation are in csrc/binding/training_norm_ops.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftbert._library import load_library
from ftbert.norm import composition

load_library()


@torch.library.register_kernel("ftbert::norm_forward", "cpu")
def _forward_on_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float,
    kind: str, offset: float, dtype: torch.dtype, memory_efficient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    with torch.autocast("cpu", enabled=False):
        return composition.forward(x, residual, weight, bias, shape, eps, kind, offset, dtype)


@torch.library.register_kernel("ftbert::norm_backward", "cpu")
def _backward_on_cpu(*arguments: Any) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", enabled=False):
        return composition.backward(*arguments)


@torch.library.register_fake("ftbert::norm_forward")
def _forward_shapes(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float,
    kind: str, offset: float, dtype: torch.dtype, memory_efficient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    composition.check_present("x", x)
    rows = math.prod(x.shape[: x.dim() - len(shape)])
    floats = composition.sums_type(x.dtype)
    total = x.new_empty(0)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        floats = composition.sums_type(total.dtype)
    mean = x.new_empty(rows if kind == "layer" else 0, dtype=floats)
    return x.new_empty(x.shape, dtype=dtype), total, mean, x.new_empty(rows, dtype=floats)


@torch.library.register_fake("ftbert::norm_backward")
def _backward_shapes(
    grad: Tensor, grad_sum: Tensor | None, saved: Tensor, from_output: bool, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float, kind: str, offset: float,
    dtype: torch.dtype, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    composition.check_present("saved", saved)
    vectors = (
        saved.new_empty(shape, dtype=vector.dtype) if asked and vector is not None else saved.new_empty(0)
        for vector, asked in ((weight, weight_grad), (bias, bias_grad))
    )
    return saved.new_empty(saved.shape, dtype=dtype), *vectors


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *ctx.words, _, ctx.from_output = inputs
    y, total, mean, rstd = output
    normalised = x if residual is None else total
    # As many tensors in either mode: activation checkpointing counts them.
    ctx.save_for_backward(y if ctx.from_output else normalised, mean, rstd, weight, bias)
    ctx.dtype = normalised.dtype
    ctx.input_dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.mark_non_differentiable(mean, rstd, *([] if residual is not None else [total]))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved, mean, rstd, weight, bias = ctx.saved_tensors
    _, _, with_weight, with_bias, *_ = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = grad_sum, None, None
    if grad is not None:
        shape, eps, kind, offset = ctx.words
        grad_x, grad_weight, grad_bias = torch.ops.ftbert.norm_backward(
            grad, grad_sum, saved, ctx.from_output, mean, rstd, weight, bias, shape, eps, kind, offset, ctx.dtype,
            with_weight, with_bias,
        )  # fmt: skip
    grads = (
        grad_x.to(dtype) if grad_x is not None and dtype is not None and needed else None
        for dtype, needed in zip(ctx.input_dtypes, ctx.needs_input_grad, strict=False)
    )
    return *grads, grad_weight if with_weight else None, grad_bias if with_bias else None, *[None] * 6


def _refuse_twice(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "trying to differentiate ftbert's norms twice, but the gradient of their gradient is not implemented; "
        "torch.nn.LayerNorm and RMSNorm have it (ftbert.norm.unpatch)"
    )


torch.library.register_autograd("ftbert::norm_forward", _backward, setup_context=_save)
torch.library.register_autograd("ftbert::norm_backward", _refuse_twice)
