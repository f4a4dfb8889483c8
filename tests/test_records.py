"""Readers: the records of good files, the errors of bad files, and that reading can be taken up anywhere."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from record_files import assert_resumable, read, written

from ftbert.files import Position, ReadOptions, open_source, read_lines
from ftbert.files.formats import open_sources
from ftbert.files.records import BadRecord, Changed

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=20)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize(
    ("name", "data", "options", "texts", "columns", "lines"),
    [
        ("a.txt", "\ufeffone\r\n\ntwo\x85\u2028three\r\r\nlast", {},
         ["one", "", "two\x85\u2028three\r", "last"], {"text": "last"}, 4),
        ("a.jsonl", '{"id": 1, "body": "x"}\n\n  {"body": "\\u00e9\\n", "id": [2]}', {"column": "body"},
         ["x", "é\n"], {"body": "é\n", "id": [2]}, 3),
        ("a.csv", '\ufeffid,text\r\n1,"two\r\nlines, ""quoted"""\r\n\r\n2,\r\n', {},
         ['two\r\nlines, "quoted"', ""], {"id": "2", "text": ""}, 5),
        ("a.tsv", 'id\ttext\n1\t"a\tb, c"\n', {}, ["a\tb, c"], {"id": "1", "text": "a\tb, c"}, 2),
        ("a.txt", "", {}, [], None, 0),
        ("a.jsonl", "", {}, [], None, 0),
    ],
)  # fmt: skip
def test_what_a_file_holds(
    tmp_path: Path, name: str, data: str, options: dict[str, Any], texts: list[str], columns: Any, lines: int
) -> None:
    path = written(tmp_path / name, data)
    got, rows, end = read(path, **options)
    assert got == texts and rows[-1:] == ([] if columns is None else [columns])
    assert (end.line, end.records, end.offset) == (lines, len(texts), path.stat().st_size)


BAD = [
    ("a.txt", b"good\nb\xe9d\ngood\n", r"a\.txt: line 2: byte 0xe9 at offset 6 is not UTF-8"),
    ("a.jsonl", b'{"text": "good"}\n{"text": \n{"text": "good"}', "line 2: not valid JSON"),
    ("a.jsonl", b'{"text": "good"}\n[1]\n{"text": "good"}', "line 2: expected a JSON object; got list"),
    ("a.jsonl", b'{"text": "good"}\n{"a": 1}\n{"text": "good"}', "line 2: no field 'text'; found 'a'"),
    ("a.jsonl", b'{"text": "good"}\n{"text": null}\n{"text": "good"}', "'text' must be a string; got NoneType"),
    ("a.jsonl", b'{"text": "good"}\n{"text": "\\ud800"}\n{"text": "good"}', "line 2: 'text' holds a lone surr"),
    ("a.jsonl", b'{"text": "good"}\n\xff\xfe\n{"text": "good"}', "line 2: byte 0xff at offset 17"),
    ("a.jsonl", b'{"text": "good"}\n' + b"[" * 200_000 + b'\n{"text": "good"}', "line 2: not valid JSON"),
    ("a.csv", b"id,text\n1,good\n2\n3,good\n", "line 3: expected 2 fields; got 1"),
    ("a.csv", b"id,text\n1,good\n2,b,d\n3,good\n", "line 3: expected 2 fields; got 3"),
    ("a.csv", b"id,text\n1,good\n2,b\xe9d\n3,good\n", "line 3: byte 0xe9 at offset 18 is not UTF-8"),
    ("a.csv", b'id,text\n1,good\n2,"open\n3,good\n', "line 3: not valid CSV"),
    ("a.csv", b'id,text\n1,good\n2,"a"b\n3,good\n', "line 3: not valid CSV"),
]


