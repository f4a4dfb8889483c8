"""Texts, or pairs of texts, as token ids without padding."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ftbert.input_file import is_unicode

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What is tokenised as one sequence: a text, or two that a model reads together (a query and a document).
Text: TypeAlias = "str | Sequence[str]"


@dataclass(frozen=True)
class Tokens:
    """The tokens of several texts, one after the other."""

    ids: NDArray[np.int64]  # [tokens]
    starts: NDArray[np.int64]  # [texts + 1]: where each text begins, and the end
    types: NDArray[np.int64] | None = None  # [tokens]; None: all 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[texts]: tokens of each text."""
        return np.diff(self.starts)

    def rows(self) -> list[NDArray[np.int64]]:
        """The ids of each text, int64 [tokens]; views."""
        ends = self.starts.tolist()
        return [self.ids[start:end] for start, end in zip(ends, ends[1:], strict=False)]

    def check(self, vocab: int, token_types: int) -> Tokens:
        """These tokens; ValueError for an id outside the model's tables, of which these are the numbers of rows. A
        model without a table of token types is given none.

        Checked here, where the ids are on the host anyway: on a GPU a check would mean waiting for it.
        """
        if self.ids.size and self.ids.max() >= vocab:
            raise ValueError(
                f"the tokenizer gave id {self.ids.max()}, but the model's vocabulary has {vocab} entries; "
                "the tokenizer in the folder belongs to another model"
            )
        if self.types is not None and not token_types:
            return Tokens(self.ids, self.starts)
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
    return Tokens(np.concatenate([part.ids for part in parts]), starts, types)


def check_texts(texts: Any, pairs: bool = False) -> None:
    """TypeError for what is no sequence of str (or, with `pairs`, of str and pairs of them), ValueError for a str with
    a lone surrogate; both name the item."""
    table = getattr(texts, "ndim", 1) != 1  # the items of a data frame are its columns' names, its length is another
    table = table and not (pairs and isinstance(texts, np.ndarray) and texts.ndim == 2)
    if isinstance(texts, (bytes, dict)) or table or not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
        raise TypeError(f"texts must be a str or a list of str; got {type(texts).__name__}")
    if set(map(type, texts)) <= {str} and all(map(str.isascii, texts)):
        return  # nearly all, at the speed of C
    for index, text in enumerate(texts):
        if pairs and not isinstance(text, str | bytes | dict):
            _check_pair(text, f"texts[{index}]")
        else:
            _check_text(text, f"texts[{index}]")


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
    if not isinstance(pair, list | tuple | np.ndarray) or len(pair) != 2:
        shown = f"{len(pair)} items" if isinstance(pair, list | tuple | np.ndarray) else type(pair).__name__
        raise TypeError(f"{name} must be a str or a pair of str; got {shown}. Convert it, or leave it out")
    for place, text in enumerate(pair):
        _check_text(text, f"{name}[{place}]")


def _check_text(text: Any, name: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str; got {type(text).__name__}. Convert it, or leave it out")
    if not is_unicode(text):
        raise ValueError(f"{name} is not valid Unicode: it holds a lone surrogate. Decode it again")


def _flat(rows: Sequence[list[int]]) -> NDArray[np.int64]:
    """A third of the time of an array a row, where texts are short."""
    flat = array("q")
    for row in rows:
        flat.fromlist(row)
    return np.frombuffer(flat, dtype=np.int64) if flat else np.empty(0, dtype=np.int64)
