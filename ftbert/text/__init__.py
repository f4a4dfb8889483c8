"""Text in, vectors or scores out: what a model's folder says about text, tokens, packed batches, results in order.

What computes is imported when it is first asked for: processes that only tokenise need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftbert.text.auto_tokenizer import TOKENIZER_FILES, TOKENIZER_SUFFIXES, load_tokenizer
from ftbert.text.batching import Batch, Window, batches_of, by_token_budget, pack
from ftbert.text.charsmap import check_charsmaps
from ftbert.text.chat_template import ChatTemplate
from ftbert.text.fast_tokenizer import FastTokenizer
from ftbert.text.options import TextOptions, check_pooling
from ftbert.text.pairs import LimitedPairs
from ftbert.text.panics import panics_as_errors
from ftbert.text.settings import OtherVectors, TextSettings
from ftbert.text.stanford import COLBERT_METADATA
from ftbert.text.static_settings import Model2vecReading
from ftbert.text.templates import PairTemplate, TemplateEncoder
from ftbert.text.token_arrays import SparseVector, entries_of, lexical, looked_up, tokens_kept, unweighted
from ftbert.text.token_classification import IGNORED, STRATEGIES, TokenLabels
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Tokens, expanded, joined, tokens_of
from ftbert.text.vector_modules import (
    MULTI_LINEAR,
    SPARSE_LINEAR,
    Expansion,
    MultiSettings,
    SparseSettings,
    width_behind,
)

if TYPE_CHECKING:
    from ftbert.text.computing import compute_windows, launch
    from ftbert.text.encoding import embedding, loaded_tokenizer, text_options, tokenizer_of
    from ftbert.text.late_chunks import cut_embedding, takes_chunks
    from ftbert.text.multi_vector import compared, expansion_token, multi_vector_embedding, skipped_ids, token_vectors
    from ftbert.text.pooling import Upload, dense_of, filling, pooled_rows, text_vectors, token_states
    from ftbert.text.precision import check_ranges, quantized, ranges_of, scaled, stored_as
    from ftbert.text.scoring import ScoreSettings, next_logits, score_ids, score_task
    from ftbert.text.shared_prefix import sharing
    from ftbert.text.sparse import sparse_embedding, splade_rows, table_tokenizer, table_weights, token_weights
    from ftbert.text.text_model import TextModel
    from ftbert.text.workers import CallersThread, Job, Launch, ReplicaThreads, Result, Workers

__all__ = [
    "COLBERT_METADATA", "IGNORED", "MULTI_LINEAR", "SPARSE_LINEAR", "STRATEGIES", "TOKENIZER_FILES",
    "TOKENIZER_SUFFIXES", "Batch", "CallersThread", "ChatTemplate",
    "Expansion", "FastTokenizer", "Job", "Launch", "LimitedPairs", "Model2vecReading", "MultiSettings",
    "OtherVectors", "PairTemplate", "ReplicaThreads", "Result", "ScoreSettings", "SparseSettings", "SparseVector",
    "TemplateEncoder", "TextModel", "TextOptions", "TextSettings", "TokenLabels", "Tokenizer", "Tokens", "Upload",
    "Window", "Workers", "batches_of", "by_token_budget", "check_charsmaps", "check_pooling", "check_ranges",
    "compared", "compute_windows", "cut_embedding", "dense_of", "embedding", "entries_of", "expanded",
    "expansion_token", "filling", "joined", "launch",
    "lexical", "load_tokenizer", "loaded_tokenizer", "looked_up", "multi_vector_embedding", "next_logits", "pack",
    "pooled_rows", "takes_chunks", "panics_as_errors", "quantized", "ranges_of", "scaled", "score_ids", "score_task",
    "sharing", "skipped_ids", "sparse_embedding", "splade_rows", "stored_as", "table_tokenizer", "table_weights",
    "text_options", "text_vectors", "token_states", "token_vectors", "token_weights", "tokenizer_of", "tokens_kept",
    "tokens_of", "unweighted", "width_behind",
]  # fmt: skip

_LATE = {
    "ScoreSettings": "scoring", "TextModel": "text_model", "Upload": "pooling", "check_ranges": "precision",
    "compute_windows": "computing",
    "cut_embedding": "late_chunks", "dense_of": "pooling", "embedding": "encoding", "filling": "pooling",
    "launch": "computing",
    "loaded_tokenizer": "encoding",
    "compared": "multi_vector", "expansion_token": "multi_vector", "multi_vector_embedding": "multi_vector",
    "pooled_rows": "pooling", "takes_chunks": "late_chunks", "next_logits": "scoring", "quantized": "precision",
    "ranges_of": "precision", "scaled": "precision", "score_ids": "scoring", "score_task": "scoring",
    "sharing": "shared_prefix",
    "skipped_ids": "multi_vector", "sparse_embedding": "sparse", "splade_rows": "sparse", "stored_as": "precision",
    "text_options": "encoding", "text_vectors": "pooling", "token_states": "pooling", "token_vectors": "multi_vector",
    "table_tokenizer": "sparse", "table_weights": "sparse", "token_weights": "sparse", "tokenizer_of": "encoding",
    **dict.fromkeys(("CallersThread", "Job", "Launch", "ReplicaThreads", "Result", "Workers"), "workers"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
