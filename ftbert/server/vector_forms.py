"""How vectors are written: as numbers of which type, and these as lists, base64 or bytes."""

from __future__ import annotations

import sys
from binascii import b2a_base64
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server.errors import ApiError, validation
from ftbert.text import quantized, scaled

# Cohere's, Voyage's and Mistral's words for numbers, and vLLM's.
BYTES = ("int8", "uint8", "binary", "ubinary")
FLOATS = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ENCODINGS = ("float", "base64", "bytes", "bytes_only")
_ENDS = ("native", "little", "big")
# Numbers that are turned into others at once: 1 ms.
_AT_ONCE = 65536


@dataclass(frozen=True)
class VectorForm:
    """number: one of BYTES, or of FLOATS. encoding: one of ENCODINGS; "float" are lists. big_endian: of what is
    written as base64 or bytes."""

    number: str = "float32"
    encoding: str = "float"
    big_endian: bool = False

    def numbers(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """float32 [n, width] -> as they are written, [n, width], of signs [n, width / 8 rounded up]. ApiError 424 for
        numbers that the type has not."""
        if self.number in ("int8", "uint8"):
            return scaled(rows, self.number)
        if self.number in BYTES:
            return quantized(rows, self.number)
        found = _FLOATS[self.number](rows)
        return found.byteswap() if self.big_endian and found.dtype.itemsize > 1 else found

    def rows(self, rows: NDArray[np.float32]) -> Iterator[NDArray[Any]]:
        """Of float32 [n, width] each row as it is written."""
        step = max(1, _AT_ONCE // max(1, rows.shape[-1]))
        for start in range(0, len(rows), step):
            yield from self.numbers(rows[start : start + step])

    def json(self, numbers: NDArray[Any]) -> Any:
        """What stands in JSON for numbers as they are written."""
        return numbers if self.encoding == "float" else b2a_base64(numbers.tobytes(), newline=False).decode("ascii")


@lru_cache(256)
def choose_form(
    encoding: str | None, embed_dtype: str | None = None, endianness: str | None = None,
    of_bytes: tuple[str, str | None] = ("output_dtype", None),
) -> VectorForm:  # fmt: skip
    """By vLLM's fields, and a field of another API with one of BYTES or None. ApiError 422."""
    encoding = _one_of(ENCODINGS, "encoding_format", encoding)
    number = _one_of(FLOATS, "embed_dtype", embed_dtype)
    ends = _one_of(_ENDS, "endianness", endianness)
    for name, value, usual in (("embed_dtype", number, number == FLOATS[0]), ("endianness", ends, ends != "big")):
        if encoding == "float" and not usual:
            words = f"`{name}` {value} is for `encoding_format` base64, bytes and bytes_only"
            raise validation(words, param=name)
    name, word = of_bytes
    if word is not None and number != FLOATS[0]:
        raise validation(f"`embed_dtype` and `{name}` ask for different numbers; give one of them", param="embed_dtype")
    return VectorForm(word or number, encoding, ends == "big" or (ends == "native" and sys.byteorder == "big"))


def _one_of(words: tuple[str, ...], name: str, given: str | None) -> str:
    """The first where none is given. ApiError 422."""
    if given is not None and given not in words:
        known = f"{', '.join(words[:-1])} or {words[-1]}"
        raise validation(f"`{name}` must be {known}; got {given[:20]!r}", param=name)
    return given or words[0]


# ---- float32 as others, to the nearest, of two as near the even one


def _float16(rows: NDArray[np.float32]) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        found = rows.astype(np.float16)
    if not np.isfinite(found).all():
        raise _beyond("float16")
    return found


def _bfloat16(rows: NDArray[np.float32]) -> NDArray[Any]:
    bits = rows.view(np.uint32)
    found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if (found & 0x7F80 == 0x7F80).any():
        raise _beyond("bfloat16")
    return found


def _eight_bits(rows: NDArray[np.float32], name: str) -> NDArray[Any]:
    mantissa, bias, greatest = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}[name]
    bits = rows.view(np.uint32)
    sizes, dropped = bits & 0x7FFFFFFF, 23 - mantissa
    rounded = (sizes + (1 << (dropped - 1)) - 1 + ((sizes >> dropped) & 1)) >> dropped
    # Below the least exponent all numbers are as far apart: so far as those behind `beside`, where adding rounds.
    beside = np.float32(2.0 ** (24 - bias - mantissa))
    small = (sizes.view(np.float32) + beside).view(np.uint32) - beside.view(np.uint32)
    found = np.where(sizes < (128 - bias) << 23, small, rounded - ((127 - bias) << mantissa))
    if found.max(initial=0) > greatest:
        raise _beyond(name)
    return (found | (bits >> 24 & 128)).astype(np.uint8)


def _beyond(name: str) -> ApiError:
    return ApiError("Backend", f"a number of a vector is beyond the greatest of `embed_dtype` {name}")


_FLOATS: dict[str, Any] = {
    "float32": lambda rows: rows, "float16": _float16, "bfloat16": _bfloat16,
    "fp8_e4m3": lambda rows: _eight_bits(rows, "fp8_e4m3"), "fp8_e5m2": lambda rows: _eight_bits(rows, "fp8_e5m2"),
}  # fmt: skip
