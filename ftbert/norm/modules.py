"""LayerNorm and RMSNorm as modules, drop-in for torch's and apex's. What they compute: functional.py."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ftbert.norm import functional


def eps_for(eps: float | None, dtype: torch.dtype) -> float:
    """eps, or where there is none torch.finfo(dtype).eps, which cannot be scripted."""
    if eps is not None:
        return eps
    if dtype == torch.float16:
        return 2.0**-10
    if dtype == torch.bfloat16:
        return 2.0**-7
    return 2.0**-52 if dtype == torch.float64 else 2.0**-23


class FusedLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm with the arguments of apex: `memory_efficient` True, False or "auto" (functional.py)."""

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, memory_efficient: bool | str = False, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return torch.ops.ftbert.norm_forward(
                input, None, self.weight, self.bias, self.normalized_shape, self.eps, "layer", 0.0, input.dtype, False
            )[0]
        else:  # noqa: RET505 - what is scripted has no other way
            return functional.fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, memory_efficient={self.memory_efficient!r}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        warn_of_weights_near_0(self, self.weight, self.memory_efficient)


class FusedRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm with the arguments of apex, and weight_offset: added to the weight (1: Gemma's, whose weights
    begin with 0). eps None: that of x's type."""

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float | None = 1e-5,
        elementwise_affine: bool = True, memory_efficient: bool | str = False, weight_offset: float = 0.0,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.weight_offset = weight_offset  # before the weights are made
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]
        self.memory_efficient = memory_efficient

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            eps = eps_for(self.eps, x.dtype)
            return torch.ops.ftbert.norm_forward(
                x, None, self.weight, None, self.normalized_shape, eps, "rms", self.weight_offset, x.dtype, False
            )[0]
        else:  # noqa: RET505
            return functional.fused_rms_norm_affine(
                x, self.weight, self.normalized_shape, self.eps, self.memory_efficient, self.weight_offset
            )

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{super().extra_repr()}, memory_efficient={self.memory_efficient!r}{offset}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        warn_of_weights_near_0(self, self.weight, self.memory_efficient, self.weight_offset)


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose result has the weight's type, as in apex."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return torch.ops.ftbert.norm_forward(
                input, None, self.weight, self.bias, self.normalized_shape, self.eps, "layer", 0.0, self.weight.dtype,
                False,
            )[0]  # fmt: skip
        else:  # noqa: RET505
            return functional.mixed_dtype_fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose result has the weight's type, as in apex."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            eps = eps_for(self.eps, x.dtype)
            return torch.ops.ftbert.norm_forward(
                x, None, self.weight, None, self.normalized_shape, eps, "rms", self.weight_offset, self.weight.dtype,
                False,
            )[0]  # fmt: skip
        else:  # noqa: RET505
            return functional.mixed_dtype_fused_rms_norm_affine(
                x, self.weight, self.normalized_shape, self.eps, self.memory_efficient, self.weight_offset
            )


_warned: set[str] = set()


_NEAR_0 = 1e-3  # of the largest weight's magnitude


def has_weights_near_0(weight: Tensor | None, weight_offset: float = 0.0) -> bool:
    """So near that rows restored from the result are lost in those columns: some trained models have them (all-MiniLM's
    last LayerNorm: 5e-33). Waits for the GPU."""
    if weight is None or weight.is_meta:
        return False
    sizes = (weight.detach().float() + weight_offset).abs()
    return bool((sizes <= _NEAR_0 * sizes.max()).any())


def warn_of_weights_near_0(
    module: nn.Module, weight: Tensor | None, memory_efficient: Any, offset: float = 0.0
) -> None:
    """Once in a process for each class: where weights come from outside, since a training step does not wait for the
    GPU to look at them."""
    kind = type(module).__name__
    if memory_efficient is not False and kind not in _warned and has_weights_near_0(weight, offset):
        _warned.add(kind)
        warnings.warn(
            f"{kind}: some weights are 0 or near it. With memory_efficient their gradients are inexact, and x's with "
            "them: they are made of the result, which no longer shows x there; memory_efficient=False trains them",
            stacklevel=3,
        )
