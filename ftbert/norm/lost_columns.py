"""Columns whose weight is 0 or near it: a norm's result does not show x there, so the backward pass needs x itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_NEAR_0 = 1e-3  # of the largest weight's magnitude: what "auto" takes for lost


class Weights(NamedTuple):
    """The magnitudes of a weight with its offset."""

    smallest: float
    largest: float
    offset: float

    @property
    def near_0(self) -> bool:
        """So near that 16 bits lose those columns: some trained models have such weights (all-MiniLM's last LayerNorm:
        5e-33)."""
        return self.smallest <= _NEAR_0 * self.largest

    def lost(self, eps: float, memory_efficient: bool | str) -> bool:
        """Whether the backward pass needs x itself: "auto" near 0, True where a weight would count as eps."""
        return memory_efficient is not False and (self.smallest < eps or (memory_efficient == "auto" and self.near_0))


_GONE = Weights(1.0, 1.0, 0.0)
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # what was seen of weights on GPUs


def look(weight: Tensor | None, offset: float) -> Weights:
    """Waits for the GPU."""
    if weight is None or weight.is_meta or weight.numel() == 0:
        return _GONE
    with torch.no_grad():
        sizes = (weight.detach().float() + offset).abs()
        seen = Weights(float(sizes.min()), float(sizes.max()), offset)  # of a DTensor those of all its shards
    if weight.is_cuda:
        _known[weight] = seen
    return seen


def loses_columns(weight: Tensor | None, offset: float, eps: float, memory_efficient: bool | str) -> bool:
    """`Weights.lost` of a call. On a GPU a parameter is looked at when it is first used, since each look waits; weights
    that are made anew for each call, compiled calls and those that a CUDA graph records are not looked at."""
    if memory_efficient is False or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if weight is None or type(weight) not in (Tensor, nn.Parameter) or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if not weight.is_cuda:
        return look(weight, offset).lost(eps, memory_efficient)
    seen = _known.get(weight)
    if seen is None or seen.offset != offset:
        if not weight.is_leaf or torch.cuda.is_current_stream_capturing():
            return False
        seen = look(weight, offset)
    return bool(seen.lost(eps, memory_efficient))
