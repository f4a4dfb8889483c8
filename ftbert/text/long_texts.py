"""Texts of more tokens than the model reads at once: truncated and counted, or read window by window and averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.text.options import TextOptions
from ftbert.text.tokenizer import Tokenizer, with_prompt
from ftbert.text.tokens import Pieces, Text, Tokens

_WHOLE = 1 << 30  # tokens; no text has more


def tokenise(tokenizer: Tokenizer, texts: Sequence[Text], how: TextOptions) -> Tokens:
    """Single texts as `how` says. Tokens.cut counts those of more than how.max_length tokens."""
    if how.long_texts == "mean":
        whole = _read(tokenizer, tokenizer.tokens(texts, how.prompt, _WHOLE))
        return _in_windows(whole, how.max_length, *tokenizer.ends(how.prompt))
    prompt = how.prompt
    if tokenizer.reading is not None:  # counts the characters of both
        texts, prompt = tokenizer.reading.cut(with_prompt(texts, prompt), how.max_length), ""
    # One token more shows which texts are longer.
    found = tokenizer.tokens(texts, prompt, how.max_length + 1)
    over = found.lengths > how.max_length
    if not over.any():
        return _read(tokenizer, found)
    kept = np.ones(len(found.ids), dtype=bool)
    before, behind = tokenizer.ends("")
    if tokenizer.side == "right":
        kept[found.starts[1:][over] - behind - 1] = False
    else:
        kept[found.starts[:-1][over] + before] = False
    starts = np.concatenate([[0], np.cumsum(found.lengths - over)])
    return _read(tokenizer, Tokens(found.ids[kept], starts, cut=int(over.sum())))


def _read(tokenizer: Tokenizer, tokens: Tokens) -> Tokens:
    return tokens if tokenizer.reading is None else tokenizer.reading.kept(tokens)


def _in_windows(whole: Tokens, length: int, before: int, behind: int) -> Tokens:
    """A text that is longer becomes several of at most `length` tokens, each between the text's first `before` and last
    `behind` tokens."""
    rows, counts, own = [], [], []
    room = length - before - behind
    for row in whole.rows():
        inside = row[before : len(row) - behind]
        pieces = [inside[start : start + room] for start in range(0, len(inside), room)] if len(row) > length else []
        rows += [np.concatenate([row[:before], one, row[len(row) - behind :]]) for one in pieces] or [row]
        own += [len(one) for one in pieces] or [1]
        counts.append(max(len(pieces), 1))
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    ids = np.concatenate(rows) if rows else whole.ids
    cut = sum(count > 1 for count in counts)
    return Tokens(ids, starts, cut=cut, pieces=Pieces(np.array(counts, np.int64), np.array(own, np.int64)))


@dataclass(frozen=True)
class Average:
    """What becomes of the windows' vectors. width: of those."""

    width: int
    how: TextOptions

    def pooling(self) -> TextOptions:
        """How a window is pooled: neither normalised nor truncated."""
        return replace(self.how, normalize=False, normalize_whole=False, truncate_dim=None, width=self.width)

    def __call__(self, vectors: NDArray[np.float32], pieces: Pieces) -> NDArray[np.float32]:
        """float32 [windows, self.width] -> [texts, how.width]: of each text the mean of its windows, weighted by their
        own tokens, then normalised and truncated as how says."""
        made = vectors
        if len(pieces.own) > len(pieces.counts):
            first = np.cumsum(pieces.counts) - pieces.counts
            sums = np.add.reduceat(vectors * pieces.own[:, None].astype(np.float64), first)
            made = (sums / np.add.reduceat(pieces.own, first)[:, None]).astype(np.float32)
            alone = pieces.counts == 1
            made[alone] = vectors[first[alone]]
        found: Any = torch.from_numpy(made)
        if self.how.normalize_whole:
            found = torch.nn.functional.normalize(found)
        found = found[:, : self.how.width]
        return (torch.nn.functional.normalize(found) if self.how.normalize else found).numpy()  # type: ignore[no-any-return]
