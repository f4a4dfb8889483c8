"""Panics of packages that are written in Rust: they reach Python as exceptions that are no `Exception`."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType


class panics_as_errors(ContextDecorator):  # noqa: N801 - called as a function is
    """RuntimeError for a panic, whose class has no name to import: what a file says must not end a server."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise RuntimeError(str(error)) from None
