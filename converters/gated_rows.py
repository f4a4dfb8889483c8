"""The matrix ffn.up of gated layers, whose rows alternate, <-> theirs, where gate and up are apart or halves."""

from __future__ import annotations

import torch

from ftbert.checkpoint import RowOrder
from ftbert.converters.family import Derived


def _alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _apart(ours: torch.Tensor) -> list[torch.Tensor]:
    """[gate, up]"""
    return [ours[0::2].contiguous(), ours[1::2].contiguous()]


def two_matrices(gate: str, up: str) -> Derived:
    return Derived(
        (gate, up),
        lambda encoder, config, ours: [[ours[0] // 2, *ours[1:]]] * 2,
        RowOrder(lambda sources: _alternate(*sources)),
        lambda encoder, config, ours: _apart(ours),
    )


def two_halves(name: str, *, gate_first: bool) -> Derived:
    """One matrix, of which the activation takes the first half or the second."""
    order = 1 if gate_first else -1
    return Derived(
        (name,),
        lambda encoder, config, ours: [ours],
        RowOrder(lambda sources: _alternate(*sources[0].chunk(2)[::order])),
        lambda encoder, config, ours: [torch.cat(_apart(ours)[::order])],
    )
