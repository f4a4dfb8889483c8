"""A file of texts to a file of embeddings, in constant memory, resumable, never half-written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.files.formats import kept_for, open_sources, open_target
from ftbert.files.paths import check_paths, expect_own_list, input_files, output_file, skipped_file
from ftbert.files.ranges import check_ranges_file, first_texts, ranges_in
from ftbert.files.records import STREAM, Changed, Chunk, Position, Reader, ReadOptions, Writer
from ftbert.files.writers import SkippedWriter
from ftbert.packed_model import PackedModel
from ftbert.progress import Progress
from ftbert.staging_folder import StagingFolder
from ftbert.text import TOKENIZER_SUFFIXES

BATCH_RECORDS = 8192  # finished records that a kill can cost, and the records held in memory at once

# Files up to this size are told apart by their content, larger ones by size and time of change.
_HASHED_BYTES = 16 << 20
# Of a model's files those that a vector may depend on: weights, settings, vocabularies.
_READ = {".safetensors", ".bin", ".pt", *TOKENIZER_SUFFIXES}
_VECTORS = ("dense", "sparse", "multi")
# What shapes dense vectors alone, as embed_file has it by default.
_USUAL = {"normalize": True, "pooling": None, "truncate_dim": None, "long_texts": "truncate"}


@dataclass(frozen=True)
class EmbedStats:
    """What `embed_file` did. tokens and seconds are those of this run, records those in the file."""

    target: str
    sources: list[dict[str, Any]]  # {"source": name, "first": its first record's row, "records": how many}
    records: int
    skipped: int
    resumed: int  # records that an earlier, interrupted run had finished
    hidden: int  # entries of a vector, as it is written
    cut: int  # texts of more tokens than are read at once
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
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    *,
    column: str | None = None,
    skip_bad: bool = False,
    batch_records: int = BATCH_RECORDS,
    kind: str = ".txt",
    precision: str = "float32",
    ranges: str | Path | None = None,
) -> Reader:
    """Everything that can be refused before a model is loaded: formats, column, a readable source, a writable place
    for the target, a file that would be lost. OSError or ValueError; leaves nothing behind.
    """
    sources, target = input_files(source), output_file(target)
    options = ReadOptions(column or "text", skip_bad, kept_for(target), batch_records, kind)
    beside = None if ranges is None else output_file(ranges)
    check_paths(sources, target, skip_bad, beside)
    check_ranges_file(beside, precision, sources)
    return open_sources(sources, options)


def embed_file(
    model: PackedModel,
    source: str | Path | Sequence[str | Path],
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
    kind: str = ".txt",
    long_texts: str = "truncate",
    precision: str = "float32",
    ranges: str | Path | None = None,
    vectors: str | None = None,
    chunk_tokens: int | None = None,
) -> EmbedStats:
    """Embeds every record of `source` (.txt .jsonl .csv .tsv, also .gz, .parquet) into `target` (.npy .jsonl .jsonl.gz
    .parquet). Several sources, or a pattern such as texts/*.txt, are read in turn. "-" is standard input, of lines of
    `kind` (.txt .jsonl .csv .tsv), and standard output, of JSON lines written as they are computed. Columns of a .csv
    become text in a .parquet, integers where every field is one.

    column: the one with the text, "text" by default. skip_bad: leave out records that cannot be read, count them and
    list them in `<target>.skipped.jsonl` (standard error where the target is "-"); ValueError where no record is
    good. By default the first bad one is an error (`records.BadRecord`) naming its line.
    batch_records: how often finished work is put on the disk. resume: go on where a killed run with the same settings,
    model and source stopped; the result is bit for bit that of an unbroken run. Finished work of other settings, or of
    a source that has changed since, is an error; False throws it away.
    normalize, pooling, prompt, prompt_name, max_length, truncate_dim, max_tokens, long_texts: as in `encode`.
    precision: as in `encode`; int8 and uint8 need ranges, a .npy of float [2, width] that is read where it exists, else
    measured over the first 8192 texts and written.
    vectors: "dense", one a text; "sparse", as in `encode_sparse`, written as {"indices": [...], "values": [...]};
    "multi", one a token, as in `encode_multi_vector`, written as a list of them. None: those that the model is for. A
    .npy holds dense ones alone; normalize, pooling, truncate_dim, long_texts and precision shape those alone.
    chunk_tokens: late chunking, as in `encode`, written as {"spans": [[start, end], ...], "values": [[...], ...]}, a
    vector for each span of so many tokens. Not to .npy, nor with long_texts or precision.
    show_progress_bar: None: a bar on a terminal, elsewhere a line on standard error every 30 s.

    The target appears whole or not at all; a link stays one. Unfinished work stays in `<target>.part`. Errors: OSError,
    ValueError, TypeError, before anything is computed wherever possible.
    """
    name, sources, target = str(target), input_files(source), output_file(target)
    reader = check_request(
        source, target, column=column, skip_bad=skip_bad, batch_records=batch_records, kind=kind, precision=precision,
        ranges=ranges,
    )  # fmt: skip
    # torch only once the request is known to be sound
    from ftbert.text import compute_windows, quantized, stored_as

    given = {"prompt": prompt, "prompt_name": prompt_name, "max_length": max_length, "max_tokens": max_tokens}
    shape = {"normalize": normalize, "pooling": pooling, "truncate_dim": truncate_dim, "long_texts": long_texts}
    if chunk_tokens is None:
        kind_of_vectors, work, how = _vectors_of(model, vectors, given, shape, precision, target)
    else:
        kind_of_vectors, work, how = _spans_of(model, chunk_tokens, vectors, given | shape, precision, target)
    dtype, entries = stored_as(precision, work.width)
    dense = kind_of_vectors == "dense"
    made_with = _sources_identity(sources) | _model_identity(model)
    made_with |= {"column": column or "text", "batch_records": batch_records, "precision": precision} | asdict(how)
    made_with |= {} if dense else {"vectors": kind_of_vectors}
    made_with |= {} if chunk_tokens is None else {"chunk_tokens": chunk_tokens}
    del made_with["width"], made_with["whole_width"]  # follow from truncate_dim and the model
    with contextlib.ExitStack() as stack:
        piped = STREAM in (*sources, target)  # a later run cannot go on from there
        beside = target
        if target == STREAM:
            beside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftbert-"))) / "out"
        staging = stack.enter_context(StagingFolder(beside))
        limits = None
        if ranges is not None:
            measured = (done.results for done in compute_windows(model, first_texts(reader), work))
            limits = ranges_in(output_file(ranges), precision, work.width, measured)
            made_with["ranges"] = hashlib.sha256(limits.tobytes()).hexdigest()
        if not resume or piped:
            staging.discard(None)
        saved = staging.saved(made_with)
        if saved is not None and saved["position"]["skipped"] and not skip_bad:
            raise staging.cannot_go_on("it was made with skip_bad")
        stored = (entries, dtype.name if dense else kind_of_vectors)
        writer, left_out, position = _writer(staging, target, stored, saved)
        stack.callback(writer.close)
        stack.callback(left_out.close)
        resumed = position.records
        consumed, cut = (saved["consumed"], saved["cut"]) if saved is not None and resumed else (0, 0)
        progress = Progress(reader.end, show_progress_bar, label="embed", lines=True, begin=consumed)
        stack.callback(progress.close)
        read = _windows(reader, position, progress, consumed)
        windows = compute_windows(model, read, work, on_batch=progress.add_expected)
        with contextlib.closing(windows), _told_of_changes(staging):
            for done in windows:
                _check_finite(done.results, done.item)
                writer.append(done.item, quantized(done.results, precision, limits) if dense else done.results)
                left_out.append(done.item.bad)
                cut += done.cut
                position = done.item.end
                state = {
                    "position": asdict(position), "consumed": done.item.consumed, "cut": cut,
                    "writer": writer.sync(), "skipped": left_out.sync(),
                }  # fmt: skip
                if not piped:
                    staging.save(made_with, state)
        if position.skipped and not position.records:
            first = json.loads(left_out.finish().read_text(encoding="utf-8").splitlines()[0])
            _deliver_skipped(left_out, position, target, skip_bad)
            staging.discard(None)
            reason = f"the first, line {first['line']}: {first['reason']}"
            raise ValueError(f"{', '.join(map(str, sources))}: all {position.skipped} records are bad; {reason}")
        finished = writer.finish()
        _deliver_skipped(left_out, position, target, skip_bad)
        if target != STREAM:
            staging.deliver(finished)
        return EmbedStats(
            target=name,
            sources=_rows_of(sources, position),
            records=position.records,
            skipped=position.skipped,
            resumed=resumed,
            hidden=entries,
            cut=cut,
            tokens=progress.tokens,
            seconds=progress.seconds,
        )


def _vectors_of(
    model: PackedModel, kind: str | None, given: dict[str, Any], shape: dict[str, Any], precision: str, target: Path
) -> tuple[str, Any, Any]:
    """One of _VECTORS, the `Work` that computes them, and the `TextOptions` behind it. kind: None for those that the
    model is for. given: options of all kinds; shape, precision: of dense ones. ValueError where they do not fit."""
    from ftbert.text import embedding, multi_vector_embedding, sparse_embedding, text_options, tokenizer_of

    if kind is not None and kind not in _VECTORS:
        raise ValueError(f"vectors must be one of {', '.join(_VECTORS)}; got {kind!r}")
    settings = tokenizer_of(model).settings
    if kind is None:
        kind = "dense" if not settings.other else "sparse" if settings.sparse is not None else "multi"
    if kind == "dense":
        how = text_options(model, **given, **shape)
        return kind, embedding(model, how), how
    if other := [name for name, value in shape.items() if value != _USUAL[name]]:
        raise ValueError(f"{other[0]} is for dense vectors, these are {kind} ones")
    if precision != "float32":
        raise ValueError(f"precision {precision} is for dense vectors, these are {kind} ones")
    if target.suffix == ".npy":
        raise ValueError(f"{target}: a .npy holds dense vectors alone, these are {kind} ones; write .jsonl or .parquet")
    how = text_options(model, vectors=kind, **given)
    return kind, (sparse_embedding if kind == "sparse" else multi_vector_embedding)(model, **given), how


def _spans_of(
    model: PackedModel, size: int, kind: str | None, given: dict[str, Any], precision: str, target: Path
) -> tuple[str, Any, Any]:
    """As `_vectors_of`, of late chunking."""
    from ftbert.text import cut_embedding, text_options

    if kind not in (None, "dense") or precision != "float32" or given.pop("long_texts") != "truncate":
        raise ValueError("chunk_tokens goes with dense vectors in float32; its windows stand in for long_texts")
    if target.suffix == ".npy":
        words = "a .npy holds one vector a text, chunk_tokens makes several; write .jsonl or .parquet"
        raise ValueError(f"{target}: {words}")
    return "spans", cut_embedding(model, size, **given), text_options(model, **given)


def _rows_of(sources: Sequence[Path], end: Position) -> list[dict[str, Any]]:
    ends = [*end.ends, *[end.records] * (len(sources) - len(end.ends))]
    return [
        {"source": str(source), "first": first, "records": last - first}
        for source, first, last in zip(sources, [0, *ends], ends, strict=False)
    ]


def _windows(reader: Reader, start: Position, progress: Progress, before: int) -> Iterator[tuple[Chunk, list[str]]]:
    for chunk in reader.chunks(start):
        progress.expect(len(chunk.texts), chunk.consumed - before)
        before = chunk.consumed
        yield chunk, chunk.texts


def _deliver_skipped(left_out: SkippedWriter, position: Position, target: Path, skip_bad: bool) -> None:
    listed = left_out.finish()
    if target == STREAM:
        sys.stderr.write(listed.read_text(encoding="utf-8"))
    elif skip_bad:
        expect_own_list(skipped_file(target))  # it may have come meanwhile
        if position.skipped:
            whole = listed.with_name("skipped.new")
            shutil.copyfile(listed, whole)  # a run killed now goes on with the list that it has
            whole.replace(skipped_file(target))
        else:
            skipped_file(target).unlink(missing_ok=True)  # of an earlier run


@contextlib.contextmanager
def _told_of_changes(staging: StagingFolder) -> Iterator[None]:
    try:
        yield
    except Changed as error:
        raise staging.cannot_go_on(str(error)) from error


def _writer(
    staging: StagingFolder, target: Path, vectors: tuple[int, str], saved: dict[str, Any] | None
) -> tuple[Writer, SkippedWriter, Position]:
    """The writers and where to read on; starts again when the files do not match the manifest."""
    if saved is not None:
        try:
            position = Position(**saved["position"])
            left_out = SkippedWriter(staging.folder, saved["skipped"])
            return open_target(target, staging.folder, vectors, saved["writer"]), left_out, position
        except (OSError, ValueError, TypeError, KeyError) as error:
            staging.discard(f"its files are damaged ({error})")
    return open_target(target, staging.folder, vectors, None), SkippedWriter(staging.folder, {}), Position()


def _check_finite(vectors: Any, chunk: Chunk) -> None:
    if isinstance(vectors, list):
        numbers: list[Any] = [getattr(one, "values", one) for one in vectors]
        finite = np.array([np.isfinite(one).all() for one in numbers], dtype=np.bool_)
    else:
        finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        record = chunk.end.records - len(chunk.texts) + int(np.argmin(finite)) + 1
        raise ValueError(
            f"record {record} has an embedding that is not finite; the weights or the dtype cannot hold it "
            "(fp16 overflows where bf16 and fp32 do not)"
        )


def _sources_identity(sources: Sequence[Path]) -> dict[str, Any]:
    if STREAM in sources:
        return {}
    stats = [source.stat() for source in sources]
    found = {
        "source": [str(source.resolve()) for source in sources],
        "source size": [stat.st_size for stat in stats],
        "source time": [stat.st_mtime_ns for stat in stats],
    }
    if len(sources) > 1:  # a thousand names would be written with each chunk
        found = {key: hashlib.sha256(repr(value).encode()).hexdigest() for key, value in found.items()}
    return found


def _model_identity(model: PackedModel) -> dict[str, Any]:
    """Changes when anything changes that a vector depends on."""
    digest, weights = hashlib.sha256(), model.checkpoint.source.files  # one may lie elsewhere, or be ONNX
    assert model.folder is not None  # whose tokenizer was read
    for path in sorted({*model.folder.rglob("*"), *weights}):
        if path.is_file() and (path.suffix in _READ or path in weights):
            stat = os.stat(path)
            name = path.relative_to(model.folder) if path.is_relative_to(model.folder) else path.name
            digest.update(f"{name} {stat.st_size} ".encode())
            small = stat.st_size <= _HASHED_BYTES
            digest.update(path.read_bytes() if small else str(stat.st_mtime_ns).encode())
    dtype = str(model.dtype).removeprefix("torch.")
    task = {"task": model.checkpoint.task} if model.checkpoint.task else {}
    return {"model": digest.hexdigest(), "dtype": dtype, "device": model.device.type, **task}
