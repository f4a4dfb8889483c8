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
    numbers, scales = q8_0_planes(blocks.reshape(-1, blocks.shape[-1]))
    found = numbers.view(-1, 32).float().mul_(scales.view(-1, 1))
    return found.numpy().reshape(*blocks.shape[:-1], -1)


def q8_0_planes(rows: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: uint8 [n, k/32*34] -> numbers int8 [n, k], scales fp16 [n, k/32]."""
    blocks = torch.from_numpy(rows).view(len(rows), -1, BLOCK_BYTES)
    numbers, scales = blocks[..., 2:].contiguous(), blocks[..., :2].contiguous()
    return numbers.view(torch.int8).flatten(1), scales.view(torch.float16).flatten(1)
