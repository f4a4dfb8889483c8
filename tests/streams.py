"""The residual stream of random models, made unlike that of others."""

from __future__ import annotations

from typing import Any

import torch


def sums(reference: Any) -> list[Any]:
    """The linear layers whose results are added to the stream."""
    ends = (".output.dense", ".o_proj", ".down_proj", ".Wo")
    return [module for name, module in reference.named_modules() if name.endswith(ends)]


def tilt(reference: Any, by: float) -> None:
    """Gives each row of the stream a mean of its own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for linear in sums(reference):
            linear.weight += torch.randn(linear.in_features, generator=generator) * (by / linear.in_features**0.5)
