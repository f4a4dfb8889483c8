"""Which reader and which writer a file gets, by the ending of its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ftbert.files.read_lines import CsvReader, JsonlReader, TextReader, TsvReader
from ftbert.files.records import STREAM, Reader, ReadOptions, Writer
from ftbert.files.writers import JsonlGzWriter, JsonlStream, JsonlWriter, NpyWriter, ParquetWriter

LINES = (".txt", ".jsonl", ".csv", ".tsv")
SOURCES = (*LINES, *(kind + ".gz" for kind in LINES), ".parquet")
TARGETS: dict[str, Callable[[Path, int, dict[str, int]], Writer]] = {
    ".npy": NpyWriter, ".jsonl": JsonlWriter, ".jsonl.gz": JsonlGzWriter, ".parquet": ParquetWriter,
}  # fmt: skip


def stream_or_file(given: str | Path) -> Path:
    """STREAM for "-" itself; "./-", which pathlib takes for the same, is a file."""
    path = Path(given)
    return path.absolute() if path == STREAM and str(given) != "-" else path


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


def open_target(path: Path, folder: Path, hidden: int, state: dict[str, int] | None) -> Writer:
    """A writer of `path`'s kind working inside `folder`; `state` is what `sync` returned, None at first."""
    if path == STREAM:
        return JsonlStream()
    return TARGETS[_kind(path, TARGETS, "write")](folder, hidden, state or {})


def keeps_columns(target: Path) -> bool:
    """True when the target's format has room for the other columns."""
    return target == STREAM or _kind(target, TARGETS, "write") != ".npy"


def skipped_file(target: Path) -> Path:
    """Where the records are listed that were left out of `target`."""
    return target.with_name(target.name + ".skipped.jsonl")


def _kind(path: Path, kinds: Iterable[str], verb: str) -> str:
    kind = "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()
    if kind not in kinds:
        raise ValueError(
            f"{path}: cannot {verb} {kind or 'a file without an ending'}; expected {', '.join(kinds)}"
        )
    return kind
