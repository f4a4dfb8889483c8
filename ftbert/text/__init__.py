"""Text in, vectors out: what a model's folder says about text, tokens, packed batches, pooled vectors."""

from ftbert.text.batching import Batch, PooledTokens, Window, batches_of, by_token_budget, pack, windows_of
from ftbert.text.encoding import Embedded, embed_windows, encode, text_options, tokenizer_of
from ftbert.text.options import TextOptions
from ftbert.text.settings import TextSettings
from ftbert.text.text_model import TextModel
from ftbert.text.tokenizer import Tokenizer, load_tokenizer, lower_first

__all__ = [
    "Batch", "Embedded", "PooledTokens", "TextModel", "TextOptions", "TextSettings", "Tokenizer", "Window",
    "batches_of", "by_token_budget", "embed_windows", "encode", "load_tokenizer", "lower_first", "pack", "text_options",
    "tokenizer_of", "windows_of",
]  # fmt: skip
