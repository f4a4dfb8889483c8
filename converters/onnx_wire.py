"""The protobuf wire format, as far as an ONNX file needs it: fields of a message, read in place.

Written here instead of importing the onnx package because a model must load without it, because nothing of the
weights may be copied to look at the graph, and because a broken file has to end in a sentence.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Field:
    """One field of a message: `value` for numbers (raw bits), else the bytes [start, end) of the file."""

    file: BinaryIO
    number: int
    wire: int
    value: int
    start: int
    end: int

    def bytes(self) -> bytes:
        self.file.seek(self.start)
        found = self.file.read(self.end - self.start)
        if len(found) != self.end - self.start:
            raise ValueError(f"the file ends within {self.end - self.start} bytes at {self.start}")
        return found

    def text(self) -> str:
        return self.bytes().decode("utf-8")

    def signed(self) -> int:
        return self.value - (1 << 64) if self.value >= 1 << 63 else self.value

    def real(self) -> float:
        return float(struct.unpack("<f", struct.pack("<I", self.value & 0xFFFFFFFF))[0])

    def integers(self) -> list[int]:
        """A repeated integer field: packed into bytes, or one entry of an unpacked one."""
        if self.wire == VARINT:
            return [self.signed()]
        numbers, at = [], self.start
        while at < self.end:
            number, at = read_varint(self.file, at, self.end)
            numbers.append(number - (1 << 64) if number >= 1 << 63 else number)
        return numbers

    def floats(self) -> list[float]:
        """A repeated float field, packed or not."""
        if self.wire == FIXED32:
            return [self.real()]
        data = self.bytes()
        if len(data) % 4:
            raise ValueError(f"{len(data)} bytes of floats at {self.start}")
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    def fields(self) -> Iterator[Field]:
        """The fields of an embedded message."""
        if self.wire != BYTES:
            raise ValueError(f"expected a message at {self.start}, got wire type {self.wire}")
        return fields(self.file, self.start, self.end)


def fields(file: BinaryIO, start: int, end: int) -> Iterator[Field]:
    """The fields of the message in [start, end); ValueError where the bytes are none."""
    at = start
    while at < end:
        key, at = read_varint(file, at, end)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError(f"no field number at byte {at}")
        value, first = 0, at
        if wire == VARINT:
            value, at = read_varint(file, at, end)
        elif wire == BYTES:
            length, first = read_varint(file, at, end)
            at = first + length
        elif wire in (FIXED32, FIXED64):
            at += 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at > end:
            raise ValueError(f"a field at byte {first} reaches to {at}, its message ends at {end}")
        if wire in (FIXED32, FIXED64):
            file.seek(first)
            value = int.from_bytes(file.read(at - first), "little")
        yield Field(file, number, wire, value, first, at)


def read_varint(file: BinaryIO, at: int, end: int) -> tuple[int, int]:
    """(number, the byte after it)"""
    file.seek(at)
    chunk = file.read(min(10, end - at))
    number = 0
    for i, byte in enumerate(chunk):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number & 0xFFFFFFFFFFFFFFFF, at + i + 1
    raise ValueError(f"a number at byte {at} does not end")