@pytest.mark.parametrize(("name", "data", "words"), BAD)
def test_a_bad_record_is_named_and_can_be_skipped(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = written(tmp_path / name, data)
    with pytest.raises(BadRecord, match=words):
        read(path)
    texts, _, end = read(path, skip_bad=True)
    assert texts == ["good", "good"]
    assert (end.records, end.skipped) == (2, 1)


@pytest.mark.parametrize(("bad", "words"), [(None, "is null"), (b"\xff", "is not UTF-8")])
def test_a_bad_text_in_parquet(tmp_path: Path, bad: bytes | None, words: str) -> None:
    path, raw = tmp_path / "a.parquet", pa.array([b"a", bad, b"b"])
    texts = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    pq.write_table(pa.table({"text": texts, "n": [1, 2, 3]}), path)
    with pytest.raises(BadRecord, match=f"row 2: 'text' {words}"):
        read(path)
    texts, columns, end = read(path, skip_bad=True)
    assert (texts, [row["n"] for row in columns], end.skipped) == (["a", "b"], [1, 3], 1)


def test_wrong_files_are_refused_at_once(tmp_path: Path) -> None:
    def refused(path: Path, words: str, error: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=words):
            open_source(path, ReadOptions(**options))

    refused(tmp_path / "none.txt", "No such file", FileNotFoundError)
    refused(written(tmp_path / "a.pdf", ""), r"cannot read \.pdf; expected \.txt, \.jsonl")
    refused(written(tmp_path / "a.csv", ""), "expected a header line")
    refused(written(tmp_path / "a.csv", "a,b\n"), "no column 'text'; found 'a', 'b'")
    refused(written(tmp_path / "a.csv", "a,a\n"), "names a column twice", column="a")
    refused(written(tmp_path / "a.parquet", "PAR1"), "not a whole parquet file")
    pq.write_table(pa.table({"n": [1], "embedding": ["x"], "text": ["x"]}), tmp_path / "b.parquet")
    refused(tmp_path / "b.parquet", "no column 'body'; found 'n', 'embedding', 'text'", column="body")
    refused(tmp_path / "b.parquet", "column 'n' must hold strings; it holds int64", column="n")
    refused(tmp_path / "b.parquet", "already has a column 'embedding'")
    refused(tmp_path / "b.parquet", "batch_records must be at least 1", batch_records=0)


@FUZZ
@given(data=st.binary(max_size=200), lines=st.integers(1, 3))
@example(data=b"\x80\n\x00", lines=1)  # a bad line, and no record left for a last chunk
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".csv"])
def test_any_bytes_are_read_or_refused(tmp_path: Path, ending: str, data: bytes, lines: int) -> None:
    head = b'"text",id\n' if ending == ".csv" else b""
    path = written(tmp_path / f"a{ending}", head + data)
    texts, columns, end = read(path, skip_bad=True)
    assert len(texts) == len(columns) == end.records
    assert_resumable(path, skip_bad=True, batch_records=lines)
    if end.skipped:
        with pytest.raises(BadRecord):
            read(path)
    else:
        assert read(path)[0] == texts


@FUZZ
@given(rows=st.lists(TEXT.filter(lambda t: "\n" not in t and not t.endswith("\r")), min_size=1))
def test_txt_round_trip(tmp_path: Path, rows: list[str]) -> None:
    rows[0] = rows[0].lstrip("\ufeff")
    assert read(written(tmp_path / "a.txt", "".join(f"{row}\n" for row in rows)))[0] == rows


@FUZZ
@given(rows=st.lists(st.tuples(TEXT, TEXT)), size=st.integers(1, 5))
def test_csv_round_trip(tmp_path: Path, rows: list[tuple[str, str]], size: int) -> None:
    file = io.StringIO()
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("id", "text"), *rows])
    path = written(tmp_path / "a.csv", file.getvalue())
    assert [(row["id"], row["text"]) for row in read(path)[1]] == rows
    assert_resumable(path, batch_records=size)


@FUZZ
@given(rows=st.lists(st.dictionaries(TEXT, JSON_VALUES)))
def test_jsonl_round_trip(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    rows = [{name: value for name, value in row.items() if name != "embedding"} | {"text": "x"} for row in rows]
    path = written(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert json.dumps(read(path)[1]) == json.dumps(rows)
    assert_resumable(path, batch_records=2)


@FUZZ
@given(at=st.integers(0, 10**6), flip=st.integers(0, 255))
def test_parquet_cut_or_changed_is_refused_or_read(tmp_path: Path, at: int, flip: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(50)]}), path)
    raw = bytearray(path.read_bytes())
    at %= len(raw)
    raw[at] ^= flip
    path.write_bytes(raw if flip else raw[:at])
    with suppress(ValueError, OSError):
        read(path, skip_bad=True)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz", "a.parquet"])
