"""embed_file: every format to every format, whole or not at all, and going on after a kill."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import full_disk
from stub_model import WORDS, StubModel, threads_left

from ftbert.files import embed_file, staging_path
from ftbert.files.staging_folder import StagingFolder

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


def read_target(path: Path) -> tuple[np.ndarray[Any, Any], list[dict[str, Any]]]:
    if path.suffix == ".npy":
        return np.load(path), []
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        rows = pq.read_table(path).to_pylist()
    vectors = np.array([row.pop("embedding") for row in rows], dtype=np.float32)
    return vectors, rows


@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.csv", "in.parquet"])
def test_every_format_to_every_format(tmp_path: Path, stub: StubModel, source: str, target: str) -> None:
    path = write_source(tmp_path / source, TEXTS)
    stats = embed_file(stub, path, tmp_path / target, batch_records=7)
    vectors, rows = read_target(tmp_path / target)
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, stub.encode(TEXTS))
    assert (stats.records, stats.skipped, stats.resumed, stats.hidden) == (50, 0, 0, 16)
    assert stats.tokens == sum(len(text.split()) + 2 for text in TEXTS)
    assert not staging_path(tmp_path / target).exists()
    if rows:
        assert [row["text"] for row in rows] == TEXTS
    if rows and source != "in.txt":
        assert [int(row["id"]) for row in rows] == list(range(50))
    if rows and source == "in.jsonl":
        assert rows[40]["late"] == 1.5


@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.parquet"])
def test_no_records(tmp_path: Path, stub: StubModel, target: str) -> None:
    assert embed_file(stub, write_source(tmp_path / "in.txt", []), tmp_path / target).records == 0
    vectors, rows = read_target(tmp_path / target)
    assert rows == [] and vectors.shape == ((0, 16) if target == "out.npy" else (0,))


def test_parquet_keeps_types_and_metadata(tmp_path: Path, stub: StubModel) -> None:
    table = pa.table({"text": ["a", "b"], "tags": [["x"], None], "n": pa.array([1, None], pa.int8())})
    table = table.replace_schema_metadata({"origin": "test"})
    pq.write_table(table, tmp_path / "in.parquet")
    embed_file(stub, tmp_path / "in.parquet", tmp_path / "out.parquet", batch_records=1)
    got = pq.read_table(tmp_path / "out.parquet")
    assert got.drop_columns("embedding").equals(table)
    assert got.schema.metadata[b"origin"] == b"test"
    assert got.schema.field("embedding").type == pa.list_(pa.float32(), 16)


def test_fields_that_do_not_fit_parquet(tmp_path: Path, stub: StubModel) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "x": 1}\n{"text": "b", "x": "one"}\n')
    with pytest.raises(ValueError, match=r"field 'x' does not fit one parquet type.*write \.jsonl"):
        embed_file(stub, path, tmp_path / "out.parquet")
    with pytest.raises(ValueError, match=r"changes its type along the file.*write \.jsonl"):
        embed_file(stub, path, tmp_path / "out.parquet", batch_records=1)
    assert not (tmp_path / "out.parquet").exists()
    embed_file(stub, path, tmp_path / "out.jsonl")


def test_an_embedding_that_is_there_already(tmp_path: Path, stub: StubModel) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "embedding": 1}\n')
    for target in ("out.jsonl", "out.parquet"):
        with pytest.raises(ValueError, match="already .*'embedding'"):
            embed_file(stub, path, tmp_path / target)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "model"]


def test_bad_records(tmp_path: Path, stub: StubModel) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\n\xff\nb\n")
    with pytest.raises(ValueError, match="line 2"):
        embed_file(stub, path, tmp_path / "out.npy")
    assert not (tmp_path / "out.npy").exists()
    assert threads_left() == 0
    stats = embed_file(stub, path, tmp_path / "out.npy", skip_bad=True)
    assert (stats.records, stats.skipped) == (2, 1)
    assert np.array_equal(np.load(tmp_path / "out.npy"), stub.encode(["a", "b"]))
    path.write_bytes(b"\xff\n\xfe\n")
    with pytest.raises(ValueError, match="all 2 records are bad; the first, line 1"):
        embed_file(stub, path, tmp_path / "none.npy", skip_bad=True)
    assert (tmp_path / "none.npy.skipped.jsonl").read_text().count("\n") == 2
    assert not (tmp_path / "none.npy").exists()


def test_a_file_named_like_the_stream(tmp_path: Path, stub: StubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="/-: cannot (read|write) a file without an ending"):
        embed_file(stub, "./-", tmp_path / "out.npy")


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ("none/out.npy", FileNotFoundError, "does not exist; make it first"),
        ("model", ValueError, "cannot write a file without an ending"),
        ("folder.npy", IsADirectoryError, "is a folder"),
        ("out.csv", ValueError, r"cannot write \.csv; expected \.npy, \.jsonl, "),
        ("in.jsonl", ValueError, "is the input itself"),
        ("/proc/out.npy", PermissionError, "cannot write into /proc"),  # not even root can
    ],
)
def test_bad_targets_fail_before_computing(
    tmp_path: Path, stub: StubModel, target: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "folder.npy").mkdir()
    path = write_source(tmp_path / "in.jsonl", TEXTS)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        embed_file(stub, path, tmp_path / target)
    assert stub.calls == []
    assert sorted(tmp_path.rglob("*")) == before


def test_vectors_that_are_not_finite_are_refused(tmp_path: Path, stub: StubModel) -> None:
    stub.table[WORDS.index("dog")] = float("nan")
    path = write_source(tmp_path / "in.txt", ["cat", "cat", "dog"])
    with pytest.raises(ValueError, match="record 3 has an embedding that is not finite"):
        embed_file(stub, path, tmp_path / "out.npy", batch_records=2)
    assert not (tmp_path / "out.npy").exists()


def interrupted(stub: StubModel, source: Path, target: Path, error: BaseException, **options: Any) -> None:
    """Five chunks are done when the model raises."""
    stub.calls.clear()
    stub.fail_at, stub.error = 5, error
    with pytest.raises(type(error)):
        embed_file(stub, source, target, batch_records=7, **options)
    stub.fail_at = -1
    assert not target.exists()
    assert threads_left() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.csv", "in.parquet"])
def test_goes_on_after_an_interruption(
    tmp_path: Path, stub: StubModel, source: str, target: str, error: BaseException
) -> None:
    path, out = write_source(tmp_path / source, TEXTS), tmp_path / target
    whole = tmp_path / f"whole{out.suffix}"
    embed_file(stub, path, whole, batch_records=7)
    interrupted(stub, path, out, error)
    stub.calls.clear()
    stats = embed_file(stub, path, out, batch_records=7)
    assert stats.resumed == 35
    assert sum(map(len, stub.calls)) == 15
    assert out.read_bytes() == whole.read_bytes()


def test_what_was_written_after_the_manifest_is_cut_off(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    with (staging_path(out) / "rows.npy").open("ab") as file:
        file.write(b"half a chunk")
    assert embed_file(stub, path, out, batch_records=7).resumed == 35
    assert np.array_equal(np.load(out), stub.encode(TEXTS))


OTHER_SETTINGS: dict[str, Any] = {
    "pooling": "cls", "normalize": False, "max_tokens": 99, "prompt": "cat ", "max_length": 4, "truncate_dim": 3,
    "batch_records": 8,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_another_setting_starts_again(tmp_path: Path, stub: StubModel, name: str) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    options = {name: OTHER_SETTINGS[name]}
    with pytest.warns(UserWarning, match=f"another {name}; starting again") as warned:
        stats = embed_file(stub, path, out, **{"batch_records": 7, **options})
    assert len(warned) == 1
    assert (stats.resumed, stats.records, stats.hidden) == (0, 50, options.get("truncate_dim", 16))
    assert np.array_equal(np.load(out), stub.encode(TEXTS, **(options if name != "batch_records" else {})))


def test_another_source_or_model_or_damage_starts_again(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: write_source(path, [*TEXTS, "cat"]), "another source size, source time"),
        (lambda: (tmp_path / "model" / "config.json").write_text("{}"), "another model"),
        (lambda: (staging_path(out) / "rows.npy").unlink(), "files are damaged"),
        (lambda: (staging_path(out) / "manifest.json").write_text('{"made_with"'), "manifest is broken"),
    ]
    for change, words in cases:
        interrupted(stub, path, out, RuntimeError())
        change()
        with pytest.warns(UserWarning, match=words):
            stats = embed_file(stub, path, out, batch_records=7)
        assert (stats.resumed, stats.records) == (0, 51)
        out.unlink()


# Resuming can be refused; a prompt that the folder lacks is no other setting.
@pytest.mark.parametrize(("given", "resumed"), [({"resume": False}, 0), ({"prompt_name": "document"}, 35)])
def test_no_warning_and_so_much_resumed(tmp_path: Path, stub: StubModel, given: dict[str, Any], resumed: int) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    interrupted(stub, path, out, RuntimeError())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert embed_file(stub, path, out, batch_records=7, **given).resumed == resumed


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    folder = staging_path(out)
    (folder / "sub").mkdir(parents=True)
    (folder / "mine").write_text("mine")
    for resume in (True, False):
        with pytest.raises(FileExistsError, match="holds 'mine', which ftbert did not write"):
            embed_file(stub, path, out, resume=resume)
    assert (folder / "mine").read_text() == "mine" and (folder / "sub").is_dir() and not out.exists()


def test_an_old_target_stays_until_the_new_one_is_whole(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    out.write_text("old")
    stub.fail_at = 3
    with pytest.raises(RuntimeError):
        embed_file(stub, path, out, batch_records=7)
    assert out.read_text() == "old"


def test_two_writers_of_one_target(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.txt", TEXTS), tmp_path / "out.npy"
    with StagingFolder(out), pytest.raises(BlockingIOError, match="another process is writing it"):
        embed_file(stub, path, out)
    embed_file(stub, path, out)


@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.jsonl.gz", "out.parquet"])
def test_a_full_disk_names_the_file(tmp_path: Path, stub: StubModel, target: str) -> None:
    path = write_source(tmp_path / "in.txt", TEXTS)
    with full_disk(2000), pytest.raises(OSError, match="File too large") as raised:
        embed_file(stub, path, tmp_path / target, batch_records=7)
    assert f"{target}.part/rows" in raised.value.filename
    assert not (tmp_path / target).exists()
