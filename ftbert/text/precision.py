"""Vectors in fewer bits, by the names and rules of sentence-transformers' quantize_embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftbert.text.checks import one_of

PRECISIONS = ("float32", "int8", "uint8", "binary", "ubinary")


def quantized(vectors: np.ndarray[Any, Any], precision: str, ranges: Any = None) -> np.ndarray[Any, Any]:
    """float32 [n, width] -> the same, int8 or uint8 [n, width], or eight signs a byte, [n, width / 8 rounded up].

    int8 and uint8 divide each entry's range in 256 steps: `ranges`, as `check_ranges` returns them, or that of these
    n vectors. What lies outside becomes the nearest. ValueError for one vector without ranges.
    """
    if precision == "float32":
        return vectors
    if precision.endswith("binary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if ranges is None:
        if len(vectors) == 1:
            raise ValueError(
                f"precision={precision!r} takes the range of several vectors; encode more texts in one call, or give "
                "ranges"
            )
        if not len(vectors):
            return vectors.astype(precision)
        ranges = ranges_of(vectors)
    low, steps = ranges[0], (ranges[1] - ranges[0]) / 255
    steps = np.where(steps == 0, 1, steps)
    values = np.clip(np.floor((vectors - low) / steps), 0, 255)
    return values.astype(np.uint8) if precision == "uint8" else (values - 128).astype(np.int8)


def scaled(vectors: np.ndarray[Any, Any], precision: str) -> np.ndarray[Any, Any]:
    """float32 [n, width] of length 1 -> int8 [n, width], 127 times each entry, rounded; or uint8, 128 more.

    The scale is that of no other vectors: a product of two int8 vectors, by 127 squared, is about their cosine.
    """
    values = np.rint(vectors * np.float32(127)).clip(-127, 127).astype(np.int8)
    return values if precision == "int8" else values.view(np.uint8) ^ np.uint8(128)


def ranges_of(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """float32 [2, width]: the least and the greatest of each entry of [n, width]."""
    return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def check_ranges(ranges: Any, precision: str, width: int) -> np.ndarray[Any, Any]:
    """float32 [2, width]; ValueError for another shape, another precision than int8 and uint8, a least entry that is
    not the lesser."""
    if precision not in ("int8", "uint8"):
        raise ValueError(f"ranges are for precision int8 and uint8; got {precision!r}")
    found = np.asarray(ranges)
    if found.shape != (2, width) or not np.issubdtype(found.dtype, np.floating):
        raise ValueError(f"ranges must be floats [2, {width}]; got {found.dtype} {list(found.shape)}")
    if not np.isfinite(found).all() or (found[0] > found[1]).any():
        raise ValueError("ranges must be finite: the least of each entry, then the greatest")
    return found.astype(np.float32)


def stored_as(precision: str, width: int) -> tuple[np.dtype[Any], int]:
    """The type of a vector's elements, and how many it has. ValueError for what is none of `PRECISIONS`."""
    one_of(PRECISIONS, "precision", precision)
    kinds = {"binary": "int8", "ubinary": "uint8"}
    return np.dtype(kinds.get(precision, precision)), -(-width // 8) if precision in kinds else width
