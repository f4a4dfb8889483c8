"""Which reader and which writer a file gets, by the ending of its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ftbert.files.read_lines import CsvReader, JsonlReader, TextReader, TsvReader
from ftbert.files.records import STREAM, Reader, ReadOptions, Writer
from ftbert.files.several import SeveralReader
from ftbert.files.writers import JsonlGzWriter, JsonlStream, JsonlWriter, NpyWriter, ParquetWriter

LINES = (".txt", ".jsonl", ".csv", ".tsv")
SOURCES = (*LINES, *(kind + ".gz" for kind in LINES), ".parquet")
TARGETS: dict[str, Callable[[Path, int, str, dict[str, int]], Writer]] = {
    ".npy": NpyWriter, ".jsonl": JsonlWriter, ".jsonl.gz": JsonlGzWriter, ".parquet": ParquetWriter,
}  # fmt: skip


def open_source(path: Path, options: ReadOptions) -> Reader:
    """A reader for `path`, by its ending. Opens the file: OSError, or ValueError for a wrong kind of
    file or a missing column (the message lists the ones found).
    """
    if options.batch_records < 1:
        raise ValueError(f"batch_records must be at least 1; got {options.batch_records}")
    kind = options.kind if path == STREAM else _kind(path, SOURCES, "read").removesuffix(".gz")
    if kind == ".parquet":
        from ftbert.files.read_parquet import ParquetReader  # pyarrow is slow to import

        return ParquetReader(path, options)
    return {".txt": TextReader, ".jsonl": JsonlReader, ".csv": CsvReader, ".tsv": TsvReader}[kind](path, options)


def open_sources(paths: Sequence[Path], options: ReadOptions) -> Reader:
    """A reader for all of `paths`, in order; ValueError also for files whose columns make no table together."""
    readers = [open_source(path, options) for path in paths]
    if len(readers) == 1:
        return readers[0]
    schemas: list[Any] = [getattr(reader, "schema", None) for reader in readers]
    for path, schema in zip(paths, schemas, strict=True) if options.keep == "table" else ():
        if (schema is None) != (schemas[0] is None):
            raise ValueError(f"{path}: .parquet and other inputs make no table together; write .jsonl or .npy")
        if schema is not None and not schema.equals(schemas[0]):
            odd = set(schema).symmetric_difference(schemas[0])
            what = ", ".join(sorted(map(str, odd))) or "their order"
            raise ValueError(f"{path}: other columns than in {paths[0]} ({what}); write .jsonl or .npy")
    sizes = [0 if path == STREAM else path.stat().st_size for path in paths]
    return SeveralReader(readers, sizes, options.batch_records)


def open_target(path: Path, folder: Path, vectors: tuple[int, str], state: dict[str, int] | None) -> Writer:
    """A writer of `path`'s kind working inside `folder`. vectors: how many entries each has, and their type. `state`
    is what `sync` returned, None at first."""
    if path == STREAM:
        return JsonlStream()
    return TARGETS[_kind(path, TARGETS, "write")](folder, *vectors, state or {})


def kept_for(target: Path) -> str:
    """ReadOptions.keep: the form in which the target's format has room for the other columns."""
    ending = ".jsonl" if target == STREAM else _kind(target, TARGETS, "write")
    return {".npy": "", ".parquet": "table"}.get(ending, "json")


def _kind(path: Path, kinds: Iterable[str], verb: str) -> str:
    kind = "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()
    if kind not in kinds:
        raise ValueError(f"{path}: cannot {verb} {kind or 'a file without an ending'}; expected {', '.join(kinds)}")
    return kind
