"""embed_file: every format to every format, whole or not at all, and going on after a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import full_disk
from embed_sources import TEXTS, interrupted, write_source
from sentence_transformers.util import quantize_embeddings
from stub_model import WORDS, StubModel, StubSet, threads_left

from ftbert import progress
from ftbert.files import embed_file, staging_path
from ftbert.staging_folder import StagingFolder


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


@pytest.mark.parametrize(("source", "target"), [("in.jsonl", "out.parquet"), ("in.jsonl", "out.jsonl")])
def test_a_field_that_does_not_fit_is_found_before_its_chunk_is_computed(
    tmp_path: Path, stub: StubModel, source: str, target: str
) -> None:
    bad = "1e999" if target == "out.jsonl" else '"one"'
    rows = [f'{{"text": "a", "x": {x}}}\n' for x in ("1", "2", "3", bad, "5")]
    (tmp_path / source).write_text("".join(rows))
    with pytest.raises(ValueError, match="line 4: field 'x' is"):
        embed_file(stub, tmp_path / source, tmp_path / target, batch_records=2)
    assert sum(map(len, stub.calls)) <= 2 and not (tmp_path / target).exists()
    stats = embed_file(stub, tmp_path / source, tmp_path / target, batch_records=2, skip_bad=True)
    assert (stats.records, stats.skipped, stats.resumed) == (4, 1, 2)
    assert [row["x"] for row in read_target(tmp_path / target)[1]] == [1, 2, 3, 5]


def test_fields_that_grow_along_the_file(tmp_path: Path, stub: StubModel) -> None:
    """One parquet schema for all, whatever the first records hold."""
    values: list[Any] = [None, {"a": []}, {"b": 1}, {}, {"a": [None]}, {"a": [{"c": 1}], "b": 0.5}, None]
    rows = [{"text": "a", "x": x, **({"y": [1.5]} if i == 4 else {})} for i, x in enumerate(values)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = []
    for size in (1, 3, 100):
        embed_file(stub, tmp_path / "in.jsonl", tmp_path / "out.parquet", batch_records=size)
        tables.append(pq.read_table(tmp_path / "out.parquet"))
    assert all(table.schema == tables[0].schema and table.to_pylist() == tables[0].to_pylist() for table in tables)
    assert tables[0]["x"].to_pylist()[5] == {"a": [{"c": 1}], "b": 0.5}
    assert tables[0]["x"].to_pylist()[2] == {"a": None, "b": 1.0}
    assert tables[0]["y"].to_pylist() == [None] * 4 + [[1.5]] + [None] * 2


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


def test_a_target_that_is_a_link_stays_one(tmp_path: Path, stub: StubModel) -> None:
    path = write_source(tmp_path / "in.txt", TEXTS)
    (tmp_path / "real").mkdir()
    (tmp_path / "out.npy").symlink_to("real/vectors.npy")
    for _ in range(2):
        if not (tmp_path / "out.npy").exists():
            interrupted(stub, path, tmp_path / "out.npy", RuntimeError())
        embed_file(stub, path, tmp_path / "out.npy", batch_records=7)
        assert (tmp_path / "out.npy").is_symlink()
        assert np.array_equal(np.load(tmp_path / "real" / "vectors.npy"), stub.encode(TEXTS))
        assert [p.name for p in (tmp_path / "real").iterdir()] == ["vectors.npy"]
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    with pytest.raises((ValueError, OSError), match="loop.npy"):
        embed_file(stub, path, tmp_path / "loop.npy")
    (tmp_path / "input.npy").symlink_to("in.jsonl")
    with pytest.raises(ValueError, match="is the input itself"):
        embed_file(stub, write_source(tmp_path / "in.jsonl", TEXTS), tmp_path / "input.npy")


def test_nothing_is_removed_that_others_made(tmp_path: Path, stub: StubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_source(Path("v.npy.skipped.jsonl"), ["a", "b"])
    given = source.read_bytes()
    Path("link.jsonl").symlink_to(source)
    os.link(source, "hard.jsonl")
    for name in (str(source), "link.jsonl", "hard.jsonl", f"../{tmp_path.name}/{source}"):
        for resume in (True, False):
            with pytest.raises(ValueError, match="skipped.jsonl: is the input itself .*--skip-bad"):
                embed_file(stub, name, "v.npy", skip_bad=True, resume=resume)
    embed_file(stub, source, "v.npy")  # without skip_bad it is not touched
    for content in ('{"text": "a"}\n', "", "notes\n", '["file", "line", "reason"]\n'):
        Path("w.npy.skipped.jsonl").write_text(content)
        with pytest.raises(FileExistsError, match="w.npy.skipped.jsonl: .*did not write what is there"):
            embed_file(stub, source, "w.npy", skip_bad=True)
        assert Path("w.npy.skipped.jsonl").read_text() == content
    Path("w.npy.skipped.jsonl").unlink()
    Path("w.npy.skipped.jsonl").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="did not write"):
        embed_file(stub, source, "w.npy", skip_bad=True)
    inside = staging_path(Path("w.npy")) / "rows.jsonl"
    inside.parent.mkdir()
    inside.write_bytes(given)
    (inside.parent / "made-by-ftbert").touch()
    with pytest.raises(ValueError, match="rows.jsonl: lies in w.npy.part"):
        embed_file(stub, inside, "w.npy")
    assert inside.read_bytes() == source.read_bytes() == given


@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
def test_several_sources_make_one_target(tmp_path: Path, stub: StubModel, kind: str, target: str) -> None:
    sources = [write_source(tmp_path / f"{i}.{kind}", TEXTS[i * 11 : i * 11 + 11]) for i in range(4)]
    out, whole = tmp_path / target, tmp_path / f"whole{target[3:]}"
    embed_file(stub, sources, whole, batch_records=7)
    assert np.array_equal(read_target(whole)[0], stub.encode(TEXTS[:44]))
    stub.calls.clear()
    stub.fail_at, stub.error = 2, RuntimeError()
    with pytest.raises(RuntimeError):
        embed_file(stub, sources, out, batch_records=7)
    stub.fail_at = -1
    stats = embed_file(stub, str(tmp_path / f"?.{kind}"), out, batch_records=7)  # a pattern is the same files
    assert stats.resumed >= 14 and out.read_bytes() == whole.read_bytes()
    assert stats.as_dict()["sources"] == [
        {"source": str(path), "first": i * 11, "records": 11} for i, path in enumerate(sources)
    ]
    with pytest.raises(FileNotFoundError, match=r"\?\.md: matches no file"):
        embed_file(stub, str(tmp_path / "?.md"), out)
    with pytest.raises(ValueError, match="is the input itself"):
        embed_file(stub, [sources[0], write_source(tmp_path / "out.jsonl", TEXTS)], tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="standard input cannot be one of several"):
        embed_file(stub, [sources[0], "-"], out)


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


@pytest.mark.parametrize("target", ["out.npy", "out.jsonl", "out.parquet"])
@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precisions(tmp_path: Path, stub: StubModel, target: str, precision: str) -> None:
    path, out, file = write_source(tmp_path / "in.txt", TEXTS), tmp_path / target, tmp_path / "ranges.npy"
    ranges = file if precision.endswith("int8") else None
    given: dict[str, Any] = {"precision": precision, "ranges": ranges, "truncate_dim": 13, "batch_records": 7}
    vectors = stub.encode(TEXTS, truncate_dim=13)
    want = quantize_embeddings(vectors, precision)  # type: ignore[arg-type]
    stats = embed_file(stub, path, out, **given)
    got = np.load(out) if target == "out.npy" else np.array([row["embedding"] for row in rows_of(out)])
    assert np.array_equal(got, want) and stats.hidden == want.shape[1]
    if target == "out.npy":
        assert got.dtype == want.dtype
    if target == "out.parquet":
        assert pq.read_table(out).schema.field("embedding").type.value_type == pa.from_numpy_dtype(want.dtype)
    if ranges is not None:
        measured = np.load(file)
        assert np.array_equal(measured, np.stack([vectors.min(0), vectors.max(0)]))
        assert np.array_equal(stub.encode("cat", truncate_dim=13, precision=precision, ranges=measured),
                              quantize_embeddings(stub.encode(["cat"], truncate_dim=13), precision, ranges=measured)[0])  # type: ignore[arg-type]
        few = write_source(tmp_path / "few.txt", TEXTS[:3])  # read now, not measured again
        embed_file(stub, few, tmp_path / "few.npy", **given)
        assert np.array_equal(np.load(tmp_path / "few.npy"), want[:3])
        np.save(file, measured / 2)
        embed_file(stub, few, tmp_path / "few.npy", **given)  # what lies outside becomes the nearest
        assert np.array_equal(np.load(tmp_path / "few.npy"), quantize_embeddings(vectors[:3], precision, ranges=measured / 2))  # type: ignore[arg-type]


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"precision": "int8"}, "precision int8 needs --ranges FILE"),
        ({"precision": "binary", "ranges": "r.npy"}, "--ranges is for --precision int8 and uint8; got binary"),
        ({"precision": "int8", "ranges": "r.txt"}, "expected the name of a .npy"),
        ({"precision": "int8", "ranges": "out.npy"}, "out.npy: would be written twice"),
        ({"precision": "int8", "ranges": "out.npy.part/rows.npy"}, "lies in .*out.npy.part"),
        ({"precision": "int8", "ranges": "bad.npy"}, "bad.npy: "),
        ({"precision": "int8", "ranges": "wide.npy"}, r"wide.npy: ranges must be floats \[2, 16\]; got float64 \[2, 4\]"),
        ({"precision": "int8", "ranges": "turned.npy"}, "turned.npy: ranges must be finite: the least"),
        ({"precision": "int4"}, "precision must be one of"),
    ],
)
def test_wrong_ranges(
    tmp_path: Path, stub: StubModel, given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_source(tmp_path / "in.txt", TEXTS)
    (tmp_path / "bad.npy").write_bytes(b"no numpy")
    np.save("wide.npy", np.zeros((2, 4)))
    np.save("turned.npy", np.stack([np.ones(16), np.zeros(16)]))
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(ValueError, match=words):
        embed_file(stub, path, tmp_path / "out.npy", **given)
    assert before == {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} and stub.calls == []


def test_replicas_share_the_work(tmp_path: Path, stub: StubModel) -> None:
    path, out = write_source(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    replicas = [StubModel(stub.folder, delay) for delay in (0.0, 0.004, 0.001)]
    embed_file(stub, path, tmp_path / "whole.jsonl", batch_records=7)
    for _ in range(2):
        embed_file(StubSet(replicas), path, out, max_tokens=16384, batch_records=7)
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sum(len(model.calls) for model in replicas) == 2 * len(stub.calls) and threads_left() == 0
    for model in replicas:
        model.calls.clear()
        model.fail_at, model.error = 2, RuntimeError("stub failed")  # six of eight batches are computed at most
    out.unlink()
    with pytest.raises(RuntimeError, match="^cpu: stub failed$"):
        embed_file(StubSet(replicas), path, out, batch_records=7)
    assert not out.exists() and threads_left() == 0
    embed_file(stub, path, out, batch_records=7)  # one alone goes on
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_line_from_time_to_time_off_a_terminal(
    tmp_path: Path, stub: StubModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_source(tmp_path / "in.txt", TEXTS)
    monkeypatch.setattr(progress, "_SECONDS", 0)
    embed_file(stub, path, tmp_path / "out.npy", batch_records=10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(line.startswith("embed: ") for line in lines)
    assert "50 texts in 0:00:0" in lines[-1] and "100 %, 0:00:00 left" in lines[-1] and "tokens/s" in lines[-1]
    embed_file(stub, path, tmp_path / "out.npy", show_progress_bar=False)
    assert capsys.readouterr().err == ""
    embed_file(stub, path, tmp_path / "out.npy", show_progress_bar=True)
    assert "50 texts, " in capsys.readouterr().err
    interrupted(stub, path, tmp_path / "new.npy", RuntimeError())
    capsys.readouterr()
    embed_file(stub, path, tmp_path / "new.npy", batch_records=7)  # speed and rest are those of this run
    assert "embed: 15 texts" in (last := capsys.readouterr().err.splitlines()[-1]) and "100 %" in last


def test_integers_of_a_csv_are_integers_in_parquet(tmp_path: Path, stub: StubModel) -> None:
    """Where all are, as pandas reads them. A number with zeros before it, or an empty field, keeps its column text."""
    rows = [("7", "007", "1", "1", "a"), ("-12", "12", "2", "", "cat"), ("0", "3", "x", "3", "dog")]
    path = tmp_path / "in.csv"
    path.write_text("id,code,mixed,gap,text\n" + "".join(",".join(row) + "\n" for row in rows))
    embed_file(stub, path, tmp_path / "out.parquet", batch_records=1)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["id"].type == pa.int64() and table["id"].to_pylist() == [7, -12, 0]
    for at, name in ((1, "code"), (2, "mixed"), (3, "gap"), (4, "text")):
        assert table[name].to_pylist() == [row[at] for row in rows]
