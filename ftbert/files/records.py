"""Types of readers and writers: files of texts as a stream of chunks, files of embeddings as a stream of appends.

A chunk holds up to `batch_records` good records and the position at which the next chunk starts, so that
reading can go on from there in another process. What is in a chunk depends only on the file and on that
position: a resumed run cuts the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

STREAM = Path("-")  # standard input, of text lines unless told otherwise, or standard output, of JSON lines
EMBEDDING = "embedding"  # the column that writers add

# A chunk also ends here, so that a file of very long texts needs no more memory than one of short ones.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Position:
    """Where reading stands. offset: bytes (parquet: rows) consumed of the file; line: lines (rows) consumed of it.
    digest: of what was consumed, "" for nothing: reading goes on in the same text only."""

    offset: int = 0
    line: int = 0
    records: int = 0  # good ones
    skipped: int = 0  # bad ones, counted when the reader may skip
    digest: str = ""
    kinds: dict[str, Any] = field(default_factory=dict)  # what the columns hold so far: columns.Kind
    # Of several files:
    ends: list[int] = field(default_factory=list)  # `records` at the end of each finished file
    earlier: str = ""  # the digest of those


@dataclass
class Chunk:
    """texts: what to embed. columns: the records to keep beside it, as ReadOptions.keep says. consumed: of
    Reader.end, up to the end of the chunk. bad: the records left out."""

    texts: list[str]
    columns: Any
    end: Position
    consumed: int = 0
    bad: list[Skipped] = field(default_factory=list)


class Skipped(NamedTuple):
    """A record that was left out. line: from 1 on; rows for parquet."""

    file: str
    line: int
    reason: str


class BadRecord(ValueError):
    """A record that cannot be read; the message names file, line and reason."""

    def __init__(self, path: Path, line: int, reason: str, unit: str = "line") -> None:
        super().__init__(f"{path}: {unit} {line}: {reason}. Mend it, or pass --skip-bad to leave such records out")
        self.skipped = Skipped(str(path), line, reason)


class Changed(ValueError):
    """A source that is not what an earlier run has read."""

    def __init__(self, what: Path | str) -> None:
        super().__init__(f"{what}: changed since an earlier run read it")


class Reader(Protocol):
    """A source file."""

    end: int | None  # Chunk.consumed at the end of the file, where that is known

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """Chunks from `start` on; BadRecord at a bad record unless the reader skips them, Changed where what lies
        before `start` is not what was read."""

    def digest(self) -> str:
        """Of the whole file: Position.digest at its end."""


class Writer(Protocol):
    """A target file in the making, inside a folder that may outlive the process."""

    def append(self, chunk: Chunk, vectors: Any) -> None:
        """Adds the chunk's records with their vectors: [records, entries] of float32, int8 or uint8, or a list of
        `SparseVector` or of float32 [tokens, entries]."""

    def sync(self) -> dict[str, int]:
        """Puts what was appended on the disk; returns the state a later process continues from."""

    def finish(self) -> Path:
        """The finished file, still inside the folder, on the disk."""

    def close(self) -> None:
        """Lets go of what is open, if anything is; what was not synced may be lost."""
        return


@dataclass(frozen=True)
class ReadOptions:
    """column: the one with the text. keep: the records beside the texts, "json": as one JSON object each; "table": as
    a list of dict that fit `Position.kinds`, or a pyarrow Table; "": not at all. batch_records: per chunk. kind: of
    standard input, one of formats.LINES."""

    column: str = "text"
    skip_bad: bool = False
    keep: str = "json"
    batch_records: int = 8192
    kind: str = ".txt"


def missing_column(path: Path, column: str, found: list[str]) -> ValueError:
    """The error for a column that is not there."""
    return ValueError(f"{path}: no column {column!r}; found {', '.join(map(repr, found))}. Name one with --column")
