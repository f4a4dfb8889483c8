"""A JSON body before it is decoded: how many values it has, which keys are there twice, which are there at all.

A decoder holds the event loop until it is done: 30 MB of small lists take seconds, 30 MB of texts some 30 ms.
"""

from __future__ import annotations

import asyncio
import json

import msgspec

from ftbert.server.errors import ApiError, too_many, validation

# Bytes that are looked at without letting others of the event loop in between: 8 ms where all of it is short strings.
_AT_ONCE = 32768
# Bytes of a body that takes no time to decode, whatever it has.
_SMALL = 65536
_MOST_NUMBERS = 1 << 20
_MOST_BETWEEN = 16 * _MOST_NUMBERS  # bytes that are in no string
_MOST_DEPTH = 1000
_LONGEST_KEY = 200
_SPACE = b" \t\r\n"
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))


class BodyCheck:
    """Of the bodies of a process."""

    def __init__(self, most_texts: int) -> None:
        self._most_items = 16 * most_texts + 1024
        self._large = asyncio.Lock()  # one after the other: what they hold the event loop for does not add up

    async def check(self, body: bytes | bytearray) -> None:
        """ApiError 422 for an object that has a key twice, and for a large body with many more values than the most
        texts, and ids of as many tokens, have. What is no JSON passes: the decoder tells."""
        if len(body) <= _SMALL:
            if body.count(b":") > 1:
                _Scan(_SMALL, _SMALL).feed(bytes(body))
            return
        async with self._large:
            scan, view = _Scan(self._most_items, _MOST_NUMBERS), memoryview(body)
            for start in range(0, len(body), _AT_ONCE):
                scan.feed(bytes(view[start : start + _AT_ONCE]))
                await asyncio.sleep(0)


class _Scan:
    """Of JSON in pieces. Counts strings, lists and objects, and the commas between values."""

    def __init__(self, most_items: int, most_numbers: int) -> None:
        self._most_items, self._most_numbers = most_items, most_numbers
        self._items, self._commas, self._between_bytes = 0, 0, 0
        self._in_string = False
        self._string: bytes | None = None  # the one that is open, or has just ended and may be a key
        self._odd = b""  # a backslash at the end of a piece
        self._open: list[set[bytes] | None] = []  # the keys so far of each object and list that is open

    def feed(self, piece: bytes) -> None:
        """ApiError."""
        piece = self._odd + piece
        self._odd = b""
        if b"\\" in piece:
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, self._odd = piece[:-1], b"\\"
            # Then each quote begins or ends a string. JSON has no bytes 1 and 2.
            piece = piece.replace(b"\\\\", b"\1\1").replace(b'\\"', b"\1\2")
        parts = piece.split(b'"')
        between = b"".join(parts[self._in_string :: 2])
        for i, part in enumerate(parts):
            if i:
                self._in_string = not self._in_string
                if self._in_string:
                    self._string = b""
            if self._in_string:
                self._string = ((self._string or b"") + part)[:_LONGEST_KEY]
            elif part:
                self._between(part)
        self._items += len(parts) // 2 + between.count(b"[") + between.count(b"{")
        self._commas += between.count(b",")
        self._between_bytes += len(between)
        if self._items > self._most_items:
            raise too_many(f"the request has more than {self._most_items} texts, lists and objects; lower the batch "
                           "size below the maximum allowed batch size")  # fmt: skip
        if self._commas > self._most_numbers + self._most_items or self._between_bytes > _MOST_BETWEEN:
            raise validation(f"the request has more than {self._most_numbers} numbers, or more than {_MOST_BETWEEN} "
                             "bytes that are in no text; send fewer ids at once")  # fmt: skip

    def _between(self, part: bytes) -> None:
        """What stands between two strings, or a piece of it."""
        if self._string is not None:
            found = part.lstrip(_SPACE)
            if not found:
                return
            if found[:1] == b":" and self._open:
                self._key(self._string)
            self._string = None
        for bracket in part.translate(None, _NOT_BRACKETS):
            if bracket in b"{[":
                self._open.append(None)
                if len(self._open) > _MOST_DEPTH:
                    raise ApiError("Validation", "the body is nested too deeply", status=400)
            elif self._open:
                self._open.pop()

    def _key(self, key: bytes) -> None:
        if len(key) == _LONGEST_KEY:  # only its beginning is known
            return
        if b"\\" in key or b"\1" in key:
            key = key.replace(b"\1\1", b"\\\\").replace(b"\1\2", b'\\"')
            try:
                key = json.loads(b'"' + key + b'"').encode("utf-8", "surrogatepass")
            except ValueError:
                return
        keys = self._open[-1]
        if keys is None:
            self._open[-1] = {key}
        elif key in keys:
            raise validation(f"duplicate field `{key[:40].decode('utf-8', 'replace')}`")
        else:
            keys.add(key)


async def fields_of(body: bytes | bytearray | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Of the outermost object; empty for anything else. Others of the event loop come first where that took time."""
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if memoryview(body).nbytes > _SMALL:
        await asyncio.sleep(0)
    return found
