"""From other people's checkpoints to ftbert's: name tables and one generic loop.

Names are imported when first asked for: the process that evaluates an ONNX graph (onnx_run.py) imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbert.converters.from_huggingface import convert
    from ftbert.converters.head_tables import rows_of
    from ftbert.converters.open import open_checkpoint
    from ftbert.converters.reference import build_reference

__all__ = ["build_reference", "convert", "open_checkpoint", "rows_of"]

_HOMES = {
    "build_reference": "reference",
    "convert": "from_huggingface",
    "open_checkpoint": "open",
    "rows_of": "head_tables",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
