"""Reader of .parquet: row groups are streamed, a chunk is cut by rows and by bytes of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ftbert.files.records import (
    CHUNK_BYTES,
    EMBEDDING,
    BadRecord,
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
        kind = schema.field(column).type
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(text) or pa.types.is_large_string(text) or pa.types.is_string_view(text)):
            raise ValueError(f"{path}: column {column!r} must hold strings; it holds {kind}")
        if options.keep and EMBEDDING in schema.names:
            raise ValueError(f"{path}: already has a column {EMBEDDING!r}; rename it, or write .npy")

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """See `records.Reader`."""
        position = start
        for table in self._tables(start.offset):
            texts, good, bad = self._texts(table[self.options.column], position.offset)
            kept = None
            if self.options.keep:
                kept = table if len(texts) == len(table) else table.filter(pa.array(good))
            position = Position(
                offset=position.offset + len(table),
                line=position.line + len(table),
                records=position.records + len(texts),
                skipped=position.skipped + len(table) - len(texts),
            )
            yield Chunk(texts, kept, position, position.offset, bad)

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
                error = BadRecord(self.path, row, f"{self.options.column!r} {why}", "row")
                if not self.options.skip_bad:
                    raise error
                bad.append(error.skipped)
            good.append(text is not None)
            if text is not None:
                texts.append(text)
        return texts, good, bad


def _groups_from(metadata: Any, first: int) -> tuple[list[int], int]:
    """The row groups from the one with row `first` on, and how many of its rows to pass over."""
    before = 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if before + rows > first:
            return list(range(group, metadata.num_row_groups)), first - before
        before += rows
    return [], 0
