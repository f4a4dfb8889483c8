"""Several sources as one, in the order given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ftbert.files.records import CHUNK_BYTES, Changed, Chunk, Position, Reader


class SeveralReader:
    """The records of one reader after the other. Small files share a chunk, so that batches are full."""

    def __init__(self, readers: Sequence[Reader], sizes: Sequence[int], batch_records: int) -> None:
        """sizes: bytes of each file, in which `end` and `Chunk.consumed` are counted: a file's own may be rows."""
        self._readers, self._sizes, self._batch_records = readers, sizes, batch_records
        self.end = None if None in [reader.end for reader in readers] else sum(sizes)

    def chunks(self, start: Position) -> Iterator[Chunk]:
        """See `records.Reader`."""
        finished = len(start.ends)
        if _all_of(self._readers[:finished]) != start.earlier:
            raise Changed(f"one of the first {finished} inputs")
        before, position, held = sum(self._sizes[:finished]), start, list[Chunk]()
        for reader, size in zip(self._readers[finished:], self._sizes[finished:], strict=True):
            for chunk in reader.chunks(position):
                held.append(replace(chunk, consumed=before + chunk.consumed * size // (reader.end or 1)))
                position = chunk.end
                if self._fills(held):
                    yield _joined(held)
                    held = []
            before += size
            position = replace(
                position, offset=0, line=0, digest="", ends=[*position.ends, position.records],
                earlier=_chained(position.earlier, position.digest),
            )  # fmt: skip
        if held:
            yield _joined(held)

    def digest(self) -> str:
        """See `records.Reader`."""
        return _all_of(self._readers)

    def _fills(self, held: list[Chunk]) -> bool:
        many = max(sum(len(chunk.texts) for chunk in held), sum(len(chunk.bad) for chunk in held))
        return many >= self._batch_records or sum(sum(map(len, chunk.texts)) for chunk in held) >= CHUNK_BYTES // 2


def _all_of(readers: Sequence[Reader]) -> str:
    found = ""
    for reader in readers:
        found = _chained(found, reader.digest())
    return found


def _chained(earlier: str, digest: str) -> str:
    return hashlib.blake2b(f"{earlier} {digest}".encode(), digest_size=16).hexdigest()


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    texts = [text for chunk in chunks for text in chunk.texts]
    bad = [one for chunk in chunks for one in chunk.bad]
    columns: Any = [chunk.columns for chunk in chunks]
    if isinstance(columns[0], list):
        columns = [row for rows in columns for row in rows]
    elif columns[0] is not None:
        import pyarrow as pa

        columns = pa.concat_tables(columns)
    return Chunk(texts, columns, chunks[-1].end, chunks[-1].consumed, bad)
