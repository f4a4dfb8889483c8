"""Sequences of ids for `check` and `bench`: from texts where there is a tokenizer, else random ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from ftbert.model import Model
from ftbert.text import tokenizer_of


def sequences_of(model: Model, texts: Sequence[str], longest: int | None = None) -> list[torch.Tensor]:
    """int64 [tokens] per text. Random ids of the same ragged kind when the model has no tokenizer."""
    limit = min(longest or model.config.max_seq, model.config.max_seq)
    if model.folder is not None:
        with suppress(FileNotFoundError):
            encoded = tokenizer_of(model, scores=True).encode_batch(texts)  # whatever its vectors are
            return [torch.from_numpy(ids[:limit]) for ids in encoded]
    words = [min(limit, len(text.split()) + 2) for text in texts]
    return random_sequences(model.config.vocab, words)


def random_sequences(vocab: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """int64 [length] each, the same on every call; the first ids, usually special, are left out."""
    generator = torch.Generator().manual_seed(0)
    first = min(vocab - 1, 1000 if vocab > 2000 else 5)
    return [torch.randint(first, vocab, (length,), generator=generator) for length in lengths]


def ragged_lengths(batch: int, longest: int) -> list[int]:
    """Lengths like those of real short texts: one of `longest`, the others falling off, a third full."""
    # The quantiles of an exponential distribution, which reviews and queries follow closely enough.
    steps = (torch.arange(batch, dtype=torch.float64) + 0.5) / batch
    lengths = (-torch.log1p(-steps) * longest * 0.31).clamp(min=3, max=longest).round().int().tolist()
    lengths[-1] = longest
    shuffled = torch.randperm(batch, generator=torch.Generator().manual_seed(0)).tolist()
    return [lengths[place] for place in shuffled]
