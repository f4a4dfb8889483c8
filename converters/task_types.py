"""ERNIE's task type embedding: inputs always have task 0, so its row is added to every token type once and for all."""

from __future__ import annotations

import torch

from ftbert.checkpoint import EncoderConfig
from ftbert.converters.family import Config, Derived, entry


def _shapes(encoder: EncoderConfig, config: Config) -> list[list[int]]:
    rows = entry(config, "task_type_vocab_size", "int", 3)
    return [[encoder.token_types, encoder.embedding], [rows, encoder.embedding]]


def _make(encoder: EncoderConfig, sources: list[torch.Tensor]) -> torch.Tensor:
    return sources[0] + sources[1][0]


def _undo(encoder: EncoderConfig, config: Config, ours: torch.Tensor) -> list[torch.Tensor]:
    return [ours, torch.zeros(_shapes(encoder, config)[1], dtype=ours.dtype)]


FOLDED_TASK_TYPES = Derived(
    ("embeddings.token_type_embeddings.weight", "embeddings.task_type_embeddings.weight"), _shapes, _make, _undo
)
