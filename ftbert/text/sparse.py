"""Sparse vectors of texts: weights for some entries of the vocabulary, of a masked language model's head (SPLADE) or of
a linear layer over tokens (BGE-M3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from ftbert.checkpoint import check_shapes, open_weights
from ftbert.packed_model import PackedModel, kept
from ftbert.text import long_texts
from ftbert.text.auto_tokenizer import load_tokenizer
from ftbert.text.batching import Batch, by_token_budget
from ftbert.text.checks import positive
from ftbert.text.computing import Work
from ftbert.text.encoding import text_options, tokenizer_of
from ftbert.text.options import TextOptions
from ftbert.text.pooling import Upload, dense_of
from ftbert.text.settings import TextSettings
from ftbert.text.static_settings import StaticSettings
from ftbert.text.token_arrays import SparseVector, entries_of, lexical, looked_up, unweighted
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.vector_modules import SparseSettings

# Logits that are there at once: 128 MB of float32.
_LOGITS_AT_ONCE = 1 << 25
_WHOLE = 1 << 30  # tokens that a table reads of a text, where its tokenizer does not say


def sparse_embedding(model: PackedModel, *, max_active_dims: int | None = None, **given: Any) -> Work:
    """What `ftbert.Model.encode_sparse` computes, a `SparseVector` for each text. given: of `TextOptions.choose`."""
    how = text_options(model, vectors="sparse", **given)
    tokenizer, config = tokenizer_of(model), model.config
    most = None if max_active_dims is None else positive("max_active_dims", max_active_dims)
    settings = tokenizer.settings.sparse
    assert settings is not None
    if settings.table is not None and given.get("task") in settings.table_for:
        return _looked_up(model, settings.table, how, most, given.get("max_length"))
    left_out = unweighted(tokenizer.loaded)

    def compute(model: PackedModel, batch: Batch, upload: Upload) -> torch.Tensor:
        ids = upload(batch.ids)
        if settings.linear is None:
            return splade_rows(model, ids, batch.cu_seqlens, batch.longest, upload, settings, most)
        return token_weights(model, model.forward_packed(ids, upload(batch.cu_seqlens), batch.longest))

    def parts(batch: Batch, found: NDArray[np.float32]) -> Iterator[SparseVector]:
        if settings.linear is None:
            return entries_of(found)
        ends = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        return (lexical(batch.ids[start:end], found[start:end, 0], left_out, most) for start, end in ends)

    return Work(
        compute=compute,
        tokenise=lambda texts: long_texts.tokenise(tokenizer, texts, how).check(config.vocab, config.token_types),
        parts=parts,
        width=config.vocab,
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def _looked_up(model: PackedModel, folder: Path, how: TextOptions, most: int | None, length: int | None) -> Work:
    """Of a table's entries: no network computes. length: the caller's."""
    tokenizer, weights = table_tokenizer(model, folder), table_weights(model, folder)
    length = tokenizer.max_length if length is None else tokenizer.check_length(length, "max_length")
    how, vocab = replace(how, max_length=length), model.config.vocab

    def parts(batch: Batch, found: NDArray[np.float32]) -> Iterator[SparseVector]:
        ends = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        return (looked_up(batch.ids[start:end], weights, most) for start, end in ends)

    return Work(
        compute=lambda model, batch, upload: torch.empty(0),
        tokenise=lambda texts: long_texts.tokenise(tokenizer, texts, how).check(vocab, 1),
        parts=parts,
        width=vocab,
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def table_tokenizer(model: PackedModel, folder: Path) -> Tokenizer:
    """That of a table's folder, which puts no special tokens around a text."""

    def build() -> Tokenizer:
        loaded = load_tokenizer(folder)
        fast = getattr(loaded, "backend_tokenizer", None)
        if fast is None:
            raise ValueError(f"{folder}: {type(loaded).__name__} is written in Python; a table needs a fast tokenizer")
        fast.post_processor = None
        return Tokenizer(folder, TextSettings(static=StaticSettings()), _WHOLE, loaded)

    return kept(model, ("tokenizer of the table", folder), build)


def table_weights(model: PackedModel, folder: Path) -> NDArray[np.float32]:
    """float32 [vocab], 0 for rows of the model behind the tokenizer's last token. ValueError where the file has another
    table."""

    def read() -> NDArray[np.float32]:
        source, vocab = open_weights(folder), model.config.vocab
        found = source.shapes()
        rows = min((found.get("weight") or (vocab,))[0], vocab)
        check_shapes(source.where, {"weight": [rows]}, found, ignored=set())
        weights = np.zeros(vocab, dtype=np.float32)
        weights[:rows] = source.read("weight").float().numpy()
        return weights

    return kept(model, ("table", folder), read)


