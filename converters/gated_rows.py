"""The matrix ffn.up of gated layers, whose rows alternate, <-> theirs, where gate and up are apart or halves."""

from __future__ import annotations

import torch

from ftbert.checkpoint import ModelConfig, RowOrder
from ftbert.converters.family import Config, Derived


def _alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _apart(ours: torch.Tensor) -> list[torch.Tensor]:
    """[gate, up]"""
    return [ours[0::2].contiguous(), ours[1::2].contiguous()]


def _two_shapes(encoder: ModelConfig, config: Config, ours: list[int]) -> list[list[int]]:
    return [[ours[0] // 2, *ours[1:]]] * 2


def _one_shape(encoder: ModelConfig, config: Config, ours: list[int]) -> list[list[int]]:
    return [ours]


def two_matrices(gate: str, up: str) -> Derived:
    return Derived(
        (gate, up),
        _two_shapes,
        RowOrder(lambda sources: _alternate(*sources)),
        lambda encoder, config, ours: _apart(ours),
    )


def two_halves(name: str, *, gate_first: bool) -> Derived:
    """One matrix, of which the activation takes the first half or the second."""
    order = 1 if gate_first else -1
    return Derived(
        (name,),
        _one_shape,
        RowOrder(lambda sources: _alternate(*sources[0].chunk(2)[::order])),
        lambda encoder, config, ours: [torch.cat(_apart(ours)[::order])],
    )
