"""Q8_0, llama.cpp's matrices in 8 bits: blocks of 32 along the columns, each with a scale of its own; w = d q.

In a file a block is 34 bytes, d as fp16 and then 32 of int8. Source of the format: ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK_BYTES = 34


def dequantise_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """blocks: uint8 [..., k/32*34], rows as a file holds them -> float32 [..., k]; fp16 times int8 is exact in it. By
    all of torch's threads. ValueError where a row is no whole number of blocks."""
    if blocks.dtype != np.uint8 or blocks.shape[-1] % BLOCK_BYTES:
        raise ValueError(f"Q8_0: expected uint8 rows of blocks of {BLOCK_BYTES}, got {blocks.dtype} {blocks.shape}")
    whole = np.ascontiguousarray(blocks).reshape(*blocks.shape[:-1], -1, BLOCK_BYTES)
    found = torch.from_numpy(np.ascontiguousarray(whole[..., 2:]).view(np.int8)).float()
    found *= torch.from_numpy(np.ascontiguousarray(whole[..., :2]).view(np.float16)).float()
    return found.numpy().reshape(*blocks.shape[:-1], -1)
