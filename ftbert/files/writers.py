"""Writers of .npy, .jsonl and .parquet that can be left and taken up again between two appends: `records.Writer`."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.files.columns import as_json, as_table, text_where_some_is
from ftbert.files.records import EMBEDDING, STREAM, Chunk, Skipped, Writer
from ftbert.input_file import named

_NPY_HEADER = 128  # bytes; room for any row count, so that the count can be filled in at the end


class _FileWriter:
    """A file that grows; what an earlier process wrote after its last `sync` is cut off."""

    def __init__(self, path: Path, state: dict[str, int]) -> None:
        size = state.get("bytes", 0)
        self.path = path
        self._file = path.open("r+b" if size else "w+b")
        found = self._file.seek(0, os.SEEK_END)
        if found < size:
            self._file.close()
            raise ValueError(f"{path}: {found} bytes, but {size} were written; delete the folder and start again")
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, data: bytes | memoryview) -> None:
        with named(self.path):
            self._file.write(data)

    def sync(self) -> dict[str, int]:
        with named(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            return {"bytes": self._file.tell()}

    def finish(self) -> Path:
        self.sync()
        return self.path

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was an error before, or is not wanted any more
            self._file.close()


class NpyWriter(_FileWriter):
    """[records, entries]; rows are appended, the header's count is written last."""

    def __init__(self, folder: Path, entries: int, dtype: str, state: dict[str, int]) -> None:
        super().__init__(folder / "rows.npy", state)
        self._entries = entries
        self._kind = {"float32": "<f4", "int8": "|i1", "uint8": "|u1"}[dtype]
        self._rows = state.get("rows", 0)
        if not state:
            self.write(bytes(_NPY_HEADER))

    def append(self, chunk: Chunk, vectors: NDArray[Any]) -> None:
        self._rows += len(chunk.texts)
        self.write(vectors.astype(self._kind, order="C", copy=False).data if len(vectors) else b"")

    def sync(self) -> dict[str, int]:
        return super().sync() | {"rows": self._rows}

    def finish(self) -> Path:
        shape = f"{{'descr': '{self._kind}', 'fortran_order': False, 'shape': ({self._rows}, {self._entries}), }}"
        # The format of numpy.lib.format, version 1.0: magic, header length, header, padded to 64.
        head = b"\x93NUMPY\x01\x00" + (_NPY_HEADER - 10).to_bytes(2, "little")
        with named(self.path):  # what waits is written here
            self._file.seek(0)
        self.write(head + shape.encode().ljust(_NPY_HEADER - 11) + b"\n")
        return super().finish()


class SkippedWriter(_FileWriter):
    """The records left out: {"file", "line", "reason"}, one JSON object a line."""

    def __init__(self, folder: Path, state: dict[str, int]) -> None:
        super().__init__(folder / "skipped.jsonl", state)

    def append(self, bad: list[Skipped]) -> None:
        for one in bad:
            self.write((as_json(one._asdict()) + "\n").encode("utf-8"))


class JsonlWriter(_FileWriter):
    """The record's fields and "embedding", one JSON object a line."""

    def __init__(self, folder: Path, entries: int, dtype: str, state: dict[str, int]) -> None:
        super().__init__(folder / "rows.jsonl", state)

    def append(self, chunk: Chunk, vectors: Any) -> None:
        self.write(b"".join(_lines(chunk, vectors)))


class JsonlGzWriter(JsonlWriter):
    """The same packed, each chunk on its own, so that a later process can go on behind any of them."""

    def append(self, chunk: Chunk, vectors: Any) -> None:
        if chunk.texts:
            self.write(gzip.compress(b"".join(_lines(chunk, vectors)), mtime=0))


class JsonlStream(Writer):
    """The same on standard output, as it is computed. There is nothing to go on from."""

    def append(self, chunk: Chunk, vectors: Any) -> None:
        with named("standard output"):
            sys.stdout.buffer.writelines(_lines(chunk, vectors))
            sys.stdout.buffer.flush()

    def sync(self) -> dict[str, int]:
        return {}

    def finish(self) -> Path:
        return STREAM


