"""Warnings that name the caller's line, however deep they come from."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_WITHIN = ("ftbert", "torch", "contextlib")  # the frames of decorators between ours


def warn_caller(text: str) -> None:
    """A UserWarning at the innermost line outside ftbert that led here."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _WITHIN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
