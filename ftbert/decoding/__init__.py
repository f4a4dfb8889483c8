"""Text that a causal language model writes: a cache of keys and values, sampling, stop strings, streams."""

from __future__ import annotations

from ftbert.decoding.language_model import LanguageModel
from ftbert.decoding.texts import TextPieces

__all__ = ["LanguageModel", "TextPieces"]
