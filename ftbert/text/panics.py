"""Panics of packages that are written in Rust: they reach Python as exceptions that are no `Exception`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """RuntimeError for a panic, whose class has no name to import: what a file says must not end a server."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from None
