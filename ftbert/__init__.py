"""ftbert: BERT-family encoders at the hardware limit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftbert.torch_release import NO_TORCH
from ftbert.version import __version__

if TYPE_CHECKING:
    from ftbert._library import library_path, load_library
    from ftbert.checkpoint import ModelConfig
    from ftbert.model import Model, load
    from ftbert.optimization import optimize, undo

__all__ = [
    "Model", "ModelConfig", "__version__", "library_path", "load", "load_library", "optimize", "undo",
]  # fmt: skip


# torch takes seconds to import; the command line must be able to say --help without it.
_HOMES = {
    "Model": "model", "ModelConfig": "checkpoint", "library_path": "_library", "load": "model",
    "load_library": "_library", "optimize": "optimization", "undo": "optimization",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(import_module(f"ftbert.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(NO_TORCH) from error
    raise AttributeError(f"module 'ftbert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
