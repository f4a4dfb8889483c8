"""Reader of .parquet: row groups are streamed, a chunk is cut by rows and by bytes of text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ftbert.files.columns import Unfit, as_json
from ftbert.files.records import (
    CHUNK_BYTES,
    EMBEDDING,
    BadRecord,
    Changed,
    Chunk,
    Position,
    ReadOptions,
    Skipped,
    missing_column,
)
from ftbert.input_file import expect_file

# What pyarrow raises for bytes that are no parquet; ArrowException has no base of its own beside Exception.
_BROKEN = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError)
_ROWS_READ = 1024  # decoded at once; rows can be large
_BLOCK = 1 << 20


class ParquetReader:
    """One string column to embed, the others kept as they are."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self.options = path, options
        expect_file(path)
        try:
            with pq.ParquetFile(path) as file:
                self.end: int | None = file.metadata.num_rows
                schema = file.schema_arrow
        except FileNotFoundError:
            raise
        except _BROKEN as error:
            raise ValueError(f"{path}: not a whole parquet file ({error})") from error
        column = options.column
        if column not in schema.names:
            raise missing_column(path, column, schema.names)
        kind = schema.field(schema.names.index(column)).type
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)):
            raise ValueError(f"{path}: column {column!r} must hold strings; it holds {kind}")
        kept = schema.names if options.keep else [column]
        if twice := sorted({name for name in kept if schema.names.count(name) > 1}):
            raise ValueError(f"{path}: two columns are called {twice[0]!r}; rename one")
        if options.keep and EMBEDDING in schema.names:
            raise ValueError(f"{path}: already has a column {EMBEDDING!r}; rename it, or write .npy")
        for field in schema if options.keep == "json" else ():
            if _holds_bytes(field.type):
                raise ValueError(f"{path}: column {field.name!r} holds bytes, which JSON cannot; write .npy")
        self.schema = schema

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """See `records.Reader`."""
        position = start
        with self.path.open("rb") as file:
            digest = _GroupsDigest(file, None if self.options.keep else self.options.column)
            if self._known(digest, start.offset) != start.digest:
                raise Changed(self.path)
            for table in self._tables(start.offset):
                texts, good, bad = self._texts(table[self.options.column], position.offset)
                columns: Any = None
                if self.options.keep == "json":
                    columns = self._objects(table, texts, good, bad, position.offset)
                elif self.options.keep:
                    columns = table if all(good) else _only(table, good)
                position = replace(
                    position,
                    offset=position.offset + len(table),
                    line=position.line + len(table),
                    records=position.records + len(texts),
                    skipped=position.skipped + len(bad),
                    digest=self._known(digest, position.offset + len(table)),
                )
                yield Chunk(texts, columns, position, position.offset, bad)

    def digest(self) -> str:
        """See `records.Reader`."""
        with self.path.open("rb") as file:
            return self._known(_GroupsDigest(file, None if self.options.keep else self.options.column), self.end or 0)

    def _known(self, digest: _GroupsDigest, rows: int) -> str:
        try:
            return digest.up_to(rows)
        except _BROKEN as error:
            raise ValueError(f"{self.path}: broken parquet data ({error})") from error

    def _tables(self, first: int) -> Iterator[Any]:
        """The rows from `first` on in chunks; where they are cut depends only on the rows that follow."""
        columns = None if self.options.keep else [self.options.column]
        try:
            with pq.ParquetFile(self.path) as file:
                groups, skip = _groups_from(file.metadata, first)
                rest: Any = None
                for batch in file.iter_batches(_ROWS_READ, row_groups=groups, columns=columns):
                    table = pa.Table.from_batches([batch.slice(min(skip, len(batch)))])
                    skip = max(0, skip - len(batch))
                    rest = table if rest is None else pa.concat_tables([rest, table])
                    while (cut := self._cut(rest)) is not None:
                        yield rest.slice(0, cut)
                        rest = rest.slice(cut)
                if rest is not None and len(rest):
                    yield rest
        except _BROKEN as error:
            raise ValueError(f"{self.path}: broken parquet data ({error})") from error

    def _cut(self, table: Any) -> int | None:
        """Rows of the next whole chunk, None when there are too few yet."""
        limit = self.options.batch_records
        column = table[self.options.column].slice(0, limit)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())
        lengths = pc.fill_null(pc.binary_length(column.cast(pa.large_binary())), 0)
        ends = pc.cumulative_sum(lengths).to_numpy()
        full = int(ends.searchsorted(CHUNK_BYTES)) + 1 if len(ends) else 1
        return min(full, limit) if min(full, limit) <= len(table) else None

    def _texts(self, column: Any, first: int) -> tuple[list[str], list[bool], list[Skipped]]:
        """The good texts, which rows they were, and the bad ones."""
        bad: list[Skipped] = []
        texts: list[str] = []
        good: list[bool] = []
        for row, scalar in enumerate(column, start=first + 1):
            try:
                text = scalar.as_py()
                why = "is null" if text is None else ""
            except UnicodeDecodeError:
                text, why = None, "is not UTF-8"
            if why:
                bad.append(self._bad(row, f"{self.options.column!r} {why}"))
            good.append(text is not None)
            if text is not None:
                texts.append(text)
        return texts, good, bad

    def _bad(self, row: int, why: str) -> Skipped:
        error = BadRecord(self.path, row, why, "row")
        if not self.options.skip_bad:
            raise error
        return error.skipped

    def _objects(self, table: Any, texts: list[str], good: list[bool], bad: list[Skipped], first: int) -> list[str]:
        """The good rows as JSON objects. One that JSON cannot hold joins the bad ones, and its text goes."""
        try:
            rows = table.to_pylist()
        except (ValueError, OverflowError):  # nanoseconds, dates beyond Python's, what is not UTF-8: in some row
            rows = [None] * len(table)
        made: list[str] = []
        for row, fields in enumerate(rows):
            if good[row]:
                try:
                    made.append(as_json(_row(table, row) if fields is None else fields))
                except Unfit as error:
                    del texts[len(made)]
                    bad.append(self._bad(first + row + 1, str(error)))
        bad.sort(key=lambda one: one.line)
        return made


