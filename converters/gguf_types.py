"""The types of tensors in a GGUF file: how many bytes they take, and what they are in floats.

F32, F16, BF16 and Q8_0 are read here. Every other type is dequantised by the package gguf, which is llama.cpp's own. A
block of Q8_0 is 34 bytes, a scale d as fp16 and then 32 of int8; w = d q (ggml-quants.c of llama.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class GgufType:
    """block: neighbours in a row that are stored together, in `bytes`."""

    name: str
    block: int
    bytes: int

    @property
    def is_float(self) -> bool:
        """Stored as floats, of which none are dequantised."""
        return self.name in FLOATS


BLOCK_BYTES = 34  # of Q8_0
_INSTALL = "pip install gguf, or ftbert with its extra, ftbert[gguf]"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

# By ggml's number. Numbers that are missing were types of releases before GGUF, or tell the layout of one machine.
TYPES = {
    number: GgufType(name, block, size)
    for number, name, block, size in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1), (25, "I16", 1, 2), (26, "I32", 1, 4), (27, "I64", 1, 8), (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36), (41, "Q1_0", 128, 18),
    )
}  # fmt: skip


def to_torch(data: NDArray[np.uint8], kind: GgufType, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of that shape in the type that it is stored in, in the memory of `data`, or dequantised to float32.
    data: its bytes. ImportError where the package gguf is needed and absent, ValueError for a type without floats."""
    if kind.is_float:
        return torch.from_numpy(data).view(FLOATS[kind.name]).view(shape)
    rows = data.reshape(*shape[:-1], shape[-1] // kind.block * kind.bytes)
    found = dequantise_q8_0(rows) if kind.name == "Q8_0" else _by_package(rows, kind)
    return torch.from_numpy(np.ascontiguousarray(found, dtype=np.float32)).view(shape)


def _by_package(rows: NDArray[np.uint8], kind: GgufType) -> Any:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ImportError(f"type {kind.name} is dequantised by the package gguf: {_INSTALL}") from error
    try:
        with np.errstate(all="ignore"):  # broken scales, which whoever reads the result sees
            return dequantize(rows, GGMLQuantizationType[kind.name])
    except (KeyError, NotImplementedError) as error:
        raise ValueError(f"type {kind.name} holds no weights that the package gguf can dequantise") from error


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
