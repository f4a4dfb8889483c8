"""JSON in and out: a body is looked at before it is decoded, an answer is written in parts.

A decoder holds the event loop until it is done: 30 MB of small lists take seconds, 30 MB of texts some 30 ms. So it is
known before how many values a body has, and which keys are there twice.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from ftbert.server.errors import ApiError, too_many, validation
from ftbert.server.schemas import ONLY

T = TypeVar("T")

# Bytes that are looked at without letting others of the event loop in between: 8 ms where all of it is short strings.
_AT_ONCE = 32768
# Bytes of a body that takes no time to decode, whatever it has.
_SMALL = 65536
_MOST_NUMBERS = 1 << 20
_MOST_BETWEEN = 16 * _MOST_NUMBERS  # bytes that are in no string
_MOST_DEPTH = 1000
_LONGEST_KEY = 200
_SPACE = b" \t\r\n"
_STRINGS = re.compile(rb'"([^"]*)"([ \t\r\n]*:)?')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
# Floats that are written without letting others of the event loop in between: 2 ms.
_FLOATS_AT_ONCE, _BYTES_AT_ONCE = 65536, 1 << 18
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_named: dict[Any, re.Pattern[bytes] | None] = {}  # what a body with a field of ONLY has, by its type


class BodyCheck:
    """Of the bodies of a process."""

    def __init__(self, most_texts: int) -> None:
        self._most_items = 16 * most_texts + 1024
        self._large = asyncio.Lock()  # one after the other: what they hold the event loop for does not add up

    async def check(self, body: bytes | bytearray) -> None:
        """ApiError 422 for an object that has a key twice, and for a large body with many more values than the most
        texts, and ids of as many tokens, have. What is no JSON passes: the decoder tells."""
        if len(body) <= _SMALL:
            if body.count(b":") > 1 and not _has_each_key_once(body):
                _Scan(_SMALL, _SMALL).feed(bytes(body))
            return
        async with self._large:
            scan, view = _Scan(self._most_items, _MOST_NUMBERS), memoryview(body)
            for start in range(0, len(body), _AT_ONCE):
                scan.feed(bytes(view[start : start + _AT_ONCE]))
                await asyncio.sleep(0)


def _has_each_key_once(body: bytes | bytearray) -> bool:
    """Of the usual body, one object whose strings have no backslash, in a third of a _Scan's time; False: not known."""
    if body.count(b"{") > 1 or b"\\" in body or body.count(b"[") >= _MOST_DEPTH:
        return False
    keys = [string for string, colon in _STRINGS.findall(body) if colon]
    return len(set(keys)) == len(keys)


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


def decode(body: bytes | bytearray, schema: type[T]) -> T:
    """ApiError 400 for what is no JSON, 422 for another shape. A key that is there twice is for BodyCheck."""
    if not body:
        raise ApiError("Empty", "the request has no body", status=400)
    decoder = _decoders.get(schema)
    if decoder is None:
        decoder = _decoders[schema] = msgspec.json.Decoder(schema)
    try:
        found = _decoded(decoder, body)
        if (named := _named.get(schema, ...)) is ...:
            named = _named[schema] = _naming(ONLY.get(schema, {}))
        if named is not None and named.search(body):
            _expect_only(body, ONLY[schema])  # reads names too that the decoder passes over unread
    except msgspec.ValidationError as error:
        raise validation(_short(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError("Validation", f"the body is not valid JSON: {_short(error)}", status=400) from None
    except UnicodeDecodeError:
        raise ApiError("Validation", "the body is not valid UTF-8", status=400) from None
    except RecursionError:
        raise ApiError("Validation", "the body is nested too deeply", status=400) from None
    return found  # type: ignore[no-any-return]


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes | bytearray) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not any(word in str(error) for word in ("`float`", "`null`")):
            raise
        try:
            return decoder.decode(_plain(body))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise error from None


def _plain(body: bytes | bytearray) -> bytes:
    """`body` with integers where it has 1.0, and without the fields that are null, in objects inside too: some clients
    write a default as null. Raises several for what Python does not read."""

    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value

    def constant(text: str) -> None:
        raise ValueError(text)

    def fields(given: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if value is not None}

    return msgspec.json.encode(json.loads(body, object_hook=fields, parse_float=number, parse_constant=constant))


def _naming(known: dict[str, tuple[Any, ...]]) -> re.Pattern[bytes] | None:
    """In a body where one of these fields may be: a name may be written with \\u."""
    names = b"|".join(re.escape(name.encode()) for name in known)
    return re.compile(rb'\\u|"(?:' + names + rb')"') if known else None


def _expect_only(body: bytes | bytearray, known: dict[str, tuple[Any, ...]]) -> None:
    """ApiError 422 for a field among `known` with another value than it allows."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])  # texts stay as they are
    for name in (one for one in known if one in fields):
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in known[name]:
            only = " or ".join(msgspec.json.encode(one).decode() for one in known[name])
            raise validation(f"`{name}` is not supported{f', but as {only}' if only else ''}", param=name)


def _short(error: Exception) -> str:
    return str(error)[:200]


def to_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_they_are(rows: NDArray[np.float32]) -> NDArray[Any]:
    return rows


async def json_matrix(
    rows: NDArray[np.float32], numbers: Callable[[NDArray[np.float32]], NDArray[Any]] = _as_they_are
) -> list[bytes]:
    """Parts of float32 [n, width] as a list of lists of the `numbers` that some rows at a time become."""
    step = max(1, _FLOATS_AT_ONCE // max(1, rows.shape[-1]))
    if len(rows) <= step:
        return [to_json(numbers(rows))]
    parts = []
    for start in range(0, len(rows), step):
        parts.append((b"," if start else b"[") + to_json(numbers(rows[start : start + step]))[1:-1])
        await asyncio.sleep(0)
    return [*parts, b"]"]


async def json_list(items: Iterable[Any]) -> list[bytes]:
    """Parts of a list. An item is taken when its turn comes: as Python objects they are large."""
    parts, size = [b"["], 0
    for item in items:
        parts.append((b"," if len(parts) > 1 else b"") + to_json(item))
        size += len(parts[-1])
        if size > _BYTES_AT_ONCE:
            size = 0
            await asyncio.sleep(0)
    return [*parts, b"]"]