def splade_rows(
    model: PackedModel,
    ids: torch.Tensor,
    cu_seqlens: NDArray[np.int32],
    longest: int,
    upload: Upload,
    settings: SparseSettings,
    most: int | None = None,
) -> torch.Tensor:
    """float32 [texts, 2 * entries] on the model's device: of each text the ids of its entries with their weights, in
    turn, 0 behind its last. ids: int64 [tokens], there; cu_seqlens: int32 [texts + 1]. most: entries of a text, the
    largest.

    Logits are made for some tokens at a time. Waits for a GPU: only there it shows how many entries there are.
    """
    hidden = model.forward_packed(ids, upload(cu_seqlens), longest)
    head, word = model.head("masked_lm"), model.encoder.weight("embeddings.word")
    lengths = np.diff(cu_seqlens).astype(np.int64)
    at_once = max(1, _LOGITS_AT_ONCE // len(head.out_bias))
    found: list[torch.Tensor] = []
    for run in by_token_budget(np.arange(len(lengths)), lengths, at_once):
        start, end = int(cu_seqlens[run[0]]), int(cu_seqlens[run[-1] + 1])
        whole: torch.Tensor | None = None  # of one text with more tokens than that: part by part
        for at in range(start, max(end, start + 1), at_once):
            part = hidden[at : min(at + at_once, end)]
            counts = lengths[run] if len(run) > 1 else np.array([len(part)], dtype=np.int64)
            some = _pooled(head(part, word), counts, settings, upload)
            join = torch.add if settings.sums else torch.maximum
            whole = some if whole is None else join(whole, some)
        assert whole is not None
        found.append(_entries(whole if settings.sums else _saturated(whole, settings.logs), most))
    width = max(one.shape[1] for one in found)
    return torch.cat([pad(one, (0, width - one.shape[1])) for one in found])


def as_tensor(vectors: Sequence[SparseVector], vocab: int) -> torch.Tensor:
    """Sparse COO [texts, vocab], coalesced."""
    rows = np.repeat(np.arange(len(vectors)), [len(one.values) for one in vectors])
    empty = [SparseVector(np.empty(0, np.int64), np.empty(0, np.float32))]
    columns, values = (np.concatenate(list(one)) for one in zip(*(vectors or empty), strict=True))
    where, shape = torch.from_numpy(np.stack([rows, columns])), (len(vectors), vocab)
    return torch.sparse_coo_tensor(where, torch.from_numpy(values), shape, is_coalesced=True, check_invariants=False)


def token_weights(model: PackedModel, hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] -> float32 [tokens, 1]: the weight of each for its own entry."""
    (linear,) = dense_of(model, "sparse")
    return linear(hidden.float())


def _pooled(logits: torch.Tensor, counts: NDArray[np.int64], settings: SparseSettings, upload: Upload) -> torch.Tensor:
    """[tokens, vocab] of texts with so many tokens -> float32 [texts, vocab]: the sum of weights, or the largest logit,
    which is the one with the largest weight. 0 of a text without tokens."""
    offsets = upload(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    if not settings.sums:
        largest: torch.Tensor = torch.ops.ftbert.pooling(logits, offsets, "max", False)
        return largest
    mean: torch.Tensor = torch.ops.ftbert.pooling(_saturated(logits.float(), settings.logs), offsets, "mean", False)
    return mean * upload(counts.astype(np.float32))[:, None]


def _saturated(logits: torch.Tensor, logs: int) -> torch.Tensor:
    weights = logits.clamp_min(0)
    for _ in range(logs):
        weights = weights.log1p()
    return weights


def _entries(weights: torch.Tensor, most: int | None) -> torch.Tensor:
    """float32 [texts, vocab] -> float32 [texts, 2 * entries]: see `splade_rows`."""
    if most is not None and most < weights.shape[1]:
        values, places = weights.topk(most)
        weights = torch.zeros_like(weights).scatter_(1, places, values)
    # A result that is not finite stays one, for whoever checks.
    rows, columns = ((weights > 0) | weights.isnan()).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(weights))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    found = weights.new_zeros((len(weights), int(counts.max()), 2))
    found[rows, places, 0] = columns.float()  # exact: no vocabulary has 2^24 entries
    found[rows, places, 1] = weights[rows, columns]
    return found.flatten(1)
