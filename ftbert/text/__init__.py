"""Text in, vectors or scores out: what a model's folder says about text, tokens, packed batches, results in order."""

from ftbert.text.batching import Batch, Window, batches_of, by_token_budget, pack, windows_of
from ftbert.text.computing import Done, Work, compute_all, compute_windows, launch
from ftbert.text.encoding import embed_windows, embedding, encode, pooled_vectors, text_options, tokenise, tokenizer_of
from ftbert.text.options import TextOptions
from ftbert.text.precision import PRECISIONS, quantized
from ftbert.text.scoring import ScoreSettings, labels_of, predict, rank, scores, scoring, task_of
from ftbert.text.settings import TextSettings
from ftbert.text.text_model import TextModel
from ftbert.text.tokenizer import Tokenizer, load_tokenizer, lower_first
from ftbert.text.tokens import Text, Tokens, check_texts, joined, tokens_of

__all__ = [
    "PRECISIONS", "Batch", "Done", "ScoreSettings", "Text", "TextModel", "TextOptions", "TextSettings", "Tokenizer",
    "Tokens", "Window", "Work", "batches_of", "by_token_budget", "check_texts", "compute_all", "compute_windows",
    "embed_windows", "embedding", "encode", "joined", "labels_of", "launch", "load_tokenizer", "lower_first", "pack",
    "pooled_vectors", "predict", "quantized", "rank", "scores", "scoring", "task_of", "text_options", "tokenise",
    "tokenizer_of", "tokens_of", "windows_of",
]  # fmt: skip
