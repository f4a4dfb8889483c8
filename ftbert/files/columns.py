"""The fields beside a text as the target takes them: one JSON object a record, or columns of one type each.

What a target cannot hold is found record by record while the source is read, so that the error names line and field and
nothing has been computed in vain.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from ftbert.files.records import EMBEDDING
from ftbert.input_file import is_unicode, shown

# What a column of a parquet file holds, as far as it is known; a value of JSON itself, since manifests keep it.
# "null", "bool", "int", "bigint" (some beyond 2^53), "float", "str", "digits" (integers so far, of a CSV); [kind of the
# items]; {name: kind}, of an object.
Kind: TypeAlias = "str | list[Any] | dict[str, Any]"

_EXACT = 1 << 53  # the integers up to here are floats too
_LARGEST = 1 << 63
_CALLED = {
    "null": "null", "bool": "a boolean", "int": "an integer", "bigint": "an integer beyond 2^53", "float": "a float",
    "str": "a string", "digits": "an integer",
}  # fmt: skip
_DIGITS = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)  # as int() writes them: 007 is no number


class Untyped(str):
    """A field of a CSV, which has no types. A column in which each is an integer becomes one of integers."""


class Unfit(ValueError):
    """A record that the target cannot hold; the message names the field."""


def as_json(fields: Mapping[str, Any]) -> str:
    """A record as one JSON object. Unfit where JSON has no such value."""
    _expect_no_vector(fields)
    try:
        text = json.dumps(fields, ensure_ascii=False, default=_plain, allow_nan=False)
        if is_unicode(text):
            return text
        # A lone surrogate, which only the escaped form can carry.
        return json.dumps(fields, default=_plain, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise Unfit(_why_not_json(fields) or str(error)) from error


def fitted(kinds: dict[str, Kind], fields: Mapping[str, Any]) -> dict[str, Kind]:
    """The columns' kinds with one more record; `kinds` itself where it changes nothing. Unfit where a field does not
    fit one parquet type."""
    _expect_no_vector(fields)
    found = _fitted(kinds, fields, "")
    assert isinstance(found, dict)
    return found


def as_table(rows: list[dict[str, Any]], kinds: Mapping[str, Kind]) -> Any:
    """Records whose fields were `fitted`, as a pyarrow Table with a column for each of `kinds`."""
    import pyarrow as pa

    def column(name: str, kind: Kind) -> Any:
        values = [row.get(name) for row in rows]
        return pa.array([value and int(value) for value in values] if kind == "digits" else values, _type(kind))

    return pa.table({name: column(name, kind) for name, kind in kinds.items()})


def text_where_some_is(schemas: list[Any]) -> list[Any]:
    """The schemas of a file's parts; a column that is text in one of them is no longer integers in another."""
    import pyarrow as pa

    text = {field.name for schema in schemas for field in schema if field.type == pa.string()}
    return [
        pa.schema(
            [f.with_type(pa.string()) if f.name in text and f.type == pa.int64() else f for f in schema],
            metadata=schema.metadata,
        )
        for schema in schemas
    ]


def _expect_no_vector(fields: Mapping[str, Any]) -> None:
    if EMBEDDING in fields:
        raise Unfit(f"there is already a field {EMBEDDING!r}; rename it, or write .npy")


def _plain(value: Any) -> str:
    """Dates, times and decimals from parquet as JSON has them: text."""
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def _why_not_json(value: Any, name: str = "") -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"field {name!r} is {value}, which JSON cannot hold; write .parquet or .npy"
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    inside = (_why_not_json(item, f"{name}.{key}" if name else str(key)) for key, item in items)
    return next(filter(None, inside), "")


def _fitted(kind: Kind, value: Any, name: str) -> Kind:
    """name: of the field, with those of the objects around it."""
    if isinstance(value, dict) and (isinstance(kind, dict) or kind == "null"):
        known = kind if isinstance(kind, dict) else {}
        new = dict[str, Kind]()
        for key, item in value.items():
            before = known.get(key, "null")
            after = _fitted(before, item, f"{name}.{key}" if name else key)
            if after is not before or key not in known:
                if not is_unicode(key):
                    raise Unfit(f"the name of field {key!r} holds a lone surrogate; write .jsonl")
                new[key] = after
        if name and not known and not new:
            raise Unfit(f"field {name!r} is an empty object, for which parquet has no type; write .jsonl")
        return {**known, **new} if new else known
    if isinstance(value, list) and (isinstance(kind, list) or kind == "null"):
        before = kind[0] if isinstance(kind, list) else "null"
        after = before
        for item in value:
            after = _fitted(after, item, f"{name}[]")
        return kind if isinstance(kind, list) and after is before else [after]
    got = _kind(value, name)
    if got in ("null", kind) or (kind, got) in (("bigint", "int"), ("float", "int"), ("str", "digits")):
        return kind
    if kind == "null" or (kind, got) in (("int", "bigint"), ("int", "float"), ("digits", "str")):
        return got
    held = "an object" if isinstance(kind, dict) else "a list" if isinstance(kind, list) else _CALLED[kind]
    raise Unfit(f"field {name!r} is {_CALLED.get(got, got)}, and {held} in a record before; write .jsonl")


def _kind(value: Any, name: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if not -_LARGEST <= value < _LARGEST:
            raise Unfit(f"field {name!r} is {shown(value)}, an integer beyond 64 bits; write .jsonl")
        return "int" if abs(value) <= _EXACT else "bigint"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        if not is_unicode(value):
            raise Unfit(f"field {name!r} holds a lone surrogate, which parquet cannot; write .jsonl")
        return "digits" if isinstance(value, Untyped) and _DIGITS.fullmatch(value) else "str"
    return "an object" if isinstance(value, dict) else "a list"


def _type(kind: Kind) -> Any:
    import pyarrow as pa

    if isinstance(kind, dict):
        return pa.struct([(name, _type(inside)) for name, inside in kind.items()])
    if isinstance(kind, list):
        return pa.list_(_type(kind[0]))
    of_scalars = {"null": pa.null, "bool": pa.bool_, "int": pa.int64, "bigint": pa.int64, "float": pa.float64}
    of_scalars["digits"] = pa.int64
    return of_scalars.get(kind, pa.string)()
