"""From other people's checkpoints to ftbert's: name tables and one generic loop.

Names are imported when first asked for: the process that evaluates an ONNX graph (onnx_run.py) imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbert.converters.from_huggingface import check_target, convert, write_folder
    from ftbert.converters.head_tables import rows_of
    from ftbert.converters.open import open_checkpoint
    from ftbert.converters.own_code import cut_texts
    from ftbert.converters.reference import build_reference, source_modules, source_tensors
    from ftbert.converters.text_files import model_files

__all__ = [
    "build_reference", "check_target", "convert", "cut_texts", "model_files", "open_checkpoint", "rows_of",
    "source_modules", "source_tensors", "write_folder",
]  # fmt: skip

_HOMES = {
    "build_reference": "reference",
    "check_target": "from_huggingface",
    "convert": "from_huggingface",
    "cut_texts": "own_code",
    "model_files": "text_files",
    "open_checkpoint": "open",
    "rows_of": "head_tables",
    "source_modules": "reference",
    "source_tensors": "reference",
    "write_folder": "from_huggingface",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
