"""transformers' encoder as the quantized one computes: weights as they are stored, inputs as products read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


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
