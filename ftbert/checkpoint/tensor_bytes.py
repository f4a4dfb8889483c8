"""Bytes of the tensors in a safetensors file, and their checksums: written with it, compared when they are read."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

# The only entry of the header's __metadata__: the library writes several in an order that changes from run to run.
KEY = "ftbert.crc32"
_PART = 4 << 20  # bytes under one CRC-32: zlib sums 2.3 GB/s, so parts are read and summed side by side
_MOST_THREADS = 8
_PIECE, _PIECES = 4096, 16  # bytes, and how many of them are a sample of a tensor
_Made = TypeVar("_Made")
_REMEDY = (
    "the file was changed or damaged after ftbert wrote it: convert or quantize the model again; "
    "FTBERT_VERIFY=off reads it as it is, and load(..., verify=False) does where it is the model's own"
)


def verifies_files() -> bool:
    """Whether checksums are compared at all: FTBERT_VERIFY=off leaves that out."""
    return os.environ.get("FTBERT_VERIFY", "") != "off"


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The header's __metadata__ of a file of these tensors, which are contiguous and on the CPU."""
    found = {}
    for name, tensor in tensors.items():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()

        def part(begin: int, end: int, data: NDArray[np.uint8] = data) -> int:
            return zlib.crc32(data[begin:end].data)

        found[name] = _of_parts(part, data.size)
    return {KEY: json.dumps(found)}


def find_checksums(metadata: object, names: set[str], where: str) -> dict[str, str]:
    """Those of a file's __metadata__; {} where there are none. ValueError where they are those of other tensors."""
    text = metadata.get(KEY) if isinstance(metadata, dict) else None
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.keys() != names:
        raise ValueError(f"{where}: {KEY} in its header is not of its tensors; {_REMEDY}")
    return {name: str(value) for name, value in found.items()}


def read_bytes(path: Path, name: str, start: int, size: int, expected: str | None) -> NDArray[np.uint8]:
    """The `size` bytes of the tensor `name` from `start` on. expected: their checksum; None compares nothing.
    ValueError where the file ends within them, or where they are others."""
    data = np.empty(size, np.uint8)
    with path.open("rb") as file:

        def part(begin: int, end: int) -> int:
            at = begin
            while at < end:
                count = os.preadv(file.fileno(), [data[at:end].data], start + at)
                if count == 0:
                    raise ValueError(f"{path}: ends within {name}; has it been changed since it was opened?")
                at += count
            return 0 if expected is None else zlib.crc32(data[begin:end].data)

        found = _of_parts(part, size)
    if expected is not None and found != expected:
        raise ValueError(f"{path}: {name}: its checksum is {_shown(found)}, expected {_shown(expected)}; {_REMEDY}")
    return data


def digest_of(tensor: torch.Tensor) -> str:
    """Of all its bytes, on the CPU: a CRC-32 of the sum of each 4 KiB, which takes a fifth of the time that CRC-32 of
    all takes. It tells tensors apart that differ by chance; a damaged file is found by its checksums."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a view into another tensor, of which torch makes no int64
        data = data.clone()
    whole = data.numel() // _PIECE * _PIECE
    sums = data[:whole].view(torch.int64).view(-1, _PIECE // 8).sum(1)
    return f"{zlib.crc32(data[whole:].numpy().data, zlib.crc32(sums.numpy().data)):08x}"


def sample_of(read: Callable[[int, int], bytes | memoryview], size: int) -> str:
    """A CRC-32 of up to _PIECES pieces of `size` bytes. read: those from the first number to the second."""
    count = min(_PIECES, -(-size // _PIECE))
    begins = [(size - _PIECE) * i // (count - 1) for i in range(count)] if count > 1 else [0] * count
    crc32 = 0
    for begin in begins:
        crc32 = zlib.crc32(read(begin, min(begin + _PIECE, size)), crc32)
    return f"{crc32:08x}"


def in_parts(work: Callable[[int, int], _Made], size: int, part: int) -> list[_Made]:
    """What `work` makes of each `part` of `size` bytes, given its first byte and the one behind it: side by side, on up
    to 8 of torch's threads."""
    begins = range(0, size, part)
    ends = [min(begin + part, size) for begin in begins]
    threads = min(_MOST_THREADS, torch.get_num_threads(), len(begins))
    if threads <= 1:
        return list(map(work, begins, ends))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, begins, ends))


def _of_parts(crc32: Callable[[int, int], int], size: int) -> str:
    """8 hex digits of each _PART of `size` bytes. crc32: of the bytes from the first number to the second."""
    return "".join(f"{one:08x}" for one in in_parts(crc32, size, _PART))


def _shown(checksum: str) -> str:
    return checksum if len(checksum) <= 16 else f"{checksum[:16]}..."
