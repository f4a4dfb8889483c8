"""Sparse vectors and vectors of tokens as numpy arrays. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class SparseVector(NamedTuple):
    """indices: int64 [entries], ascending, of the vocabulary; values: float32 [entries], not 0."""

    indices: NDArray[np.int64]
    values: NDArray[np.float32]


class SpanVectors(NamedTuple):
    """spans: int64 [spans, 2], characters; values: float32 [spans, width]."""

    spans: NDArray[np.int64]
    values: NDArray[np.float32]


def entries_of(rows: NDArray[np.float32]) -> Iterator[SparseVector]:
    """What `splade_rows` gives as a vector for each row."""
    counts = np.count_nonzero(rows[:, 1::2], axis=1).tolist()
    for row, count in zip(rows, counts, strict=True):
        yield SparseVector(row[: 2 * count : 2].astype(np.int64), row[1 : 2 * count : 2].copy())


def unweighted(tokenizer: Any) -> NDArray[np.int64]:
    """Ids of tokens that have no weight in `lexical`: the special ones around a text, and unknown words."""
    named = (tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id,
             tokenizer.unk_token_id)  # fmt: skip
    return np.array(sorted({one for one in named if one is not None}), dtype=np.int64)


def lexical(
    ids: NDArray[Any], weights: NDArray[np.float32], left_out: NDArray[np.int64], most: int | None = None
) -> SparseVector:
    """Of a text's tokens: of each id its largest weight, where that is above 0. ids, weights: [tokens]. most: entries,
    the largest."""
    kept = (weights > 0) & ~np.isin(ids, left_out)
    indices, places = np.unique(ids[kept], return_inverse=True)
    values = np.zeros(len(indices), dtype=np.float32)
    np.maximum.at(values, places, weights[kept])
    if most is not None and len(values) > most:
        largest = np.sort(np.argsort(-values, kind="stable")[:most])
        indices, values = indices[largest], values[largest]
    return SparseVector(indices.astype(np.int64), values)


def looked_up(ids: NDArray[Any], table: NDArray[np.float32], most: int | None = None) -> SparseVector:
    """Of a text's tokens: of each id its entry of the table [vocab], where that is not 0. most: entries, those farthest
    from 0."""
    indices = np.unique(ids).astype(np.int64)
    indices = indices[table[indices] != 0]
    if most is not None and len(indices) > most:
        indices = np.sort(indices[np.argsort(-np.abs(table[indices]), kind="stable")[:most]])
    return SparseVector(indices, table[indices])


def tokens_kept(ids: NDArray[Any], offsets: NDArray[Any], skipped: NDArray[np.int64], first: bool) -> NDArray[np.bool_]:
    """bool [tokens]: which have a vector. ids: [tokens]; offsets: [texts + 1]; skipped: ids that have none; first:
    whether each text's first token may have one."""
    kept: NDArray[np.bool_] = ~np.isin(ids, skipped)
    if not first:
        kept[offsets[:-1][np.diff(offsets) > 0]] = False
    return kept
