"""Token ids to packed batches: sorted by length within a window, cut so that a batch fills a budget of tokens.

Nothing here knows what the batches are computed for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ftbert.text.tokens import Pieces, Text, Tokens

T = TypeVar("T")

# A window is sorted and packed as a whole. The first is small so that computing starts at once, and
# they grow to a size at which the half-filled last batch of a window no longer counts.
_FIRST_WINDOW, _LARGEST_WINDOW = 512, 8192


@dataclass
class Window(Generic[T]):
    """Texts that are sorted and packed together. item: what the caller gave with them. batches: made of them. cut,
    pieces: as in `Tokens`."""

    item: T
    texts: int
    batches: int
    cut: int = 0
    pieces: Pieces | None = None


@dataclass
class Batch:
    """Texts as one packed sequence of tokens, for Model.forward_packed and logits_packed."""

    ids: NDArray[np.int64]  # [tokens]
    cu_seqlens: NDArray[np.int32]  # [texts + 1]
    longest: int  # tokens of the longest text
    rows: NDArray[np.int64]  # [texts]: the texts' positions in the window
    types: NDArray[np.int64] | None = None  # [tokens]: token types; None: all 0
    marks: Sequence[Any] | None = None  # [texts], as of `Tokens`


def windows_of(texts: Sequence[Text]) -> Iterator[tuple[slice, Sequence[Text]]]:
    """Windows of a list, with the places of their texts in it."""
    start, size = 0, _FIRST_WINDOW
    while start < len(texts):
        where = slice(start, min(start + size, len(texts)))
        yield where, texts[where]
        start, size = where.stop, min(2 * size, _LARGEST_WINDOW)


def batches_of(
    windows: Iterable[tuple[T, Tokens]], max_tokens: int, batch_size: int | None = None
) -> Iterator[Window[T] | Batch]:
    """Each window's header, then its batches. windows: (item, tokens)."""
    for item, tokens in windows:
        lengths = tokens.lengths
        order = np.argsort(-lengths, kind="stable")
        # Longest first: the batch that needs the most memory comes first, and neighbours are alike.
        runs = list(by_token_budget(order, lengths, max_tokens, batch_size))
        yield Window(item, len(tokens), len(runs), tokens.cut, tokens.pieces)
        for rows in runs:
            yield pack(tokens, rows)


def by_token_budget(
    order: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int, batch_size: int | None = None
) -> Iterator[NDArray[np.int64]]:
    """`order` cut into runs of at most `max_tokens` tokens and `batch_size` texts, at least one text each."""
    most = len(order) if batch_size is None else batch_size
    ends = np.cumsum(lengths[order])
    start, before = 0, 0
    while start < len(order):
        end = int(np.searchsorted(ends, before + max_tokens, side="right"))
        end = max(start + 1, min(end, start + most))
        yield order[start:end]
        start, before = end, int(ends[end - 1])


def pack(tokens: Tokens, rows: NDArray[np.int64]) -> Batch:
    """The texts `rows` of `tokens` as one batch, in that order."""
    lengths = tokens.lengths[rows]
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    # Of each token of the batch the place among all tokens.
    places = np.repeat(tokens.starts[rows] - cu_seqlens[:-1], lengths) + np.arange(cu_seqlens[-1])
    types = None if tokens.types is None else tokens.types[places]
    marks = None if tokens.marks is None else [tokens.marks[row] for row in rows.tolist()]
    return Batch(tokens.ids[places], cu_seqlens, int(lengths.max(initial=0)), rows, types, marks)
