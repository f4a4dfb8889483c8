"""A file of texts to a file of embeddings, in constant memory, resumable, never half-written."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.part_area import PartArea
from ftbert.progress import Progress
from ftbert.records import (
    Chunk,
    Position,
    Reader,
    ReadOptions,
    Writer,
    keeps_columns,
    open_source,
    open_target,
)

BATCH_RECORDS = 8192  # finished records that a kill can cost, and the records held in memory at once

# Files up to this size are told apart by their content, larger ones by size and time of change.
_HASHED_BYTES = 16 << 20


@dataclass(frozen=True)
class EmbedStats:
    """What `embed_file` did. tokens and seconds are those of this run, records those in the file."""

    target: str
    records: int
    skipped: int
    resumed: int  # records that an earlier, interrupted run had finished
    hidden: int  # entries of a vector
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Real tokens, no padding."""
        return self.tokens / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def check_request(
    source: str | Path,
    target: str | Path,
    *,
    column: str | None = None,
    skip_bad: bool = False,
    batch_records: int = BATCH_RECORDS,
) -> Reader:
    """Everything that can be refused before a model is loaded: formats, column, a readable source, a
    writable place for the target. OSError or ValueError; leaves nothing behind.
    """
    source, target = Path(source), Path(target)
    options = ReadOptions(column or "text", skip_bad, keeps_columns(target), batch_records)
    reader = open_source(source, options)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target}: the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise IsADirectoryError(f"{target}: is a folder; expected the name of a file")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target}: is the input itself; name another output")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise PermissionError(f"{target}: cannot write into {target.parent} ({error.strerror})") from error
    return reader


def embed_file(
    model: Any,
    source: str | Path,
    target: str | Path,
    *,
    column: str | None = None,
    skip_bad: bool = False,
    batch_records: int = BATCH_RECORDS,
    normalize: bool | None = True,
    pooling: str | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
    max_length: int | None = None,
    truncate_dim: int | None = None,
    max_tokens: int = 16384,
    resume: bool = True,
    show_progress_bar: bool | None = None,
) -> EmbedStats:
    """Embeds every record of `source` (.txt .jsonl .csv .parquet) into `target` (.npy .jsonl .parquet).

    column: the one with the text, "text" by default. skip_bad: leave out records that cannot be read,
    and count them; by default the first one is an error (`records.BadRecord`) naming its line.
    batch_records: how often finished work is put on the disk. resume: go on where a killed run with the
    same settings, model and source stopped; the result is bit for bit that of an unbroken run.
    normalize, pooling, prompt, prompt_name, max_length, truncate_dim, max_tokens: as in `encode`.

    The target appears whole or not at all. Unfinished work stays in `<target>.part`. Errors: OSError,
    ValueError, TypeError, before anything is computed wherever possible.
    """
    source, target = Path(source), Path(target)
    reader = check_request(source, target, column=column, skip_bad=skip_bad, batch_records=batch_records)
    from ftbert.text import embed_windows, text_options  # torch only once the request is known to be sound

    how = text_options(
        model, normalize=normalize, pooling=pooling, prompt=prompt, prompt_name=prompt_name, max_length=max_length,
        truncate_dim=truncate_dim, max_tokens=max_tokens,
    )  # fmt: skip
    made_with = _source_identity(source) | _model_identity(model)
    made_with |= {"column": column or "text", "batch_records": batch_records} | how.identity()
    with contextlib.ExitStack() as stack:
        area = stack.enter_context(PartArea(target))
        progress = Progress(reader.end, show_progress_bar, unit="", label="embed")
        stack.callback(progress.close)
        if not resume:
            area.discard(None)
        saved = area.saved(made_with)
        if saved is not None and saved["position"]["skipped"] and not skip_bad:
            area.discard("it was made with skip_bad")
            saved = None
        writer, position = _writer(area, target, how.width, saved)
        stack.callback(writer.close)
        resumed = position.records
        progress.add(0, 0, position.offset)
        windows = embed_windows(
            model,
            _windows(reader, position),
            how,
            on_batch=lambda texts, tokens: progress.add(texts, tokens, 0),
        )
        with contextlib.closing(windows):
            for done in windows:
                _check_finite(done.vectors, done.item)
                writer.append(done.item, done.vectors)
                state = writer.sync()
                progress.add(0, 0, done.item.end.offset - position.offset)
                position = done.item.end
                area.save(made_with, {"position": asdict(position), "writer": state})
        area.deliver(writer.finish())
        return EmbedStats(
            target=str(target),
            records=position.records,
            skipped=position.skipped,
            resumed=resumed,
            hidden=how.width,
            tokens=progress.tokens,
            seconds=progress.seconds,
        )


def _windows(reader: Reader, start: Position) -> Iterator[tuple[Chunk, list[str]]]:
    for chunk in reader.chunks(start):
        yield chunk, chunk.texts


def _writer(
    area: PartArea, target: Path, hidden: int, saved: dict[str, Any] | None
) -> tuple[Writer, Position]:
    """The writer and where to read on; starts again when the files do not match the manifest."""
    if saved is not None:
        try:
            position = Position(**saved["position"])
            return open_target(target, area.folder, hidden, saved["writer"]), position
        except (OSError, ValueError, TypeError, KeyError) as error:
            area.discard(f"its files are damaged ({error})")
    return open_target(target, area.folder, hidden, None), Position()


def _check_finite(vectors: np.ndarray[Any, np.dtype[np.float32]], chunk: Chunk) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        record = chunk.end.records - len(chunk.texts) + int(np.argmin(finite)) + 1
        raise ValueError(
            f"record {record} has an embedding that is not finite; the weights or the dtype cannot hold it "
            "(fp16 overflows where bf16 and fp32 do not)"
        )


def _source_identity(source: Path) -> dict[str, Any]:
    stat = source.stat()
    return {
        "source": str(source.resolve()),
        "source size": stat.st_size,
        "source time": stat.st_mtime_ns,
    }


def _model_identity(model: Any) -> dict[str, Any]:
    """Changes when anything changes that a vector depends on."""
    digest = hashlib.sha256()
    for path in sorted(Path(model.folder).rglob("*")):
        if path.is_file() and path.suffix in {".safetensors", ".bin", ".json", ".txt", ".model"}:
            stat = os.stat(path)
            digest.update(f"{path.relative_to(model.folder)} {stat.st_size} ".encode())
            small = stat.st_size <= _HASHED_BYTES
            digest.update(path.read_bytes() if small else str(stat.st_mtime_ns).encode())
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    return {"model": digest.hexdigest(), "dtype": dtype, "device": model.device.type}
