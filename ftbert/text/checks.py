"""Values of options and of settings, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def one_of(known: tuple[str, ...], name: str, value: Any) -> str:
    """`value` itself when it is one of these, else ValueError."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    return str(value)


def positive(name: str, value: Any) -> int:
    """`value` itself; ValueError for what is no positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}")
    return value


def length_in(path: Path, config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else positive(f"{path}: {key}", config[key])
