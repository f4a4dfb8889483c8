"""Text that a causal language model writes: a cache of keys and values, sampling, stop strings, streams.

What computes is imported when it is first asked for: a server's workers, which render and decode, need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftbert.decoding.text_stream import TextStream

if TYPE_CHECKING:
    from ftbert.decoding.decoder import cache_bytes
    from ftbert.decoding.folder_facts import FolderFacts, facts_of_folder
    from ftbert.decoding.generation import Generation
    from ftbert.decoding.language_model import LanguageModel
    from ftbert.decoding.options import Options
    from ftbert.decoding.prompts import encoded, tokenizer_for
    from ftbert.decoding.requests import MOST_LOGPROBS, Request, Token
    from ftbert.decoding.rules import Rules
    from ftbert.decoding.sampling import Sampling
    from ftbert.decoding.texts import TextPieces, generation_of, requested, stream_of

_LATE = {
    "FolderFacts": "folder_facts", "facts_of_folder": "folder_facts",
    "cache_bytes": "decoder", "Generation": "generation", "LanguageModel": "language_model", "Options": "options",
    "encoded": "prompts", "tokenizer_for": "prompts", "MOST_LOGPROBS": "requests", "Request": "requests",
    "Token": "requests", "Rules": "rules", "Sampling": "sampling", "TextPieces": "texts", "generation_of": "texts",
    "requested": "texts", "stream_of": "texts",
}  # fmt: skip

__all__ = [
    "MOST_LOGPROBS",
    "FolderFacts",
    "Generation",
    "LanguageModel",
    "Options",
    "Request",
    "Rules",
    "Sampling",
    "TextPieces",
    "TextStream",
    "Token",
    "cache_bytes",
    "encoded",
    "facts_of_folder",
    "generation_of",
    "requested",
    "stream_of",
    "tokenizer_for",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
