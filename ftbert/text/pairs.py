"""Pairs of texts of which each keeps its first tokens only: a query with documents that are cut before they are paired.
Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ftbert.text.cutting import CHARACTERS, Cutter
from ftbert.text.fast_tokenizer import calls
from ftbert.text.tokens import Tokens, tokens_of

# Any text of at least one token shows where the special ones stand.
_SAMPLE = "a"

Segment = tuple[list[int], list[int]]  # ids and token types


class LimitedPairs:
    """special: tokens that are added to a pair. Thread-safe."""

    def __init__(self, fast: Any, cutter: Cutter | None, has_types: bool) -> None:
        """fast: a `tokenizers.Tokenizer` that does not truncate. has_types: the model reads token types."""
        self._fast, self._cutter, self._has_types = fast, cutter, has_types
        sample = fast.encode(_SAMPLE, _SAMPLE)
        # Each token of the layout: None for a special one, else the text that it is of.
        self._before: Segment = ([], [])
        self._between: Segment = ([], [])
        self._behind: Segment = ([], [])
        self._types = [0, 0]
        part = self._before
        for token, kind, which in zip(sample.ids, sample.type_ids, sample.sequence_ids, strict=True):
            if which is None:
                part[0].append(token)
                part[1].append(kind)
            else:
                part = (self._between, self._behind)[which]
                self._types[which] = kind
        self.special = sum(len(ids) for ids, _ in (self._before, self._between, self._behind))

    def tokens(
        self, pairs: Sequence[tuple[str, str]], length: int, side: str, limits: tuple[int | None, int | None]
    ) -> Tokens:
        """limits: most of its own tokens that each first and each second text keeps; None, of one of them: all. length:
        most tokens of a pair with the special ones; of a longer one the longer text loses tokens first, then both, on
        `side`. Raises what `tokenizers` does."""
        # Of a text without a limit so many that it is still the longer one where it was.
        most = max(length, *(limit or 0 for limit in limits)) + 1
        firsts, seconds = (
            first_ids(
                self._fast, self._cutter, {pair[place] for pair in pairs},
                *((most, side) if limit is None else (limit, "right")),
            )
            for place, limit in enumerate(limits)
        )
        rows, types = list[list[int]](), list[list[int]]()
        for first, second in ((firsts[a], seconds[b]) for a, b in pairs):
            kept = _longest_first(len(first), len(second), length - self.special)
            one, other = _kept(first, kept[0], side), _kept(second, kept[1], side)
            rows.append([*self._before[0], *one, *self._between[0], *other, *self._behind[0]])
            if self._has_types:
                kinds = [[kind] * n for kind, n in zip(self._types, kept, strict=True)]
                types.append([*self._before[1], *kinds[0], *self._between[1], *kinds[1], *self._behind[1]])
        return tokens_of(rows, types if self._has_types else None)


def first_ids(fast: Any, cutter: Cutter | None, texts: Iterable[str], most: int, side: str) -> dict[str, list[int]]:
    """The first `most` tokens of each text, for side "left" the last, without special ones. fast: a
    `tokenizers.Tokenizer` that does not truncate."""
    found: dict[str, list[int]] = {}
    left, size = list(texts), CHARACTERS * most
    while left:
        parts = left if cutter is None else [cutter.part(text, size, side) for text in left]
        rows = [
            encoding.ids for part in calls(parts) for encoding in fast.encode_batch_fast(part, add_special_tokens=False)
        ]
        for text, part, ids in zip(left, parts, rows, strict=True):
            if len(ids) >= most or len(part) == len(text):
                found[text] = _kept(ids, min(most, len(ids)), side)
        left, size = [text for text in left if text not in found], 2 * size
    return found


def _longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """Tokens that are kept of each text, as `tokenizers` truncates a pair: of an odd length the longer one, of equal
    ones the second, gets the token more."""
    if first + second <= most:
        return first, second
    short, half = min(first, second), most // 2
    short, long = (short, most - short) if short <= half else (half, most - half)
    return (long, short) if first > second else (short, long)


def _kept(ids: list[int], most: int, side: str) -> list[int]:
    return ids[len(ids) - most :] if side == "left" else ids[:most]
