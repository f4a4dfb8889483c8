"""ftbert: BERT-family encoders at the hardware limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbert._library import library_path, load_library
    from ftbert.config import EncoderConfig
    from ftbert.model import Model, load
    from ftbert.optimization import optimize, undo

__version__ = "0.1.0"
__all__ = [
    "EncoderConfig", "Model", "__version__", "library_path", "load", "load_library", "optimize", "undo",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; the command line must be able to say --help without it.
    if name in ("Model", "load"):
        from ftbert import model

        return getattr(model, name)
    if name == "EncoderConfig":
        from ftbert.config import EncoderConfig

        return EncoderConfig
    if name in ("library_path", "load_library"):
        from ftbert import _library

        return getattr(_library, name)
    if name in ("optimize", "undo"):
        from ftbert import optimization

        return getattr(optimization, name)
    raise AttributeError(f"module 'ftbert' has no attribute {name!r}")
