"""The keys of a JSON object, beyond what a decoder tells: which are there twice, which are there at all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from ftbert.server.errors import ApiError

_LARGE = 65536  # bytes


def duplicate(body: bytes, names: Iterable[str]) -> str | None:
    """A key of the outermost object among `names` that is there twice. `body` is valid JSON."""
    if len(body) > _LARGE:  # a look for each name takes longer than to read all keys
        there = keys_of(body)
        names = [name for name in names if name in there]
    # Inside a string a quote is escaped, so `"inputs"` can only be a key or a whole value: rarely there twice.
    if all(body.count(b'"%s"' % name.encode()) < 2 for name in names):
        return None
    found: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        found[:] = pairs  # the outermost comes last

    try:
        json.loads(body, object_pairs_hook=keep)
    except (ValueError, RecursionError):
        raise ApiError("Validation", "the body is not valid JSON", status=400) from None
    keys = [key for key, _ in found]
    return next((name for name in names if keys.count(name) > 1), None)


def keys_of(body: bytes) -> set[str]:
    """Of the outermost object; empty for anything else."""
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return set()
    return set(found)
