"""Texts, or pairs of texts, as token ids without padding."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ftbert.input_file import is_unicode

# What is tokenised as one sequence: a text, or two that a model reads together (a query and a document).
Text: TypeAlias = "str | Sequence[str]"


@dataclass(frozen=True)
class Pieces:
    """Which sequences are parts of one text."""

    counts: NDArray[np.int64]  # [texts]: sequences of each, in turn
    own: NDArray[np.int64]  # [sequences]: tokens of the text itself, without special ones and prompt


@dataclass(frozen=True)
class Tokens:
    """The tokens of several texts, one after the other. cut: texts that were longer than a sequence may be. pieces:
    None where each text is one sequence; else what is said of texts here holds for sequences."""

    ids: NDArray[np.int64]  # [tokens]
    starts: NDArray[np.int64]  # [texts + 1]: where each text begins, and the end
    types: NDArray[np.int64] | None = None  # [tokens]; None: all 0
    cut: int = 0
    pieces: Pieces | None = None
    marks: Sequence[Any] | None = None  # [texts]: what goes with each into its batch

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[texts]: tokens of each text."""
        return self.starts[1:] - self.starts[:-1]  # of one text 0.4 us; np.diff takes 1.1

    def rows(self) -> list[NDArray[np.int64]]:
        """The ids of each text, int64 [tokens]; views."""
        ends = self.starts.tolist()
        return [self.ids[start:end] for start, end in zip(ends, ends[1:], strict=False)]

    def type_rows(self) -> list[NDArray[np.int64]]:
        """The token types of each text, as `rows`."""
        types = np.zeros_like(self.ids) if self.types is None else self.types
        return replace(self, ids=types).rows()

    def check(self, vocab: int, token_types: int) -> Tokens:
        """These tokens; ValueError for an id outside the model's tables, of which these are the numbers of rows. A
        model without a table of token types is given none.

        Checked here, where the ids are on the host anyway: on a GPU a check would mean waiting for it.
        """
        if self.ids.size and self.ids.max() >= vocab:
            raise ValueError(
                f"the tokenizer gave id {self.ids.max()}, but the model's vocabulary has {vocab} entries; "
                "the tokenizer in the folder belongs to another model, or got tokens that the model has no rows for"
            )
        if self.types is not None and not token_types:
            return replace(self, types=None)
        if self.types is not None and self.types.size and self.types.max() >= token_types:
            raise ValueError(
                f"the tokenizer gave token type {self.types.max()}, but the model knows {token_types}; "
                "it was not made for pairs of texts"
            )
        return self


def tokens_of(rows: Sequence[list[int]], types: Sequence[list[int]] | None = None) -> Tokens:
    """Lists of ids, one a text, as `Tokens`. types: token types of the same shape."""
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(list(map(len, rows)), out=starts[1:])
    return Tokens(_flat(rows), starts, None if types is None else _flat(types))


def expanded(tokens: Tokens, token: int, length: int, attend: bool) -> Tokens:
    """Each text, brought to `length` tokens by this one. Without `attend` its mark is how many are attended to."""
    rows = tokens.rows()
    made = tokens_of([[*row.tolist(), *[token] * (length - len(row))] for row in rows])
    return made if attend else replace(made, marks=[len(row) for row in rows])


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The texts of all parts in turn."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return tokens_of([])
    offsets = np.cumsum([0, *(len(part.ids) for part in parts)])
    starts = np.concatenate([[0], *(part.starts[1:] + at for part, at in zip(parts, offsets, strict=False))])
    types = None
    if any(part.types is not None for part in parts):
        types = np.concatenate([np.zeros_like(part.ids) if part.types is None else part.types for part in parts])
    cut, pieces = sum(part.cut for part in parts), None
    if split := [part.pieces for part in parts if part.pieces is not None]:  # all of them, or none
        pieces = Pieces(np.concatenate([one.counts for one in split]), np.concatenate([one.own for one in split]))
    return Tokens(np.concatenate([part.ids for part in parts]), starts, types, cut, pieces)


def listed(items: Any, pairs: bool = False) -> Sequence[Any]:
    """`items` as a list, or as the list or tuple that it is: a column of pandas, pyarrow, polars or numpy, an iterator,
    any other sequence; with `pairs` a numpy array [n, 2] too. TypeError for what has no one order of items: a str,
    bytes, a dict, a set, a table."""
    if isinstance(items, list | tuple):
        return items
    axes = getattr(items, "ndim", len(getattr(items, "shape", (0,))))
    several = axes != 1 and not (pairs and isinstance(items, np.ndarray) and axes == 2)
    iterable = hasattr(items, "__iter__") or (hasattr(items, "__getitem__") and hasattr(items, "__len__"))
    if isinstance(items, str | bytes | Mapping | Set) or several or not iterable:
        hint = "; pass one of its columns" if several and hasattr(items, "columns") else ""
        raise TypeError(f"texts must be a list of str; got {type(items).__name__}{hint}")
    for method in ("to_pylist", "tolist", "to_list"):  # pyarrow; pandas and numpy; polars: Python's own values at once
        if hasattr(items, method):
            return list(getattr(items, method)())
    return list(items)


def check_texts(texts: Sequence[Any], pairs: bool = False) -> None:
    """TypeError for an item that is no str (nor, with `pairs`, a pair of them), ValueError for a str with a lone
    surrogate; both name the item. texts: as `listed`."""
    if set(map(type, texts)) <= {str} and all(map(str.isascii, texts)):
        return  # nearly all, at the speed of C
    for index, text in enumerate(texts):
        if pairs and isinstance(text, list | tuple | np.ndarray):
            _check_pair(text, f"texts[{index}]")
        else:
            _check_text(text, f"texts[{index}]", " or a pair of str" if pairs and not isinstance(text, dict) else "")


def is_single(texts: Any) -> bool:
    """A str, or a tuple of two: one text or pair, where a list would be several."""
    return isinstance(texts, str) or (
        isinstance(texts, tuple) and len(texts) == 2 and all(isinstance(text, str) for text in texts)
    )


def has_pairs(texts: Any) -> bool:
    """Whether some of these texts, or this one, are pairs."""
    if is_single(texts):
        return not isinstance(texts, str)
    return hasattr(texts, "__iter__") and not set(map(type, texts)) <= {str}


def _check_pair(pair: Any, name: str) -> None:
    if len(pair) != 2:
        raise TypeError(f"{name} must be a str or a pair of str; got {len(pair)} items. Convert it, or leave it out")
    for place, text in enumerate(pair):
        _check_text(text, f"{name}[{place}]")


def _check_text(text: Any, name: str, more: str = "") -> None:
    if not isinstance(text, str):
        missing = isinstance(text, float) and text != text
        got = f"{type(text).__name__}{' (NaN, a missing value)' if missing else ''}"
        raise TypeError(f"{name} must be a str{more}; got {got}. Convert it, or leave it out")
    if not is_unicode(text):
        raise ValueError(f"{name} is not valid Unicode: it holds a lone surrogate. Decode it again")


def _flat(rows: Sequence[list[int]]) -> NDArray[np.int64]:
    """A third of the time of an array a row, where texts are short."""
    flat = array("q")
    for row in rows:
        flat.fromlist(row)
    return np.frombuffer(flat, dtype=np.int64) if flat else np.empty(0, dtype=np.int64)
