"""Readers of .txt, .jsonl and .csv: UTF-8 lines, byte offsets kept so that reading can go on later."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ftbert.files.columns import Unfit, Untyped, as_json, fitted
from ftbert.files.records import (
    CHUNK_BYTES,
    STREAM,
    BadRecord,
    Changed,
    Chunk,
    Position,
    ReadOptions,
    Skipped,
    missing_column,
)
from ftbert.input_file import expect_file, is_unicode

_BOM = b"\xef\xbb\xbf"
# An unclosed quote makes the rest of the file one field. Past this size that is what must have happened.
_LARGEST_FIELD = 16 << 20
_BLOCK = 1 << 20  # read at once of what is passed over

Record = tuple[str, dict[str, Any]]  # the text, and all of the record's fields


class _Lines:
    """The lines of an open stream, as bytes with their ending, knowing offset and line number. Read forward only; the
    last ones can be put back until they are `settled`."""

    def __init__(self, file: BinaryIO, offset: int = 0, line: int = 0) -> None:
        """Passes over the first `offset` bytes, which are `line` lines."""
        self.file = file
        self.offset, self.line = offset, line
        self._back: deque[bytes] = deque()
        self._drawn: list[bytes] = []
        self._digest = hashlib.blake2b(digest_size=16)
        _pass_over(file, offset, self._digest)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> bytes:
        raw = self._back.popleft() if self._back else self.file.readline()
        if not raw:
            raise StopIteration
        first = self.offset == 0
        self._drawn.append(raw)
        self.offset += len(raw)
        self.line += 1
        return raw[len(_BOM) :] if first and raw.startswith(_BOM) else raw

    def put_back(self, drawn: list[bytes]) -> None:
        """The lines drawn last, none of them the first of the file."""
        if drawn:
            del self._drawn[-len(drawn) :]
        self._back.extendleft(reversed(drawn))
        self.offset -= sum(map(len, drawn))
        self.line -= len(drawn)

    def settled(self) -> None:
        """What was drawn is not put back any more."""
        for raw in self._drawn:
            self._digest.update(raw)
        self._drawn.clear()

    @property
    def digest(self) -> str:
        """Of all bytes up to `offset`, which are settled; "" for none."""
        return self._digest.hexdigest() if self.offset else ""


def _pass_over(file: BinaryIO, most: int, digest: hashlib.blake2b) -> int:
    """Reads up to `most` bytes for nothing but their digest; how many there were."""
    left = most
    while left and (block := file.read(min(left, _BLOCK))):
        digest.update(block)
        left -= len(block)
    return most - left


class _LineReader:
    """What the three formats share: chunking, counting, and what to do about a bad record."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self.options = path, options
        self.end: int | None = None
        if path == STREAM:
            return  # its head can be read once only
        expect_file(path)
        self.end = path.stat().st_size
        with self._opened() as (file, _):
            self._open(_Lines(file))

    def digest(self) -> str:
        """See `records.Reader`."""
        found = hashlib.blake2b(digest_size=16)
        with self._opened() as (file, _):
            return found.hexdigest() if _pass_over(file, sys.maxsize, found) else ""

    @contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO, BinaryIO]]:
        """The lines' bytes, unpacked, and what they are read from, whose place says how far that is. ValueError where
        its .gz turns out to be broken."""
        if self.path == STREAM:
            yield sys.stdin.buffer, sys.stdin.buffer
            return
        with self.path.open("rb") as packed:
            if self.path.suffix.lower() != ".gz":
                yield packed, packed
                return
            try:
                with gzip.GzipFile(fileobj=packed) as file:
                    yield file, packed  # type: ignore[misc]
            except (gzip.BadGzipFile, zlib.error, EOFError) as error:
                raise ValueError(f"{self.path}: not a whole .gz file ({error})") from error

    def _open(self, lines: _Lines) -> None:
        """Looks at the head of the file."""

    def _next(self, lines: _Lines) -> Record | None:
        """The next record, None for a line that is none; StopIteration at the end; BadRecord."""
        raise NotImplementedError

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """See `records.Reader`."""
        with self._opened() as (file, packed):
            lines = _Lines(file, start.offset, start.line)
            if lines.digest != start.digest:
                raise Changed(self.path)
            if self.path == STREAM:
                self._open(lines)
            position = told = start  # told: the end of the last chunk
            texts: list[str] = []
            columns: list[Any] = []
            bad: list[Skipped] = []

            def chunk() -> Chunk:
                consumed = 0 if self.path == STREAM else packed.tell()
                end = replace(
                    position, offset=lines.offset, line=lines.line, records=position.records + len(texts),
                    digest=lines.digest,
                )  # fmt: skip
                return Chunk(texts, columns, end, consumed, bad)

            while True:
                try:
                    if (record := self._next(lines)) is not None:
                        position = self._keep(record[1], columns, position, lines.line)
                        texts.append(record[0])
                except StopIteration:
                    break
                except BadRecord as error:
                    if not self.options.skip_bad:
                        raise
                    bad.append(error.skipped)
                    position = replace(position, skipped=position.skipped + 1)
                lines.settled()
                many = max(len(texts), len(bad)) >= self.options.batch_records
                if many or lines.offset - told.offset >= CHUNK_BYTES:
                    done = chunk()
                    position = told = done.end
                    yield done
                    texts, columns, bad = [], [], []
            lines.settled()
            if lines.offset != told.offset:  # the end of the file, though perhaps no record
                yield chunk()

    def _keep(self, fields: dict[str, Any], columns: list[Any], position: Position, line: int) -> Position:
        """Adds what is kept of a record. Where reading then stands; BadRecord where the target cannot hold it."""
        try:
            if self.options.keep == "json":
                columns.append(as_json(fields))
            elif self.options.keep:
                kinds = fitted(position.kinds, fields)
                columns.append(fields)
                return position if kinds is position.kinds else replace(position, kinds=kinds)
        except Unfit as error:
            raise self._bad(line, str(error)) from error
        return position

    def _bad(self, line: int, why: str) -> BadRecord:
        return BadRecord(self.path, line, why)

    def _decoded(self, raw: bytes, lines: _Lines) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._bad(lines.line, _where_not_utf8(raw, lines.offset)) from error

    def _text(self, value: Any, line: int) -> str:
        if not isinstance(value, str):
            raise self._bad(line, f"{self.options.column!r} must be a string; got {type(value).__name__}")
        if not is_unicode(value):
            raise self._bad(line, f"{self.options.column!r} holds a lone surrogate")
        return value


