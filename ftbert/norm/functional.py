"""LayerNorm and RMSNorm as functions, by apex's names, and with a residual added in the same pass.

x: [..., *normalized_shape] of float32, float16, bfloat16 or float64, in any layout; weight and bias: normalized_shape,
of any of these types. Sums are float32. The result has x's type; of `mixed_dtype_*` the weight's; under autocast, as in
apex, autocast's (torch's layer_norm gives float32 there): x and weight are read as they are, without a cast. Gradients
have the types of what they belong to, and are the same bits in every run. Differentiating twice raises RuntimeError.

memory_efficient: the backward pass reads the result (True), which the layer behind a norm mostly keeps anyway, instead
of x (False). "auto": x where x is a leaf or the result that its own gradient keeps, else the result. The row is
restored by division: from a weight near 0 inexactly, from one of 0 not at all. So True saves x all the same where a
weight, with its offset, is nearer to 0 than eps, and "auto" also where one is below a thousandth of the largest
(lost_columns.py says when they are looked at).

weight_offset: added to the weight (1: Gemma's 1 + w). eps None: that of x's type, as in torch.nn.RMSNorm.

RuntimeError says which shape, type or device was expected; eps has to be more than 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftbert.norm import composition, ops  # noqa: F401 - registers what torch.ops.ftbert needs
from ftbert.norm.lost_columns import loses_columns


def fused_layer_norm(
    x: Tensor, normalized_shape: int | Sequence[int], eps: float = 1e-6, memory_efficient: bool | str = False
) -> Tensor:
    """(x - mean) / sqrt(variance + eps)"""
    return norm(x, None, None, None, normalized_shape, eps, "layer", memory_efficient)[0]


def fused_layer_norm_affine(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: int | Sequence[int], eps: float = 1e-6,
    memory_efficient: bool | str = False,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(variance + eps) * weight + bias"""
    return norm(x, None, weight, bias, normalized_shape, eps, "layer", memory_efficient)[0]


def fused_rms_norm(
    x: Tensor, normalized_shape: int | Sequence[int], eps: float | None = 1e-6, memory_efficient: bool | str = False
) -> Tensor:
    """x / sqrt(mean of squares + eps)"""
    return norm(x, None, None, None, normalized_shape, eps, "rms", memory_efficient)[0]


def fused_rms_norm_affine(
    x: Tensor, weight: Tensor | None, normalized_shape: int | Sequence[int], eps: float | None = 1e-6,
    memory_efficient: bool | str = False, weight_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """x / sqrt(mean of squares + eps) * (weight + weight_offset)"""
    return norm(x, None, weight, None, normalized_shape, eps, "rms", memory_efficient, weight_offset)[0]


def mixed_dtype_fused_layer_norm_affine(
    x: Tensor, weight: Tensor, bias: Tensor | None, normalized_shape: int | Sequence[int], eps: float = 1e-6,
    memory_efficient: bool | str = False,
) -> Tensor:  # fmt: skip
    """`fused_layer_norm_affine` in the weight's type."""
    return norm(x, None, weight, bias, normalized_shape, eps, "layer", memory_efficient, dtype=weight.dtype)[0]


def mixed_dtype_fused_rms_norm_affine(
    x: Tensor, weight: Tensor, normalized_shape: int | Sequence[int], eps: float | None = 1e-6,
    memory_efficient: bool | str = False, weight_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """`fused_rms_norm_affine` in the weight's type."""
    return norm(x, None, weight, None, normalized_shape, eps, "rms", memory_efficient, weight_offset, weight.dtype)[0]


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6,
    memory_efficient: bool | str = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """LayerNorm over the last dimension (all of weight's, where there is one) of x + residual, and x + residual, in one
    pass; the backward pass adds the sum's gradient. The sum has the common type of its parts, and what is normalised is
    the sum as it is stored: the two results are those of an addition and a norm."""
    shape = x.shape[-1:] if weight is None else weight.shape
    return norm(x, residual, weight, bias, shape, eps, "layer", memory_efficient)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = 1e-6,
    memory_efficient: bool | str = False, weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same with RMSNorm."""
    shape = x.shape[-1:] if weight is None else weight.shape
    return norm(x, residual, weight, None, shape, eps, "rms", memory_efficient, weight_offset)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    normalized_shape: int | Sequence[int], eps: float | None, kind: str, memory_efficient: bool | str,
    weight_offset: float = 0.0, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What all of them call: the norm in dtype (None: x's), unless autocast names another, and the sum (empty without a
    residual)."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    dtype = dtype or (x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
    device = x.device.type
    # The meta device has no autocast; torch 2.11 compiles no torch.amp.is_autocast_available, which would say so.
    if dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if x.is_cuda and torch.float64 in (x.dtype, dtype):
        return composition.forward(x, residual, weight, bias, shape, eps, kind, weight_offset, dtype)[:2]
    efficient = _saves_output(x, residual, memory_efficient) and not loses_columns(
        weight, weight_offset, eps, memory_efficient
    )
    y, total, _, _ = torch.ops.ftbert.norm_forward(
        x, residual, weight, bias, shape, eps, kind, weight_offset, dtype, efficient
    )
    return y, total


def _saves_output(x: Tensor, residual: Tensor | None, memory_efficient: bool | str) -> bool:
    if isinstance(memory_efficient, bool):
        return memory_efficient
    if memory_efficient != "auto":
        raise ValueError(f"memory_efficient: expected True, False or 'auto', got {memory_efficient!r}")
    if residual is not None:  # the sum is new, and what a later norm adds to keeps nothing
        return True
    if torch.compiler.is_compiling():  # there is no grad_fn to look at
        return True
    # The type is asked: the attribute itself would be unpacked, and hooks of checkpointing run.
    return not (x.is_leaf or hasattr(type(x.grad_fn), "_saved_result"))