class ParquetWriter(Writer):
    """The other columns and "embedding": a fixed-size list, for one vector a token a list of those, a struct of two
    lists, "indices" and "values", for sparse vectors; of "spans" and "values" for spans of a text.

    A parquet file cannot be appended to once closed, so every chunk is a file of its own until the end.
    Only then are all columns known, when the records are JSON objects that differ.
    """

    def __init__(self, folder: Path, entries: int, dtype: str, state: dict[str, int]) -> None:
        self._folder, self._entries, self._dtype = folder, entries, dtype
        self._count = state.get("files", 0)
        for number in range(self._count):
            self._part(number).stat()  # FileNotFoundError when a finished chunk is gone

    def append(self, chunk: Chunk, vectors: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = chunk.columns if isinstance(chunk.columns, pa.Table) else as_table(chunk.columns, chunk.end.kinds)
        table = table.append_column(self._field(), self._column(vectors))
        with named(self._part(self._count)):
            pq.write_table(table, self._part(self._count))
        self._count += 1

    def sync(self) -> dict[str, int]:
        if self._count and self._part(self._count - 1).exists():
            _sync_file(self._part(self._count - 1))
        return {"files": self._count}

    def finish(self) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = [self._part(number) for number in range(self._count)]
        schemas = [pq.read_schema(part) for part in parts] or [pa.schema([self._field()])]
        schemas = text_where_some_is(schemas)
        schema = pa.unify_schemas(schemas, promote_options="permissive")  # readers refuse what does not fit
        last = schema.get_field_index(EMBEDDING)  # behind the fields that came later in the file, too
        schema = schema.remove(last).append(schema.field(last))
        whole = self._folder / "rows.parquet"
        with named(whole), pq.ParquetWriter(whole, schema) as writer:
            for part in parts:
                table = pq.read_table(part, partitioning=None)
                columns = [
                    table[field.name].cast(field.type)
                    if field.name in table.column_names
                    else pa.nulls(len(table), field.type)
                    for field in schema
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        _sync_file(whole)
        return whole

    def _field(self) -> Any:
        import pyarrow as pa

        if self._dtype == "sparse":
            kind = pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])
        elif self._dtype == "multi":
            kind = pa.list_(pa.list_(pa.float32(), self._entries))
        elif self._dtype == "spans":
            values = pa.list_(pa.list_(pa.float32(), self._entries))
            kind = pa.struct([("spans", pa.list_(pa.list_(pa.int32(), 2))), ("values", values)])
        else:
            kind = pa.list_(pa.type_for_alias(self._dtype), self._entries)
        return pa.field(EMBEDDING, kind)

    def _column(self, vectors: Any) -> Any:
        import pyarrow as pa

        if self._dtype not in ("sparse", "multi", "spans"):
            flat = pa.array(vectors.ravel(), type=pa.type_for_alias(self._dtype))
            return pa.FixedSizeListArray.from_arrays(flat, self._entries)
        ends = pa.array(np.cumsum([0, *(len(getattr(one, "values", one)) for one in vectors)]), pa.int32())

        def rows(arrays: list[Any], entries: int, dtype: Any) -> Any:
            flat = pa.array(np.concatenate([*arrays, np.empty((0, entries), dtype)]).astype(dtype).ravel())
            return pa.ListArray.from_arrays(ends, pa.FixedSizeListArray.from_arrays(flat, entries))

        if self._dtype == "multi":
            return rows(vectors, self._entries, np.float32)
        if self._dtype == "spans":
            spans = rows([one.spans for one in vectors], 2, np.int32)
            values = rows([one.values for one in vectors], self._entries, np.float32)
            return pa.StructArray.from_arrays([spans, values], names=["spans", "values"])
        indices = np.concatenate([*(one.indices for one in vectors), np.empty(0, np.int32)]).astype(np.int32)
        values = np.concatenate([*(one.values for one in vectors), np.empty(0, np.float32)])
        parts = [pa.ListArray.from_arrays(ends, pa.array(flat)) for flat in (indices, values)]
        return pa.StructArray.from_arrays(parts, names=["indices", "values"])

    def _part(self, number: int) -> Path:
        return self._folder / f"rows-{number:08d}.parquet"


def _lines(chunk: Chunk, vectors: Any) -> Iterator[bytes]:
    for fields, vector in zip(chunk.columns, _numbers(vectors), strict=True):
        body = fields[:-1] + (", " if len(fields) > 2 else "") + f'"{EMBEDDING}": {vector}}}\n'
        yield body.encode("utf-8")


def _numbers(vectors: Any) -> Iterator[str]:
    """Each record's as JSON. Nine significant digits give every float32 back exactly, at half the length of a
    double's."""
    if isinstance(vectors, list):
        for one in vectors:
            if isinstance(one, np.ndarray):
                yield f"[{', '.join(_numbers(one))}]"
            elif hasattr(one, "spans"):
                yield f'{{"spans": {one.spans.tolist()}, "values": [{", ".join(_numbers(one.values))}]}}'
            else:
                (values,) = _numbers(one.values[None])
                yield f'{{"indices": {one.indices.tolist()}, "values": {values}}}'
        return
    numbers = "[" + ", ".join(["%.9g" if vectors.dtype.kind == "f" else "%d"] * vectors.shape[1]) + "]"
    for vector in vectors.tolist():
        yield numbers % tuple(vector)


def _sync_file(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
