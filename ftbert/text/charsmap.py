"""SentencePiece's table of characters (`precompiled_charsmap`), which the package tokenizers follows without a look.

Bytes: the size of a double-array trie, uint32, the trie, then the texts that its values point into, each up to a zero.
A unit of the trie has a label, an offset to its children's block and a flag for a value; source: darts-clone's darts.h.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.input_file import origin, read_json_value

KEY = "precompiled_charsmap"
_LABEL, _HAS_VALUE, _VALUE, _BLOCK = 0x800000FF, 1 << 8, (1 << 31) - 1, 255
_LONGEST = 1024  # bytes of a key; real ones have some dozens


def check_charsmap(data: bytes) -> None:
    """ValueError where a text could lead out of the table."""
    count = int.from_bytes(data[:4], "little") // 4
    texts = data[4 + 4 * count :]
    if len(data) < 8 or count < 1 or 4 + 4 * count > len(data):
        raise ValueError(f"{KEY}: {len(data)} bytes that are no table of SentencePiece's")
    try:
        texts.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{KEY}: its texts are no UTF-8 ({error.reason})") from None
    units = np.frombuffer(data, "<u4", count, 4).astype(np.int64)
    places = _values(units)
    if places.size:
        behind = np.frombuffer(texts + b"\0", np.uint8)
        if places.max() > len(texts) or (behind[places] & 0xC0 == 0x80).any():
            raise ValueError(f"{KEY}: its trie points out of its texts")


def _values(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """All values that a key leads to. ValueError where one leads out of the trie."""
    places = np.arange(len(units))
    bases = places ^ ((units >> 10) << ((units & (1 << 9)) >> 6))  # the block of a unit's children, and its value
    labels = units & _LABEL
    children = np.flatnonzero((labels > 0) & (labels < 256))
    parents = (children ^ labels[children]).astype(np.int64)  # the block that each is in
    children = children[np.argsort(parents, kind="stable")]
    parents = np.sort(parents)
    seen = np.zeros(len(units), bool)
    level, ends = bases[:1], bases[:0]  # the blocks after so many bytes of a key, and where keys end
    found: list[NDArray[np.int64]] = []
    for _ in range(_LONGEST):
        if level.size == 0:
            return np.concatenate(found)
        if (level | _BLOCK).max() >= len(units):  # the next byte leads to anywhere in a block
            raise ValueError(f"{KEY}: its trie leads out of itself")
        found.append(units[ends] & _VALUE)
        level = np.unique(level[~seen[level]])
        seen[level] = True
        first, last = (np.searchsorted(parents, level, side) for side in ("left", "right"))
        counts = last - first
        reached = children[np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())]
        level = bases[reached]
        ends = level[(units[reached] & _HAS_VALUE) != 0]
    raise ValueError(f"{KEY}: its trie has keys of more than {_LONGEST} bytes")


def check_charsmaps(document: Any) -> None:
    """Of what a tokenizer.json holds. ValueError as of `check_charsmap`."""
    for text in _texts(document):
        try:
            data = base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"{KEY}: no base64 ({error})") from error
        check_charsmap(data)


def check_charsmaps_of(path: Path) -> None:
    """Of a tokenizer.json, where there is one. ValueError names it."""
    if path.exists() and KEY.encode() in path.read_bytes():
        document = read_json_value(path)
        try:
            check_charsmaps(document)
        except ValueError as error:
            raise ValueError(f"{origin(path)}: {error}") from error


def _texts(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        one = left.pop()
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        if isinstance(one, dict) and isinstance(text := one.get(KEY), str):
            yield text
