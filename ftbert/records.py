"""Files of texts as a stream of chunks, and files of embeddings as a stream of appends.

A chunk holds up to `batch_records` good records and the position at which the next chunk starts, so that
reading can go on from there in another process. What is in a chunk depends only on the file and on that
position: a resumed run cuts the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SOURCES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
TARGETS = (".npy", ".jsonl", ".parquet")
EMBEDDING = "embedding"  # the column that writers add

# A chunk also ends here, so that a file of very long texts needs no more memory than one of short ones.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Position:
    """Where reading stands. offset: bytes (parquet: rows) consumed; line: lines (rows) consumed."""

    offset: int = 0
    line: int = 0
    records: int = 0  # good ones
    skipped: int = 0  # bad ones, counted when the reader may skip


@dataclass
class Chunk:
    """texts: what to embed. columns: the records to keep beside it, a list of dict or a pyarrow Table."""

    texts: list[str]
    columns: Any
    end: Position


class BadRecord(ValueError):
    """A record that cannot be read; the message names file, line and reason."""


class Reader(Protocol):
    """A source file."""

    end: int  # Position.offset at the end of the file

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """Chunks from `start` on; BadRecord at a bad record unless the reader skips them."""


class Writer(Protocol):
    """A target file in the making, inside a folder that may outlive the process."""

    def append(self, chunk: Chunk, vectors: NDArray[np.float32]) -> None:
        """Adds the chunk's records with their vectors, float32 [records, hidden]."""

    def sync(self) -> dict[str, int]:
        """Puts what was appended on the disk; returns the state a later process continues from."""

    def finish(self) -> Path:
        """The finished file, still inside the folder, on the disk."""

    def close(self) -> None:
        """Lets go of what is open; what was not synced may be lost."""


@dataclass(frozen=True)
class ReadOptions:
    """column: the one with the text. keep: read the other columns too. batch_records: per chunk."""

    column: str = "text"
    skip_bad: bool = False
    keep: bool = True
    batch_records: int = 8192


def open_source(path: Path, options: ReadOptions) -> Reader:
    """A reader for `path`, by its ending. Opens the file: OSError, or ValueError for a wrong kind of
    file or a missing column (the message lists the ones found).
    """
    if options.batch_records < 1:
        raise ValueError(f"batch_records must be at least 1; got {options.batch_records}")
    kind = _kind(path, SOURCES, "read")
    if kind == ".parquet":
        from ftbert.read_parquet import ParquetReader

        return ParquetReader(path, options)
    from ftbert.read_lines import CsvReader, JsonlReader, TextReader, TsvReader

    reader: Any = {".txt": TextReader, ".jsonl": JsonlReader, ".csv": CsvReader, ".tsv": TsvReader}[kind]
    opened: Reader = reader(path, options)
    return opened


def open_target(path: Path, folder: Path, hidden: int, state: dict[str, int] | None) -> Writer:
    """A writer of `path`'s kind working inside `folder`; `state` is what `sync` returned, None at first."""
    from ftbert.writers import JsonlWriter, NpyWriter, ParquetWriter

    kind = _kind(path, TARGETS, "write")
    writer: Any = {".npy": NpyWriter, ".jsonl": JsonlWriter, ".parquet": ParquetWriter}[kind]
    opened: Writer = writer(folder, hidden, state or {})
    return opened


def keeps_columns(target: Path) -> bool:
    """True when the target's format has room for the other columns."""
    return _kind(target, TARGETS, "write") != ".npy"


def missing_column(path: Path, column: str, found: list[str]) -> ValueError:
    """The error for a column that is not there."""
    return ValueError(
        f"{path}: no column {column!r}; found {', '.join(map(repr, found))}. Name one with --column"
    )


def one_more_skipped(position: Position, **moved: int) -> Position:
    """`position` after a bad record was passed over."""
    return replace(position, skipped=position.skipped + 1, **moved)


def _kind(path: Path, kinds: tuple[str, ...], verb: str) -> str:
    kind = path.suffix.lower()
    if kind not in kinds:
        raise ValueError(
            f"{path}: cannot {verb} {kind or 'a file without an ending'}; expected {', '.join(kinds)}"
        )
    return kind
