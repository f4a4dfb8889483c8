"""transformers' encoder as the quantized one computes: weights as they are stored, inputs as E4M3 keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftbert.quantization.e4m3 import best_scale, quantize_rows, rounded
from ftbert.quantization.observe import Observed


@dataclass(frozen=True)
class Quantized:
    """A matrix as it is stored, on the CPU: E4M3 [n, k], float32 [n], and the scale of what it multiplies."""

    weight: Tensor
    scale: Tensor
    input_scale: float

    @classmethod
    def of(cls, matrix: Tensor, seen: Observed) -> Quantized:
        """matrix: float [n, k], on the device of what was seen."""
        weight, scale = quantize_rows(matrix, seen.gram)
        return cls(weight.cpu(), scale.cpu(), best_scale(seen.sample, seen.largest))

    def values(self, device: torch.device) -> Tensor:
        """float32 [n, k]"""
        return self.weight.to(device).float() * self.scale.to(device)[:, None]


@contextmanager
def altered(
    model: torch.nn.Module, parameters: Mapping[str, Tensor], inputs: Mapping[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """model with other parameters, by their names, and modules, by theirs, that read a function of their input.

    Sums are in float32, and what no product multiplies stays as it is: what kernels lose in 16 bits is not simulated.
    """

    def read(function: Callable[[Tensor], Tensor], _: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (function(given[0]), *given[1:])

    with ExitStack() as undo:
        for name, tensor in parameters.items():
            home, _, last = name.rpartition(".")
            module = model.get_submodule(home)
            undo.callback(partial(setattr, module, last, getattr(module, last)))
            setattr(module, last, torch.nn.Parameter(tensor, requires_grad=False))
        for name, function in inputs.items():
            hook = model.get_submodule(name).register_forward_pre_hook(partial(read, function))
            undo.callback(hook.remove)
        yield


def reads(scale: float) -> Callable[[Tensor], Tensor]:
    """What E4M3 keeps of a product's input."""
    return partial(rounded, scale=scale)
