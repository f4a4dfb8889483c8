"""Text that a causal language model writes: a cache of keys and values, sampling, stop strings, streams.

What computes is imported when it is first asked for: a server's workers, which render and decode, need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftbert.decoding.chat_template import ChatTemplate
from ftbert.decoding.text_stream import TextStream

if TYPE_CHECKING:
    from ftbert.decoding.language_model import LanguageModel
    from ftbert.decoding.texts import TextPieces

__all__ = ["ChatTemplate", "LanguageModel", "TextPieces", "TextStream"]

_LATE = {"LanguageModel": "language_model", "TextPieces": "texts"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
