"""The GGUF container, versions 2 and 3, little endian: metadata by key, and tensors by name.

The layout is that of ggml's docs/gguf.md. Every count, length and offset is held against the file's size before
anything is made of it, so that a broken file costs no memory.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.checkpoint import expect_file, sample_of, shown
from ftbert.converters.gguf_types import TYPES, GgufType, q8_0_planes, to_torch

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMS, _MOST_NESTED = 4, 3
_MOST_ALIGNMENT = 1 << 20
_SMALLEST_ENTRY = 8 + 4 + 1  # bytes of a key's length, its value's type and one of a value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GgufTensor:
    """shape: as torch has it, the reverse of the file's `ne`. start: of its bytes in the file. part: of the model's
    files, which."""

    type: GgufType
    shape: tuple[int, ...]
    start: int
    size: int
    part: int = 0


class GgufFile:
    """Files that are open for as long as this lives. path: of a model in parts, the first. metadata: by key; numbers,
    texts, bools, and lists of them, which of numbers are numpy's. tensors: by name, in the files' order."""

    def __init__(
        self, paths: tuple[Path, ...], files: tuple[BinaryIO, ...], metadata: dict[str, Any],
        tensors: dict[str, GgufTensor],
    ) -> None:  # fmt: skip
        self.paths, self.path, self.metadata, self.tensors = paths, paths[0], metadata, tensors
        self.files = files

    def read(self, name: str) -> torch.Tensor:
        """In the type that it is stored in, or dequantised to float32. Errors as of `to_torch`, ValueError where the
        file has become shorter."""
        tensor = self.tensors[name]
        try:
            return to_torch(self._bytes(tensor), tensor.type, tensor.shape)
        except (ValueError, ImportError) as error:
            raise type(error)(f"{self.paths[tensor.part]}: {name}: {error}") from error

    def read_blocks(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a matrix [n, k] in Q8_0 numbers int8 [n, k] and scales fp16 [n, k / 32]. ValueError as of `read`."""
        tensor = self.tensors[name]
        try:
            return q8_0_planes(self._bytes(tensor).reshape(tensor.shape[0], -1))
        except ValueError as error:
            raise ValueError(f"{self.paths[tensor.part]}: {name}: {error}") from error

    def sample(self, name: str) -> str:
        """As of TensorSource, of the bytes as they are stored."""
        tensor = self.tensors[name]
        file = self.files[tensor.part].fileno()
        return sample_of(lambda begin, end: os.pread(file, end - begin, tensor.start + begin), tensor.size)

    def _bytes(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Read, not mapped: a mapping of a file that was cut short ends the process."""
        data = np.empty(tensor.size, np.uint8)
        left, file = memoryview(data), self.files[tensor.part].fileno()  # type: ignore[arg-type]
        while left:  # a call reads 2 GB at most
            count = os.preadv(file, [left], tensor.start + tensor.size - len(left))
            if count == 0:
                raise ValueError("the file ends within it; has it been changed since it was opened?")
            left = left[count:]
        return data


class _Cursor:
    """Reads on from `at`; ValueError where the file ends before."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def take(self, layout: str) -> Any:
        found = struct.calcsize("<" + layout)
        self.expect(found, "a number")
        (value,) = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += found
        return value

    def expect(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise ValueError(f"{what} of {count} bytes at {self.at} passes the file's end at {self.size}")

    def text(self) -> str:
        count = self.take("Q")
        self.expect(count, "a text")
        found = self.data[self.at : self.at + count]
        self.at += count
        return found.decode("utf-8", "replace")  # tokens of some vocabularies are no UTF-8

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(depth)
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind}, which GGUF does not have")
        return self.take(_SCALARS[kind])

    def array(self, depth: int) -> Any:
        if depth >= _MOST_NESTED:
            raise ValueError(f"lists in lists, more than {_MOST_NESTED} deep")
        kind, count = self.take("I"), self.take("Q")
        if kind in _SCALARS:
            found = np.dtype("?" if kind == _BOOL else "<" + _SCALARS[kind])
            self.expect(count * found.itemsize, "a list")
            values = np.frombuffer(self.data, "u1" if kind == _BOOL else found, count, self.at).copy()
            self.at += count * found.itemsize
            return values != 0 if kind == _BOOL else values
        self.expect(count * (8 if kind == _STRING else 12), "a list")
        return [self.value(kind, depth + 1) for _ in range(count)]


def read_gguf(path: Path) -> GgufFile:
    """One file. ValueError says what is broken, OSError that the file cannot be read; both name it."""
    expect_file(path)
    file = path.open("rb")  # for as long as tensors are read: another file of that name would be another model
    if file.seek(0, 2) < 24:
        raise ValueError(f"{path}: no GGUF file: it is shorter than a header")
    try:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = _read(_Cursor(data))
    except ValueError as error:
        raise ValueError(f"{path}: no GGUF file that ftbert can read: {error}") from error
    return GgufFile((path,), (file,), metadata, tensors)


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if (magic := cursor.data[:4]) != _MAGIC:
        raise ValueError(f"it begins with {shown(magic)}, not with {_MAGIC!r}")
    cursor.at = 4
    version = cursor.take("I")
    if version not in (2, 3):
        other = "; it is big endian" if version and not version & 0xFFFF else ""
        raise ValueError(f"version {version}{other}: versions 2 and 3, little endian, are read")
    count, entries = cursor.take("Q"), cursor.take("Q")
    cursor.expect(count * _SMALLEST_TENSOR + entries * _SMALLEST_ENTRY, "a list of tensors and entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"two entries {shown(key)}")
        metadata[key] = cursor.value(cursor.take("I"))
    tensors = dict[str, GgufTensor]()
    for _ in range(count):
        name, tensor = _tensor(cursor)
        if name in tensors:
            raise ValueError(f"two tensors {shown(name)}")
        tensors[name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment {shown(alignment)}: expected a power of two")
    first = -(-cursor.at // alignment) * alignment
    placed = {name: GgufTensor(one.type, one.shape, first + one.start, one.size) for name, one in tensors.items()}
    _check_places(placed, alignment, first, cursor.size)
    return metadata, placed


def _tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    """start: counted from where the data begin."""
    name, dims = cursor.text(), cursor.take("I")
    if not 0 < dims <= _MOST_DIMS:
        raise ValueError(f"tensor {shown(name)} has {dims} dimensions: expected 1 to {_MOST_DIMS}")
    shape = [cursor.take("Q") for _ in range(dims)]
    number, start = cursor.take("I"), cursor.take("Q")
    if (kind := TYPES.get(number)) is None:
        raise ValueError(f"tensor {shown(name)} has type {number}, which ftbert does not know")
    if min(shape) < 1 or shape[0] % kind.block:
        raise ValueError(f"tensor {shown(name)} is {shape}: {kind.name} is stored in blocks of {kind.block}")
    size = shape[0] // kind.block * kind.bytes
    for other in shape[1:]:
        size *= other
    return name, GgufTensor(kind, tuple(reversed(shape)), start, size)


def _check_places(tensors: dict[str, GgufTensor], alignment: int, first: int, size: int) -> None:
    """Tensors lie apart, as every writer lays them: no file means more memory than a few times its own."""
    end = first
    for name, one in sorted(tensors.items(), key=lambda item: item[1].start):
        if one.start % alignment or one.start < end:
            raise ValueError(f"tensor {shown(name)} begins at {one.start}, in another one or off its alignment")
        end = one.start + one.size
        if end > size:
            raise ValueError(f"tensor {shown(name)} ends at {end}, behind the file's end at {size}")
