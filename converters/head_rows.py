"""A fused projection whose rows of query, key and value stand in turns, head by head <-> ours, one after the other."""

from __future__ import annotations

import torch

from ftbert.checkpoint import ModelConfig
from ftbert.converters.family import Config, Derived


def _make(encoder: ModelConfig, sources: list[torch.Tensor]) -> torch.Tensor:
    attention = encoder.layers[0].attention
    by_head = sources[0].view(attention.heads, 3, attention.head_size, -1)
    return by_head.transpose(0, 1).reshape(sources[0].shape).contiguous()


def _undo(encoder: ModelConfig, config: Config, ours: torch.Tensor) -> list[torch.Tensor]:
    attention = encoder.layers[0].attention
    apart = ours.view(3, attention.heads, attention.head_size, -1)
    return [apart.transpose(0, 1).reshape(ours.shape).contiguous()]


def head_by_head(name: str) -> Derived:
    """The weight of that name."""
    return Derived((name,), lambda encoder, config, ours: [ours], _make, _undo)
