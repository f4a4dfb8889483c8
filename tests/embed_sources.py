"""Sources of texts that tests embed, and work that ends in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stub_model import WORDS, StubModel, threads_left

from ftbert.files import embed_file

TEXTS = [" ".join(WORDS[4 + (i * k) % 16] for k in range(i % 9)) for i in range(50)]


def write_source(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".txt":
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    elif path.suffix == ".jsonl":
        rows = [{"id": i, "text": text, **({"late": 1.5} if i > 30 else {})} for i, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".csv":
        rows = "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
        path.write_text("id,text\n" + rows, encoding="utf-8")
    else:
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
    return path


def interrupted(stub: StubModel, source: Path, target: Path, error: BaseException, **options: Any) -> None:
    """Five chunks are done when the model raises."""
    stub.calls.clear()
    stub.fail_at, stub.error = 5, error
    with pytest.raises(type(error)):
        embed_file(stub, source, target, batch_records=7, **options)
    stub.fail_at = -1
    assert not target.exists()
    assert threads_left() == 0
