"""Vectors in fewer bits, by the names and rules of sentence-transformers' quantize_embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


def quantized(vectors: np.ndarray[Any, Any], precision: str) -> np.ndarray[Any, Any]:
    """float32 [n, width] -> the same, int8 or uint8 [n, width], or eight signs a byte, [n, width / 8 rounded up].

    int8 and uint8 spread the range of each entry over these n vectors; ValueError where n is 1.
    """
    if precision == "float32":
        return vectors
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if len(vectors) == 1:
        raise ValueError(f"precision={precision!r} takes the range of several vectors; encode more texts in one call")
    if not len(vectors):
        return vectors.astype(precision)
    low = vectors.min(axis=0)
    steps = (vectors.max(axis=0) - low) / 255
    steps = np.where(steps == 0, 1, steps)
    values = np.clip(np.floor((vectors - low) / steps), 0, 255)
    return values.astype(np.uint8) if precision == "uint8" else (values - 128).astype(np.int8)