def test_reading_goes_on_in_the_same_text_only(tmp_path: Path, name: str) -> None:
    """The size and the place of every other record stay."""
    path = tmp_path / name

    def write(texts: list[str]) -> None:
        if name.endswith(".parquet"):
            return pq.write_table(pa.table({"text": texts}), path, row_group_size=2, compression="none")
        line = {"a.jsonl": '{"text": "%s"}\n', "a.csv": '"%s"\n'}.get(name, "%s\n")
        data = ("text\n" if name == "a.csv" else "") + "".join(line % text for text in texts)
        written(path, gzip.compress(data.encode(), mtime=0) if name.endswith(".gz") else data)
        return None

    texts = [f"text {i}" for i in range(6)]
    write(texts)
    chunks = list(open_source(path, ReadOptions(batch_records=2)).chunks(Position()))
    for first in (2, 4) if name != "a.parquet" else ():  # its description, which every edit changes, counts too
        reader = open_source(path, ReadOptions(batch_records=2))
        write([*texts[:first], *("news" + text[4:] for text in texts[first:])])
        assert next(iter(reader.chunks(chunks[first // 2 - 1].end))).texts[0] == f"news {first}"
    for changed in range(4):
        write([*texts[:changed], "news" + texts[changed][4:], *texts[changed + 1 :]])
        with pytest.raises(Changed, match=name):
            list(open_source(path, ReadOptions(batch_records=2)).chunks(chunks[1].end))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("keep", ["json", "table"])
def test_several_files_are_read_as_one(tmp_path: Path, kind: str, keep: str) -> None:
    sizes, paths, texts = [3, 0, 5, 1, 1, 9], [], []
    for number, size in enumerate(sizes):
        some = [f"{number} {i}" for i in range(size)]
        path = tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"text": pa.array(some, pa.string())}), path)
        else:
            line = '{"text": "%s"}\n' if kind == "jsonl" else "%s\n"
            written(path, ("text\n" if kind == "csv" else "") + "".join(line % text for text in some))
        paths.append(path)
        texts += some
    options = ReadOptions(batch_records=4, keep=keep)
    chunks = list(open_sources(paths, options).chunks(Position()))
    assert [text for chunk in chunks for text in chunk.texts] == texts
    assert all(4 <= len(chunk.texts) < 8 for chunk in chunks[:-1])
    assert all(len(chunk.columns) == len(chunk.texts) for chunk in chunks)
    assert chunks[-1].consumed == open_sources(paths, options).end
    for place, chunk in enumerate(chunks):
        rest = list(open_sources(paths, options).chunks(chunk.end))
        assert [(c.texts, c.end) for c in rest] == [(c.texts, c.end) for c in chunks[place + 1 :]]
    if kind == "txt":
        for other in (0, 2):
            before = written(tmp_path / "kept", paths[other].read_bytes())
            written(paths[other], before.read_bytes().replace(b" 1", b" x"))
            with pytest.raises(Changed):
                list(open_sources(paths, options).chunks(chunks[2].end))
            written(paths[other], before.read_bytes())


def test_progress_over_files_counted_in_rows_and_in_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["word " * 50] * 40}), tmp_path / "a.parquet")
    paths = [tmp_path / "a.parquet", written(tmp_path / "b.txt", "word\n" * 400)]
    sizes = [path.stat().st_size for path in paths]
    reader = open_sources(paths, ReadOptions(batch_records=20, keep=""))
    consumed = [chunk.consumed for chunk in reader.chunks(Position())]
    assert reader.end == sum(sizes) == consumed[-1] and consumed == sorted(consumed)
    assert consumed[0] == sizes[0] // 2 and consumed[1] == sizes[0]


def test_several_files_that_make_no_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "x": ["1"]}), tmp_path / "b.parquet")
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    with pytest.raises(ValueError, match=r"b\.parquet: other columns than in .*a\.parquet .*x: int64.*x: string"):
        open_sources(paths, ReadOptions(keep="table"))
    assert len(list(open_sources(paths, ReadOptions()).chunks(Position()))) == 1
    with pytest.raises(ValueError, match="make no table together"):
        open_sources([paths[0], written(tmp_path / "a.txt", "a\n")], ReadOptions(keep="table"))
    for number, x in enumerate(("1", '"one"')):
        paths[number] = written(tmp_path / f"{number}.jsonl", f'{{"text": "a", "x": {x}}}\n')
    with pytest.raises(BadRecord, match=r"1\.jsonl: line 1: field 'x' is a string, and an integer"):
        list(open_sources(paths, ReadOptions(keep="table")).chunks(Position()))


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_parquet_is_resumable(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.parquet"
    texts = [None if i % 13 == 5 else f"text {i}" for i in range(90)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=21)
    assert_resumable(path, batch_records=size, skip_bad=True)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_chunks_are_bounded_in_bytes(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ftbert.files.read_lines", "ftbert.files.read_parquet"):
        monkeypatch.setattr(f"{module}.CHUNK_BYTES", 1000)
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": ["x" * 300] * 50}), path)
    else:
        row = {"a.txt": "%s\n", "a.jsonl": '{"text": "%s"}\n', "a.csv": "%s\n"}[name]
        written(path, ("text\n" if name == "a.csv" else "") + row % ("x" * 300) * 50)
    chunks = list(open_source(path, ReadOptions()).chunks(Position()))
    assert all(len(chunk.texts) <= 4 for chunk in chunks)
    assert sum(len(chunk.texts) for chunk in chunks) == 50
    assert_resumable(path)


@pytest.mark.parametrize("rows", ['"\n', '"a\n"b,\n', 'x,"y\n'])
def test_csv_with_open_quotes_is_read_in_linear_time(
    tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    following = read_lines._Lines.__next__
    monkeypatch.setattr(read_lines._Lines, "__next__", lambda lines: drawn.append(1) or following(lines))
    path = written(tmp_path / "a.csv", "text,b\n" + rows * 300)
    assert read(path, skip_bad=True)[0] == []
    assert len(drawn) < 5 * 300 * rows.count("\n")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: expected a file, it is a named pipe"):
        open_source(tmp_path / name, ReadOptions())
