"""Text in, vectors or scores out: what a model's folder says about text, tokens, packed batches, results in order.

Names are imported when first asked for: processes that only tokenise need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbert.text.batching import Batch, Window, batches_of, by_token_budget, pack, windows_of
    from ftbert.text.computing import Done, Work, compute_all, compute_windows, launch
    from ftbert.text.encoding import (
        embed_windows,
        embedding,
        encode,
        pooled_vectors,
        text_options,
        tokenise,
        tokenizer_of,
    )
    from ftbert.text.fast_tokenizer import FastTokenizer
    from ftbert.text.options import TextOptions
    from ftbert.text.precision import PRECISIONS, quantized
    from ftbert.text.scoring import ScoreSettings, labels_of, predict, rank, scores, task_of
    from ftbert.text.settings import TextSettings
    from ftbert.text.text_model import TextModel
    from ftbert.text.tokenizer import Tokenizer, load_tokenizer, lower_first
    from ftbert.text.tokens import Text, Tokens, check_texts, joined, tokens_of

__all__ = [
    "PRECISIONS", "Batch", "Done", "FastTokenizer", "ScoreSettings", "Text", "TextModel", "TextOptions", "TextSettings",
    "Tokenizer", "Tokens", "Window", "Work", "batches_of", "by_token_budget", "check_texts", "compute_all",
    "compute_windows", "embed_windows", "embedding", "encode", "joined", "labels_of", "launch", "load_tokenizer",
    "lower_first", "pack", "pooled_vectors", "predict", "quantized", "rank", "scores", "task_of",
    "text_options", "tokenise", "tokenizer_of", "tokens_of", "windows_of",
]  # fmt: skip

_HOMES = {
    "ftbert.text.batching": "Batch Window batches_of by_token_budget pack windows_of",
    "ftbert.text.computing": "Done Work compute_all compute_windows launch",
    "ftbert.text.encoding": "embed_windows embedding encode pooled_vectors text_options tokenise tokenizer_of",
    "ftbert.text.fast_tokenizer": "FastTokenizer",
    "ftbert.text.options": "TextOptions",
    "ftbert.text.precision": "PRECISIONS quantized",
    "ftbert.text.scoring": "ScoreSettings labels_of predict rank scores task_of",
    "ftbert.text.settings": "TextSettings",
    "ftbert.text.text_model": "TextModel",
    "ftbert.text.tokenizer": "Tokenizer load_tokenizer lower_first",
    "ftbert.text.tokens": "Text Tokens check_texts joined tokens_of",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