class TextReader(_LineReader):
    """One text a line. A blank line is an empty text, so that line and row numbers stay the same."""

    def _next(self, lines: _Lines) -> Record | None:
        text = self._decoded(next(lines), lines).removesuffix("\n").removesuffix("\r")
        if self.path == STREAM and lines.line == 1 and _is_object(text):
            warnings.warn(
                "standard input begins with a JSON object and is read as lines of text, braces and all; "
                "--input-format jsonl (kind='.jsonl') reads its column",
                stacklevel=2,
            )
        return text, {self.options.column: text}


def _is_object(text: str) -> bool:
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class JsonlReader(_LineReader):
    """One JSON object a line; blank lines are passed over."""

    def _next(self, lines: _Lines) -> Record | None:
        text = self._decoded(next(lines), lines).strip()
        if not text:
            return None
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._bad(lines.line, f"not valid JSON ({error})") from error
        if not isinstance(fields, dict):
            raise self._bad(lines.line, f"expected a JSON object; got {type(fields).__name__}")
        column = self.options.column
        if column not in fields:
            raise self._bad(lines.line, f"no field {column!r}; found {', '.join(map(repr, fields)) or 'none'}")
        return self._text(fields[column], lines.line), fields


class CsvReader(_LineReader):
    """Comma separated with a header line; quoted fields may hold newlines."""

    delimiter = ","
    _open_from, _open_to, _open_why = -1, -1, ""  # offsets between which an open quote ends in a known error

    def _open(self, lines: _Lines) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_FIELD))
        try:
            self.header = self._row(lines) or []
        except StopIteration:
            raise ValueError(f"{self.path}: empty; expected a header line") from None
        self.body = lines.offset
        column = self.options.column
        if len(set(self.header)) != len(self.header):
            raise ValueError(f"{self.path}: the header names a column twice: {', '.join(self.header)}")
        if column not in self.header:
            raise missing_column(self.path, column, self.header)

    def _next(self, lines: _Lines) -> Record | None:
        if lines.offset < self.body:
            self._row(lines)  # the header, when reading from the start
        row = self._row(lines)
        if not row:
            return None
        if len(row) != len(self.header):
            raise self._bad(lines.line, f"expected {len(self.header)} fields; got {len(row)}")
        fields = dict(zip(self.header, map(Untyped, row), strict=True))
        text = str(fields.pop(self.options.column))
        return text, {name: fields.get(name, text) for name in self.header}

    def _row(self, lines: _Lines) -> list[str]:
        """The next row, [] for a blank line. After a bad one, reading goes on at the line below its first.

        The time is linear in the file: where a row failed whose quote was open from one line to another, each line
        between them fails in the same place if a quote is open at its beginning, and is not read on from again.
        """
        line = lines.line
        drawn: list[bytes] = []

        def decoded() -> Iterator[str]:
            for raw in lines:
                if drawn and self._open_from < lines.offset - len(raw) <= self._open_to:
                    lines.put_back([raw])
                    raise csv.Error(self._open_why)
                drawn.append(raw)
                # Without failing: what is not UTF-8 becomes surrogates, looked for once the row is whole.
                yield raw.decode("utf-8", "surrogateescape")

        try:
            row = next(csv.reader(decoded(), delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            rest = drawn[1:]
            lines.put_back(rest)
            if rest:
                self._open_from, self._open_why = lines.offset - 1, str(error)
                self._open_to = lines.offset + sum(map(len, rest[:-1]))
                if "field limit" in self._open_why:  # a quote that opens later may close within the limit
                    self._open_to = (self._open_from + self._open_to) // 2
            raise self._bad(line + 1, f"not valid CSV ({error})") from error
        if not all(map(is_unicode, row)):
            raise self._bad(lines.line, _where_not_utf8(b"".join(drawn), lines.offset))
        return row


class TsvReader(CsvReader):
    """The same with tabs."""

    delimiter = "\t"


def _where_not_utf8(raw: bytes, end: int) -> str:
    """raw: the bytes that end at offset `end` of the file, perhaps without the byte order mark before them."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte 0x{raw[error.start]:02x} at offset {end - len(raw) + error.start} is not UTF-8"
    return "not UTF-8"