class _GroupsDigest:
    """Of the file's description and the row groups that the first rows lie in, as they are on the disk."""

    def __init__(self, file: Any, column: str | None) -> None:
        """column: the one that is read, None for all."""
        self._file, self._column = file, column
        self._digest, self._groups, self._rows = hashlib.blake2b(digest_size=16), 0, 0
        self._metadata: Any = None

    def up_to(self, rows: int) -> str:
        """"" for none, and no fewer rows than before."""
        if not rows:
            return ""
        if self._metadata is None:
            self._metadata = pq.read_metadata(self._file)
            size = self._file.seek(0, 2)
            self._add(size - self._metadata.serialized_size - 8, size)
        while self._rows < rows and self._groups < self._metadata.num_row_groups:
            group = self._metadata.row_group(self._groups)
            for place in range(group.num_columns):
                part = group.column(place)
                if self._column in (None, part.path_in_schema):
                    starts = (part.dictionary_page_offset or part.data_page_offset, part.data_page_offset)
                    self._add(min(starts), min(starts) + part.total_compressed_size)
            self._groups, self._rows = self._groups + 1, self._rows + group.num_rows
        return self._digest.hexdigest()

    def _add(self, start: int, end: int) -> None:
        self._file.seek(start)
        while start < end and (block := self._file.read(min(end - start, _BLOCK))):
            self._digest.update(block)
            start += len(block)


def _row(table: Any, row: int) -> dict[str, Any]:
    """One row, field by field; Unfit names the one that Python has no value for."""
    found = {}
    for name in table.column_names:
        try:
            found[name] = table[name][row].as_py()
        except (ValueError, OverflowError) as error:
            raise Unfit(f"field {name!r} cannot be written as JSON ({error})") from error
    return found


def _only(table: Any, good: list[bool]) -> Any:
    """The good rows; `Table.filter` does not know every type."""
    parts, start = [table.slice(0, 0)], 0
    for kept, run in groupby(good):
        count = len(list(run))
        if kept:
            parts.append(table.slice(start, count))
        start += count
    return pa.concat_tables(parts)


def _holds_bytes(kind: Any) -> bool:
    inside = [kind.field(place).type for place in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        inside.append(kind.value_type)
    is_one = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(one(kind) for one in is_one) or any(map(_holds_bytes, inside))


def _groups_from(metadata: Any, first: int) -> tuple[list[int], int]:
    """The row groups from the one with row `first` on, and how many of its rows to pass over."""
    before = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if before + rows > first:
            return list(range(group, metadata.num_row_groups)), first - before
        before += rows
    return [], 0
