"""LayerNorm and RMSNorm as modules, drop-in for torch's and apex's. What they compute: functional.py."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ftbert.norm import functional
from ftbert.norm.lost_columns import look


def eps_for(eps: float | None, dtype: torch.dtype) -> float:
    """eps, or where there is none torch.finfo(dtype).eps, which cannot be scripted."""
    if eps is not None:
        return eps
    if dtype == torch.float16:
        return 2.0**-10
    if dtype == torch.bfloat16:
        return 2.0**-7
    return 2.0**-52 if dtype == torch.float64 else 2.0**-23


def saved_from(module: Any) -> bool | str:
    """memory_efficient of a module, unless loaded weights need x."""
    return False if module.keeps_input else module.memory_efficient


class FusedLayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm with the arguments of apex: `memory_efficient` True, False or "auto" (functional.py)."""

    keeps_input: bool = False  # x is saved, whatever memory_efficient says: the weights that were loaded are too near 0
    mixed: bool = False  # the result has the weight's type
    __constants__ = [*nn.LayerNorm.__constants__, "mixed"]

    def __init__(
        self, normalized_shape: int | list[int] | torch.Size, eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, memory_efficient: bool | str = False, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        dtype = input.dtype
        if self.mixed:
            dtype = self.weight.dtype
        shape, eps = self.normalized_shape, self.eps
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return torch.ops.ftbert.norm_forward(
                input, None, self.weight, self.bias, shape, eps, "layer", 0.0, dtype, False
            )[0]
        else:  # noqa: RET505 - what is scripted has no other way
            saved = saved_from(self)
            return functional.norm(input, None, self.weight, self.bias, shape, eps, "layer", saved, dtype=dtype)[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, memory_efficient={self.memory_efficient!r}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        look_at_loaded(self, self.eps)


class FusedRMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm with the arguments of apex, and weight_offset: added to the weight (1: Gemma's, whose weights
    begin with 0). eps None: that of x's type."""

    keeps_input: bool = False  # as FusedLayerNorm's
    mixed: bool = False
    __constants__ = [*nn.RMSNorm.__constants__, "mixed"]

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
        dtype = x.dtype
        if self.mixed:
            dtype = self.weight.dtype
        shape, offset = self.normalized_shape, self.weight_offset
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            eps = eps_for(self.eps, x.dtype)
            return torch.ops.ftbert.norm_forward(x, None, self.weight, None, shape, eps, "rms", offset, dtype, False)[0]
        else:  # noqa: RET505
            saved = saved_from(self)
            return functional.norm(x, None, self.weight, None, shape, self.eps, "rms", saved, offset, dtype)[0]

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{super().extra_repr()}, memory_efficient={self.memory_efficient!r}{offset}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        look_at_loaded(self, self.eps, self.weight_offset)


class MixedFusedLayerNorm(FusedLayerNorm):
    """FusedLayerNorm whose result has the weight's type, as in apex."""

    mixed = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """FusedRMSNorm whose result has the weight's type, as in apex."""

    mixed = True


_warned: set[str] = set()


def look_at_loaded(module: FusedLayerNorm | FusedRMSNorm, eps: float | None, offset: float = 0.0) -> None:
    """Where weights come from outside: a compiled step does not look at them, and one on a GPU only once. Warns once in
    a process for each class."""
    module.keeps_input = False
    if module.weight is None or module.memory_efficient is False:
        return
    weights = look(module.weight, offset)
    module.keeps_input = weights.lost(eps_for(eps, module.weight.dtype), module.memory_efficient)
    kind = type(module).__name__
    if module.memory_efficient is True and weights.near_0 and not module.keeps_input and kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"{kind}: some weights are near 0. With memory_efficient=True their gradients are inexact, and x's with "
            "them: they are made of the result, which hardly shows x there; memory_efficient='auto' saves x",
            stacklevel=4,
        )
