"""torch.ops.ftbert.norm_forward and norm_backward: the CPU's implementation and shapes.

The schemas and the CUDA implementation are in csrc/binding/training_norm_ops.cpp, gradients in
training_norm_autograd.cpp.
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
