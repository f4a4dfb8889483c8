"""GGUF files for benchmarks, written without the package gguf: version 3, little endian, data aligned to 32 bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.quantization.q8_0 import q8_0_blocks

ALIGNMENT = 32
F32, Q8_0 = 0, 8  # ggml's numbers
_NUMBERS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7, "uint64": 10,
    "int64": 11, "float64": 12,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor: shape as torch has it, ggml's number of its type, and what makes its bytes when they are written."""

    name: str
    shape: tuple[int, ...]
    type: int
    data: Callable[[], NDArray[Any]]

    @property
    def size(self) -> int:
        count = int(np.prod(self.shape))
        return count // 32 * 34 if self.type == Q8_0 else 4 * count


def floats(name: str, values: NDArray[np.float32]) -> Entry:
    """In Q8_0 where it is a matrix, as llama.cpp's quantize has them."""
    if values.ndim == 1:
        return Entry(name, values.shape, F32, lambda: values)
    return Entry(name, values.shape, Q8_0, lambda: packed(values))


def packed(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    numbers, scales = q8_0_blocks(torch.from_numpy(values))
    return pack_q8_0(numbers.numpy(), scales.numpy())


def pack_q8_0(values: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """int8 [n, k] and a scale for 32 of them [n, k / 32] -> uint8 [n, k / 32 * 34], blocks as a file holds them."""
    whole = values.reshape(*scales.shape, 32).view(np.uint8)
    return np.concatenate([scales[..., None].view(np.uint8), whole], axis=-1).reshape(len(values), -1)


def write_gguf(path: Path, metadata: dict[str, Any], tensors: Iterable[Entry]) -> Path:
    """metadata: bool, int (as uint32), float (as float32), str, lists of str, arrays of numpy. The file appears when
    it is whole."""
    entries, half = list(tensors), path.with_name(path.name + ".new")
    with half.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        start = 0
        for one in entries:
            file.write(_text(one.name) + struct.pack("<I", len(one.shape)))
            file.write(struct.pack(f"<{len(one.shape)}QIQ", *reversed(one.shape), one.type, start))
            start += -(-one.size // ALIGNMENT) * ALIGNMENT
        for one in entries:
            _pad(file)
            begin = file.tell()
            one.data().tofile(file)
            if file.tell() - begin != one.size:
                raise ValueError(f"{one.name}: {file.tell() - begin} bytes, expected {one.size}")
        _pad(file)
    return half.replace(path)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, _NUMBERS[value.dtype.name], len(value)) + value.tobytes()
