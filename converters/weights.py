"""Which table a checkpoint needs, and the table read backwards."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ftbert.checkpoint import EncoderConfig, shown
from ftbert.converters.families import ERNIE_WITH_TASKS, FAMILIES, REFUSED
from ftbert.converters.family import Config, Derived, Family, entry

__all__ = ["FAMILIES", "Family", "find_family", "to_huggingface"]


def find_family(config: Config) -> Family:
    """The table for a config.json of transformers; ValueError says why there is none."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = f": {REFUSED[str(kind)]}" if str(kind) in REFUSED else ""
        raise ValueError(f"model type {shown(kind)} is not supported{reason}; supported: {', '.join(sorted(FAMILIES))}")
    if kind == "ernie" and entry(config, "use_task_id", "bool", False):
        return ERNIE_WITH_TASKS
    return FAMILIES[str(kind)]


def to_huggingface(
    config: Config, encoder: EncoderConfig, weights: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our tensors of the encoder as (their name without prefix, tensor)."""
    family = find_family(config)
    for ours, tensor in weights.items():
        row = family.row(ours)
        if isinstance(row, Derived):
            yield from zip(row.sources, row.undo(encoder, config, tensor), strict=True)
        else:
            names = family.source_names(ours)
            yield from zip(names, tensor.chunk(len(names)), strict=True)
