"""Files of records that tests write, and what readers make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ftbert.files import Position, ReadOptions, open_source


def read(path: Path, **options: Any) -> tuple[list[str], list[Any], Position]:
    texts: list[str] = []
    columns: list[Any] = []
    end = Position()
    for chunk in open_source(path, ReadOptions(**options)).chunks(Position()):
        texts += chunk.texts
        columns += map(json.loads, chunk.columns)
        end = chunk.end
    return texts, columns, end


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def assert_resumable(path: Path, **options: Any) -> None:
    """Reading on from the end of any chunk gives the same chunks as reading through."""
    reader = open_source(path, ReadOptions(**options))
    chunks = list(reader.chunks(Position()))
    for place, chunk in enumerate(chunks):
        rest = list(open_source(path, ReadOptions(**options)).chunks(chunk.end))
        assert [c.texts for c in rest] == [c.texts for c in chunks[place + 1 :]]
        assert [c.end for c in rest] == [c.end for c in chunks[place + 1 :]]
