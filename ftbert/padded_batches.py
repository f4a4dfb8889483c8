"""Sequences of ids as the padded batches that transformers reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MASK_KINDS = ("right", "left", "holes")


def padded(
    sequences: Sequence[torch.Tensor], kind: str, pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), both int64 [batch, longest], padded "right", "left", or right with "holes" inside."""
    batch, longest = len(sequences), max(map(len, sequences))
    ids = torch.full((batch, longest), pad, dtype=torch.int64)
    mask = torch.zeros((batch, longest), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        where = slice(longest - len(sequence), longest) if kind == "left" else slice(0, len(sequence))
        ids[row, where] = sequence
        mask[row, where] = 1
    if kind == "holes":
        # The first token stays, so that no row is empty: transformers gives NaN or noise for such rows.
        generator = torch.Generator().manual_seed(1)
        mask[:, 1:] *= (torch.rand((batch, longest - 1), generator=generator) > 0.2).long()
    return ids.to(device), mask.to(device)
