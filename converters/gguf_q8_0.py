"""Q8_0, llama.cpp's matrices in 8 bits: blocks of 32 along the columns, each with a scale of its own; w = d q.

In a file a block is 34 bytes, d as fp16 and then 32 of int8. Here the two are planes apart, which a product can read
aligned. Source of the format: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK, BLOCK_BYTES = 32, 34


@dataclass(frozen=True)
class Q8Planes:
    """values int8 [..., k], scales fp16 [..., k/32], of which one belongs to 32 neighbours in a row."""

    values: NDArray[np.int8]
    scales: NDArray[np.float16]


def unpack_q8_0(blocks: NDArray[np.uint8]) -> Q8Planes:
    """blocks: uint8 [..., k/32*34], rows as a file holds them. ValueError where a row is no whole number of blocks."""
    if blocks.dtype != np.uint8 or blocks.shape[-1] % BLOCK_BYTES:
        raise ValueError(f"Q8_0: expected uint8 rows of blocks of {BLOCK_BYTES}, got {blocks.dtype} {blocks.shape}")
    whole = blocks.reshape(*blocks.shape[:-1], -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(whole[..., :2]).view(np.float16)[..., 0]
    values = np.ascontiguousarray(whole[..., 2:]).view(np.int8)
    return Q8Planes(values.reshape(*blocks.shape[:-1], -1), scales)


def pack_q8_0(planes: Q8Planes) -> NDArray[np.uint8]:
    """The blocks again, uint8 [..., k/32*34], byte for byte."""
    whole = planes.values.reshape(*planes.scales.shape, BLOCK).view(np.uint8)
    scales = np.ascontiguousarray(planes.scales)[..., None].view(np.uint8)
    return np.concatenate([scales, whole], axis=-1).reshape(*planes.values.shape[:-1], -1)


def dequantise_q8_0(planes: Q8Planes) -> NDArray[np.float32]:
    """float32 [..., k]; fp16 times int8 is exact in it."""
    whole = planes.values.reshape(*planes.scales.shape, BLOCK).astype(np.float32)
    whole *= planes.scales.astype(np.float32)[..., None]
    return whole.reshape(planes.values.shape)


def quantise_q8_0(rows: NDArray[np.float32]) -> Q8Planes:
    """rows: float32 [..., k]. d is a block's largest magnitude over 127, rounded to fp16; q is x / d with d before that
    rounding, half away from 0. As llama.cpp, x is multiplied by 1 / d. ValueError where k is no multiple of 32."""
    if rows.dtype != np.float32 or rows.shape[-1] % BLOCK:
        raise ValueError(f"Q8_0: expected float32 rows of a multiple of {BLOCK}, got {rows.dtype} {rows.shape}")
    whole = rows.reshape(*rows.shape[:-1], -1, BLOCK)
    scales = np.abs(whole).max(axis=-1, keepdims=True, initial=0) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    scaled = whole * inverse
    # Halves are exact in float32, and trunc(|x| + 0.5) would round 0.49999997 up.
    magnitude = np.abs(scaled)
    below = np.floor(magnitude)
    rounded = np.copysign(below + (magnitude - below >= 0.5), scaled)
    return Q8Planes(rounded.astype(np.int8).reshape(rows.shape), scales[..., 0].astype(np.float16))
