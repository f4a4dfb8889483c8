"""Columns of records: which types JSON and Parquet hold, and the bad records of those they do not."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from record_files import assert_resumable, read, written

from ftbert.files import Position, ReadOptions, open_source
from ftbert.files.records import BadRecord

TEXTS_IN_PARQUET = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", TEXTS_IN_PARQUET, ids=str)
def test_parquet(tmp_path: Path, kind: Any) -> None:
    table = pa.table({"n": range(5), "text": pa.array(list("abcab")).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    texts, columns, end = read(tmp_path / "a.parquet", batch_records=3)
    assert texts == list("abcab")
    assert columns[4] == {"n": 4, "text": "b"}
    assert (end.offset, end.line, end.records, end.skipped) == (5, 5, 5, 0)


@pytest.mark.parametrize("kind", TEXTS_IN_PARQUET, ids=str)
@pytest.mark.parametrize("keep", ["", "json", "table"])
def test_nulls_in_every_kind_of_text(tmp_path: Path, kind: Any, keep: str) -> None:
    """In several row groups, each of which may have a dictionary of its own, at both ends, and a group of nulls alone."""
    given = [None, "a", None, "b", "", None, None, "b", "c", None, None]
    pq.write_table(pa.table({"text": pa.array(given).cast(kind)}), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(BadRecord, match="row 1: 'text' is null"):
        list(open_source(tmp_path / "a.parquet", ReadOptions(keep=keep)).chunks(Position()))
    chunks = list(open_source(tmp_path / "a.parquet", ReadOptions(skip_bad=True, keep=keep, batch_records=4)).chunks(Position()))
    assert [text for chunk in chunks for text in chunk.texts] == ["a", "b", "", "b", "c"]
    assert [one.line for chunk in chunks for one in chunk.bad] == [1, 3, 6, 7, 10, 11]
    if keep == "table":
        assert pa.concat_tables([chunk.columns for chunk in chunks])["text"].to_pylist() == ["a", "b", "", "b", "c"]
    assert_resumable(tmp_path / "a.parquet", skip_bad=True, keep=keep, batch_records=4)


# What JSON has no value for, and where it is: the field's name leads there.
NO_JSON = [
    ('{"text": "bad", "x": 1e999}', "field 'x' is inf, which JSON cannot hold"),
    ('{"text": "bad", "x": [1, {"y": -1e999}]}', "field 'x.1.y' is -inf"),
    ('{"text": "bad", "x": NaN}', "field 'x' is nan"),
    ('{"text": "bad", "x": {"y": Infinity}}', "field 'x.y' is inf"),
    ('{"text": "bad", "embedding": 1}', "already a field 'embedding'"),
]


@pytest.mark.parametrize(("line", "words"), NO_JSON)
def test_what_json_cannot_hold_is_a_bad_record(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path / "a.jsonl", f'{{"text": "good", "x": 1}}\n{line}\n{{"text": "good"}}\n')
    with pytest.raises(BadRecord, match=f"line 2: .*{words}"):
        read(path)
    texts, columns, end = read(path, skip_bad=True)
    assert (texts, len(columns), end.skipped) == (["good", "good"], 2, 1)
    assert read(path, keep="")[2].records == 3


NOT_IN_JSON = [
    (pa.array([1.5, float("nan"), 2.5]), "field 'x' is nan"),
    (pa.array([[1.5], [float("inf")], None]), "field 'x.0' is inf"),
    (pa.array([{"y": 1.5}, {"y": float("-inf")}, {}]), "field 'x.y' is -inf"),
    pytest.param(
        pa.array([1000, 1, 2000], pa.timestamp("ns")), "field 'x' cannot be written as JSON",
        marks=pytest.mark.skipif(find_spec("pandas") is not None, reason="pandas has a class for nanoseconds"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("column", "words"), NOT_IN_JSON)
def test_what_json_cannot_hold_of_parquet(tmp_path: Path, column: Any, words: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"], "x": column}), path)
    with pytest.raises(BadRecord, match=f"row 2: {words}"):
        read(path)
    texts, columns, end = read(path, skip_bad=True)
    assert (texts, [row["text"] for row in columns], end.skipped) == (["a", "c"], ["a", "c"], 1)
    assert len(read_tables(path)) == 3


def read_tables(path: Path, **options: Any) -> Any:
    reader = open_source(path, ReadOptions(keep="table", **options))
    return pa.concat_tables([chunk.columns for chunk in reader.chunks(Position())])


def test_columns_that_no_target_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], ["text", "x", "x"]), path)
    for keep in ("json", "table"):
        with pytest.raises(ValueError, match="two columns are called 'x'"):
            open_source(path, ReadOptions(keep=keep))
    assert [chunk.texts for chunk in open_source(path, ReadOptions(keep="")).chunks(Position())] == [["a"]]
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), path)
    with pytest.raises(ValueError, match="two columns are called 'text'"):
        open_source(path, ReadOptions(keep=""))
    for held in (pa.array([b"x"]), pa.array([[b"x"]]), pa.array([{"y": b"x"}]), pa.array([b"x"], pa.binary_view())):
        pq.write_table(pa.table({"text": ["a"], "x": held}), path)
        with pytest.raises(ValueError, match="column 'x' holds bytes, which JSON cannot"):
            open_source(path, ReadOptions(keep="json"))
        assert len(read_tables(path)) == 1


BIG = 2**53 + 1
NO_TABLE: list[tuple[list[Any], str]] = [
    ([BIG, 1.5], "field 'x' is a float, and an integer beyond 2.53 in a record before"),
    ([1.5, BIG], "field 'x' is an integer beyond 2.53, and a float"),
    ([[1, None], [BIG], [0.5]], r"field 'x\[\]' is a float, and an integer beyond"),
    ([1, "one"], "field 'x' is a string, and an integer"),
    ([1, True], "field 'x' is a boolean, and an integer"),
    ([{"y": 1}, {"y": [1]}], "field 'x.y' is a list, and an integer"),
    ([[1], {"y": 1}], "field 'x' is an object, and a list"),
    ([None, {}], "field 'x' is an empty object"),
    ([[], [{}]], r"field 'x\[\]' is an empty object"),
    ([1, 2**63], "field 'x' is 9223372036854775808, an integer beyond 64 bits"),
    (["a", "\ud800"], "field 'x' holds a lone surrogate"),
    ([{"a": 1}, {"\ud800": 1}], "holds a lone surrogate"),
]


@pytest.mark.parametrize(("values", "words"), NO_TABLE)
@pytest.mark.parametrize("batch_records", [1, 100])
def test_what_fits_no_parquet_type_is_a_bad_record(
    tmp_path: Path, values: list[Any], words: str, batch_records: int
) -> None:
    path = written(tmp_path / "a.jsonl", "".join(json.dumps({"text": "a", "x": x}) + "\n" for x in values))
    options = ReadOptions(keep="table", batch_records=batch_records)
    with pytest.raises(BadRecord, match=f"line {len(values)}: .*{words}"):
        list(open_source(path, options).chunks(Position()))
    assert_resumable(path, keep="table", batch_records=1, skip_bad=True)
