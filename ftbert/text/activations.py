"""Activations that a sentence-transformers folder names, by the names of torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]

# Those without weights, which are made without arguments.
_NAMES = (
    "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity", "LeakyReLU", "LogSigmoid",
    "Mish", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
)  # fmt: skip


def activation(name: Any, where: str) -> Activation:
    """name: "torch.nn.modules.activation.Tanh"; where: the file and its entry. ValueError for any other code."""
    kind = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.") or kind not in _NAMES:
        raise ValueError(f"{where} {name!r} is not supported; expected one of torch.nn's {', '.join(_NAMES)}")
    made: Activation = getattr(torch.nn, kind)()
    return made
