"""A model whose GGUF file is split: NAME-00001-of-0000N.gguf and so on, as llama.cpp's llama-gguf-split writes them.

The first part holds the metadata of all. Each says how many there are (split.count), which it is, counted from 0
(split.no), and how many tensors all have together (split.tensors.count).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.checkpoint import exists, shown
from ftbert.converters.gguf_file import GgufFile, read_gguf
from ftbert.converters.hub_name import Part

_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_MOST = 8  # names shown


def open_parts(path: Path) -> GgufFile:
    """The model that the file at `path` is or belongs to, whichever of its parts that is. FileNotFoundError names
    parts that are missing; ValueError names the part and the entry that do not fit."""
    named = read_gguf(path)
    count, part = _whole(named, _COUNT), Part.of(path.name)
    if count < 2:
        return named
    if part is None or part.count != count:
        expected = f"{path.stem}-00001-of-{count:05d}.gguf" if part is None else f"...-of-{count:05d}.gguf"
        raise ValueError(f"{path}: its {_COUNT} is {count}: expected the name of one of {count} parts, {expected}")
    paths = [path.with_name(name) for name in part.names()]
    if missing := [one.name for one in paths if not exists(one)]:
        listed = ", ".join(missing[:_MOST]) + (f" and {len(missing) - _MOST} more" if len(missing) > _MOST else "")
        raise FileNotFoundError(f"{path}: one of {count} parts of a model; missing beside it: {listed}")
    return _joined([named if one == path else read_gguf(one) for one in paths])


def _joined(parts: list[GgufFile]) -> GgufFile:
    first = parts[0]
    tensors: dict[str, Any] = {}
    for i, one in enumerate(parts):
        _expect_part(one, i, len(parts), first)
        for name, tensor in one.tensors.items():
            if name in tensors:
                other = parts[tensors[name].part].path.name
                raise ValueError(f"{one.path}: tensor {shown(name)} is in {other}, too: parts of different models")
            tensors[name] = replace(tensor, part=i)
    if (told := _whole(first, _TENSORS, len(tensors))) != len(tensors):
        raise ValueError(
            f"{first.path}: its {_TENSORS} is {told}, and all {len(parts)} parts have {len(tensors)} tensors: parts "
            "of different models"
        )
    paths, files = tuple(one.path for one in parts), tuple(one.files[0] for one in parts)
    return GgufFile(paths, files, first.metadata, tensors)


def _expect_part(one: GgufFile, number: int, count: int, first: GgufFile) -> None:
    """ValueError where a part is another one than its name says, or another model's than the first."""
    for key, wanted in ((_NUMBER, number), (_COUNT, count)):
        if (found := _whole(one, key)) != wanted:
            raise ValueError(f"{one.path}: its {key} is {found}: expected {wanted}, by its name")
    for key, value in one.metadata.items():
        if key != _NUMBER and key in first.metadata and not np.array_equal(value, first.metadata[key]):
            raise ValueError(
                f"{one.path}: its {key} is {shown(value)}, in {first.path.name} it is {shown(first.metadata[key])}: "
                "parts of different models"
            )


def _whole(file: GgufFile, key: str, default: int = 0) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"{file.path}: {key}: expected a whole number of at least 0, got {shown(value)}")
    return value
