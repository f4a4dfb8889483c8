"""Texts to packed batches by a token budget: sorted by length within a window, cut so that a batch fills the budget."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ftbert.text.options import TextOptions
from ftbert.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

# A window is sorted and packed as a whole. The first is small so that computing starts at once, and
# they grow to a size at which the half-filled last batch of a window no longer counts.
_FIRST_WINDOW, _LARGEST_WINDOW = 512, 8192


@dataclass
class Window(Generic[T]):
    """Texts that are sorted and packed together. item: what the caller gave with them. batches: made of them."""

    item: T
    texts: int
    batches: int


@dataclass
class Batch:
    """Texts as one packed sequence of tokens, for Model.forward_packed."""

    ids: NDArray[np.int64]  # [tokens]
    cu_seqlens: NDArray[np.int32]  # [texts + 1]
    longest: int  # tokens of the longest text
    rows: NDArray[np.int64]  # [texts]: the texts' positions in the window
    pooled: PooledTokens | None  # None: all tokens are pooled


@dataclass
class PooledTokens:
    """The tokens of a batch that are pooled, where the prompt's are not."""

    tokens: NDArray[np.int64]  # [pooled tokens]: their positions among the batch's tokens
    cu_seqlens: NDArray[np.int32]  # [texts + 1]


def windows_of(texts: Sequence[str]) -> Iterator[tuple[slice, Sequence[str]]]:
    """Windows of a list, with the places of their texts in it."""
    start, size = 0, _FIRST_WINDOW
    while start < len(texts):
        where = slice(start, min(start + size, len(texts)))
        yield where, texts[where]
        start, size = where.stop, min(2 * size, _LARGEST_WINDOW)


def batches_of(
    windows: Iterable[tuple[T, Sequence[str]]], tokenizer: Tokenizer, vocab: int, how: TextOptions
) -> Iterator[Window[T] | Batch]:
    """Each window's header, then its batches. windows: (item, texts). vocab: rows of the model's word table."""
    for item, texts in windows:
        encoded = tokenizer.encode_batch(texts, how.prompt, how.max_length)
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        order = np.argsort(-lengths, kind="stable")
        # Longest first: the batch that needs the most memory comes first, and neighbours are alike.
        batches = [
            pack(encoded, lengths, rows, vocab, how)
            for rows in by_token_budget(order, lengths, how.max_tokens, how.batch_size)
        ]
        yield Window(item, len(texts), len(batches))
        yield from batches


def by_token_budget(
    order: NDArray[np.int64], lengths: NDArray[np.int64], max_tokens: int, batch_size: int | None
) -> Iterator[NDArray[np.int64]]:
    """`order` cut into runs of at most `max_tokens` tokens and `batch_size` texts, at least one text each."""
    most = len(order) if batch_size is None else batch_size
    start, filled = 0, 0
    for end, row in enumerate(order):
        if end > start and (filled + lengths[row] > max_tokens or end - start == most):
            yield order[start:end]
            start, filled = end, 0
        filled += lengths[row]
    if start < len(order):
        yield order[start:]


def pack(
    encoded: list[NDArray[np.int64]],
    lengths: NDArray[np.int64],
    rows: NDArray[np.int64],
    vocab: int,
    how: TextOptions,
) -> Batch:
    """The texts `rows` as one batch. encoded: ids of each text; lengths: theirs. ValueError: an id outside `vocab`."""
    ids = np.concatenate([encoded[row] for row in rows])
    # Checked here, where the ids are on the host anyway: on a GPU a check would mean waiting for it.
    if ids.size and ids.max() >= vocab:
        raise ValueError(
            f"the tokenizer gave id {ids.max()}, but the model's vocabulary has {vocab} entries; "
            "the tokenizer in the folder belongs to another model"
        )
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths[rows], out=cu_seqlens[1:])
    pooled = _without_prompt(cu_seqlens, how) if how.unpooled_tokens else None
    return Batch(ids, cu_seqlens, int(lengths[rows].max()), rows, pooled)


def _without_prompt(cu_seqlens: NDArray[np.int32], how: TextOptions) -> PooledTokens:
    lengths = np.diff(cu_seqlens)
    places = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    kept = places >= how.unpooled_tokens
    if how.pooling == "cls":  # the first token where nothing is behind the prompt
        kept |= np.repeat(lengths <= how.unpooled_tokens, lengths) & (places == 0)
    before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return PooledTokens(np.flatnonzero(kept), before[cu_seqlens])
