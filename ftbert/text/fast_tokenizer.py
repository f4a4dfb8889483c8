"""Texts to token ids by the package `tokenizers`, or faster where the ids are the same. Imports no torch."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ftbert.text.cutting import CHARACTERS, Cutter
from ftbert.text.panics import panics_as_errors
from ftbert.text.seats import seat_of_this_thread
from ftbert.text.tokens import Tokens, tokens_of
from ftbert.text.wordpiece import WordPiece

# The tokenizer's own result keeps strings, offsets and the truncated rest: about 100 bytes a token.
# Handing it this much at a time bounds that; one call is still long enough to use every core.
_CHARACTERS_PER_CALL = 1 << 20

# Maximum lengths in use at once; each has a tokenizer of its own, since the length is part of it.
_LENGTHS_KEPT = 4


class FastTokenizer:
    """Long texts are cut before they are tokenised, single ones go to `WordPiece` where it can. Thread-safe.

    cutter: None where nothing can be cut. wordpiece: None where `tokenizers` does it all.
    """

    def __init__(self, fast: Any, has_types: bool) -> None:
        """fast: a `tokenizers.Tokenizer`; it is changed to neither pad nor truncate. has_types: the model reads token
        types, which are given for pairs."""
        # tokenizer.json may carry both, and they belong to whoever saved it, not to this model.
        fast.no_padding()
        fast.no_truncation()
        self._special_of_pairs = fast.num_special_tokens_to_add(True)
        self.cutter = Cutter.of(fast)
        self.wordpiece = WordPiece.of(fast)
        self._fast, self._has_types = fast, has_types
        self._lock = threading.Lock()
        self._by_length: dict[tuple[int, str], Any] = {}

    @property
    def is_wordpiece(self) -> bool:
        """Whether the package nanotoken, where it is installed, may do it."""
        return type(self._fast.model).__name__ == "WordPiece"

    def stored(self) -> tuple[str, bool, bool]:
        """What `from_stored` makes the same tokenizer of."""
        return self._fast.to_str(), self._fast.encode_special_tokens, self._has_types

    @classmethod
    def from_stored(cls, json: str, encode_special_tokens: bool, has_types: bool) -> FastTokenizer:
        """json: a tokenizer.json's text, which does not hold `encode_special_tokens`."""
        from tokenizers import Tokenizer

        fast: Any = Tokenizer.from_str(json)
        fast.encode_special_tokens = encode_special_tokens
        return cls(fast, has_types)

    def tokens(self, texts: Sequence[Any], length: int, side: str) -> Tokens:
        """Of each str, or pair of them as a tuple. side: "right" or "left", where tokens beyond `length` are dropped.
        Raises what `tokenizers` does, UnicodeError for a lone surrogate."""
        seat = seat_of_this_thread()
        found = None if seat is None else seat.tokens(self, texts, length, side)
        return self._tokens_here(texts, length, side) if found is None else found

    def _tokens_here(self, texts: Sequence[Any], length: int, side: str) -> Tokens:
        pairs = not all(isinstance(text, str) for text in texts)
        given, cut = self._cut(texts, length, side)
        if not pairs and not cut:
            return self._singles(given, length, side)
        rows, types = self._rows(given, length, side, pairs)
        while cut:
            # Exact once the length is reached: what was cut off comes behind the tokens that are kept.
            cut = [place for place in cut if len(rows[place]) < length]
            for place in cut:
                given[place] = self._part(texts[place], 2 * len(given[place]), side)
            for place, row in zip(cut, self._rows([given[place] for place in cut], length, side)[0], strict=True):
                rows[place] = row
                if types is not None:
                    types[place] = [0] * len(row)  # a single text among pairs
            cut = [place for place in cut if len(given[place]) < len(texts[place])]
        return tokens_of(rows, types)

    def encodings(self, texts: Sequence[str], length: int, side: str) -> list[Any]:
        """As `tokens`, what `tokenizers` gives for each text: with the offsets of its tokens."""
        fast, given = self._truncating(length, side), list(texts)
        if self.cutter is not None and side == "right":  # cut on the left, offsets would be of what is left
            given = [self._part(text, CHARACTERS * length, side) for text in texts]
        with panics_as_errors():
            found = [encoding for part in calls(given) for encoding in fast.encode_batch(part)]
        for place, text in enumerate(texts):
            while len(given[place]) < len(text) and len(found[place]) < length:
                given[place] = self._part(text, 2 * len(given[place]), side)
                (found[place],) = fast.encode_batch([given[place]])  # `encode` keeps other threads waiting
        return found

    def _singles(self, texts: Sequence[str], length: int, side: str) -> Tokens:
        if self.wordpiece is not None:
            return self.wordpiece.tokens(texts, length, side)
        return tokens_of(self._encoded(texts, length, side, False)[0])

    def _rows(
        self, texts: Sequence[Any], length: int, side: str, pairs: bool = False
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        if not pairs and self.wordpiece is not None:
            return [row.tolist() for row in self.wordpiece.tokens(texts, length, side).rows()], None
        return self._encoded(texts, length, side, pairs and self._has_types)

    def _encoded(
        self, texts: Sequence[Any], length: int, side: str, with_types: bool
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Lists are made under Python's lock, which the threads that feed GPUs wait for: none that nobody reads."""
        fast = self._truncating(length, side)
        rows: list[list[int]] = []
        types: list[list[int]] = []
        for part in calls(texts):
            # _fast: the same ids, without the character offsets.
            with panics_as_errors():
                encodings = fast.encode_batch_fast(part)
            rows += [encoding.ids for encoding in encodings]
            if with_types:
                types += [encoding.type_ids for encoding in encodings]
        return rows, types if with_types else None

    def _cut(self, texts: Sequence[Any], length: int, side: str) -> tuple[list[Any], list[int]]:
        """What to tokenise of each text, and the places of the single ones that are not whole."""
        given, cut, most = list(texts), list[int](), CHARACTERS * length
        if self.cutter is None or max(_sizes(given), default=0) <= most:
            return given, cut
        for place, text in enumerate(given):
            if not isinstance(text, str):
                given[place] = self._cut_pair(text, length, most, side)
            elif len(text) > most:
                given[place] = self._part(text, most, side)
                if len(given[place]) < len(text):
                    cut.append(place)
        return given, cut

    def _cut_pair(self, pair: Sequence[str], length: int, most: int, side: str) -> tuple[str, str]:
        """Parts of a pair that are truncated as the whole pair is. The longer text is truncated first, then both to
        halves; of an odd length the longer one gets the token more. (Long texts are not only slow: `tokenizers` makes
        every pair of their truncated rests as well.)
        """
        parts = [text if len(text) <= most else self._part(text, most, side) for text in pair]
        if [*pair] == parts:
            return pair[0], pair[1]

        count = functools.cache(self._count)  # of texts: whole ones, and parts as they grow

        def grow(place: int) -> None:
            parts[place] = self._part(pair[place], 2 * len(parts[place]), side)

        for place in (0, 1):
            while len(parts[place]) < len(pair[place]) and count(parts[place]) <= length:
                grow(place)
        if (length - self._special_of_pairs) % 2 and min(map(count, parts)) > length:
            longer = 0 if count(pair[0]) > count(pair[1]) else 1
            while (count(parts[0]) > count(parts[1])) != (longer == 0):
                grow(longer)
        return parts[0], parts[1]

    def _count(self, text: str) -> int:
        """Tokens without the special ones."""
        return len(self._fast.encode_batch_fast([text], add_special_tokens=False)[0])

    def _part(self, text: str, size: int, side: str) -> str:
        return text if self.cutter is None else self.cutter.part(text, size, side)

    def _truncating(self, length: int, side: str) -> Any:
        """A `tokenizers.Tokenizer` for this length: setting it in one that another thread uses would change both."""
        with self._lock:
            found = self._by_length.get((length, side))
            if found is None:
                found = copy.deepcopy(self._fast)
                found.encode_special_tokens = self._fast.encode_special_tokens  # the copy is of what a file holds
                found.enable_truncation(length, direction=side)
                while len(self._by_length) >= _LENGTHS_KEPT:
                    del self._by_length[next(iter(self._by_length))]
                self._by_length[length, side] = found
            return found


def _sizes(texts: list[Any]) -> list[int]:
    """Characters of each text, of a pair those of the longer one."""
    if set(map(type, texts)) <= {str}:
        return list(map(len, texts))
    return [len(text) if isinstance(text, str) else max(map(len, text)) for text in texts]


def calls(texts: Sequence[Any]) -> Iterator[list[Any]]:
    """`texts` in parts of at most _CHARACTERS_PER_CALL, at least one text each."""
    sizes = _sizes(list(texts))
    start, total = 0, 0
    if sum(sizes) > _CHARACTERS_PER_CALL:
        for place, size in enumerate(sizes):
            if place > start and total + size > _CHARACTERS_PER_CALL:
                yield list(texts[start:place])
                start, total = place, 0
            total += size
    yield list(texts[start:])
