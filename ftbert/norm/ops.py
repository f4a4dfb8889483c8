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

from ftbert._fake import checked_op
from ftbert._library import load_library
from ftbert.norm import composition

load_library()


def _forward_on_cpu(*arguments: Any) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", enabled=False):
        return composition.forward(*arguments[:-1])  # without memory_efficient


def _backward_on_cpu(*arguments: Any) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", enabled=False):
        return composition.backward(*arguments)


def _forward_shapes(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float,
    kind: str, offset: float, dtype: torch.dtype, memory_efficient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = math.prod(x.shape[: x.dim() - len(shape)])
    floats = composition.sums_type(x.dtype)
    total = x.new_empty(0)
    if residual is not None:
        total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        floats = composition.sums_type(total.dtype)
    mean = x.new_empty(rows if kind == "layer" else 0, dtype=floats)
    return x.new_empty(x.shape, dtype=dtype), total, mean, x.new_empty(rows, dtype=floats)


def _backward_shapes(
    grad: Tensor, grad_sum: Tensor | None, saved: Tensor, from_output: bool, mean: Tensor | None, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float, kind: str, offset: float,
    dtype: torch.dtype, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    vectors = (
        saved.new_empty(shape, dtype=vector.dtype) if asked and vector is not None else saved.new_empty(0)
        for vector, asked in ((weight, weight_grad), (bias, bias_grad))
    )
    return saved.new_empty(saved.shape, dtype=dtype), *vectors


for _name, _on_cpu, _fake in (
    ("norm_forward", _forward_on_cpu, _forward_shapes),
    ("norm_backward", _backward_on_cpu, _backward_shapes),
):
    torch.library.register_kernel(f"ftbert::{_name}", "cpu", checked_op(_name, _on_cpu))
    torch.library.register_fake(f"ftbert::{_name}", checked_op(_name, _fake))
