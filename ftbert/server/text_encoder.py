"""Texts to token ids in a worker, without torch or transformers: the engine sent the tokenizer's file."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ftbert.server.description import Description
from ftbert.server.errors import ApiError, validation
from ftbert.server.long_texts import Cutter

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class Encoded:
    """Texts of a request. ids: int32 [tokens]; offsets: int64 [texts + 1]; skip, types: as of work.Work."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    characters: int
    skip: NDArray[np.int32] | None = None
    types: NDArray[np.uint8] | None = None

    @property
    def tokens(self) -> int:
        return int(self.offsets[-1])


class TextEncoder:
    """Thread-safe; calls release the GIL while they tokenise."""

    def __init__(self, description: Description) -> None:
        self.about = description
        self.whole = self._make(None, "right")  # never truncates
        self._cutter = Cutter(self.whole, description.max_length)
        self._truncating: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._skips: dict[str, int] = {}

    def encode(self, inputs: Sequence[str | list[int]], prompt: str, truncate: bool, side: str) -> Encoded:
        """`prompt` stands before texts, not before ids, which are taken as they are. ApiError 422: too long and not to
        be truncated, or an id outside the vocabulary."""
        texts = [prompt + one for one in inputs if isinstance(one, str)]
        found = iter(self._rows(texts, truncate, side))
        rows = [next(found) if isinstance(one, str) else self._given(one, truncate, side) for one in inputs]
        encoded = _packed(rows, sum(map(len, texts)))
        if prompt and not self.about.include_prompt:
            skip = self._prompt_tokens(prompt)
            encoded.skip = np.array([skip if isinstance(one, str) else 0 for one in inputs], dtype=np.int32)
        return encoded

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], truncate: bool, side: str) -> Encoded:
        """Two texts of one sequence each, the longer cut first."""
        cut = [(one, self._cutter.second(one, other, side)) for one, other in pairs]
        encodings = self._encode(cut, truncate, side)
        encoded = _packed([encoding.ids for encoding in encodings], sum(len(a) + len(b) for a, b in pairs))
        if self.about.token_types > 1:
            types = [encoding.type_ids for encoding in encodings]
            encoded.types = np.fromiter(chain.from_iterable(types), dtype=np.uint8, count=encoded.tokens)
        return encoded

    def _rows(self, texts: list[str], truncate: bool, side: str) -> list[list[int]]:
        length = self.about.max_length
        short = [self._cutter.cut(text, side) for text in texts]
        rows = [encoding.ids for encoding in self._encode(short, truncate, side)]
        for i, (text, part) in enumerate(zip(texts, short, strict=True)):
            size = self._cutter.size
            while len(part) < len(text) and len(rows[i]) < length:  # the part had fewer tokens than wanted
                size *= 2
                longer = self._cutter.cut(text, side, size)
                if len(longer) > len(part):
                    part = longer
                    rows[i] = self._encode([part], truncate, side)[0].ids
        return rows

    def _encode(self, inputs: list[Any], truncate: bool, side: str) -> list[Any]:
        try:
            found: list[Any] = self._tokenizer(side).encode_batch_fast(inputs)
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more precise
            raise ApiError("Tokenizer", f"Tokenization error: {type(error).__name__}") from None
        if not truncate:
            for encoding in found:
                if encoding.overflowing:
                    raise self._too_long(None)
        return found

    def _given(self, ids: list[int], truncate: bool, side: str) -> list[int]:
        if not ids:
            raise validation("`inputs` cannot be empty")
        if min(ids) < 0 or max(ids) >= self.about.vocab:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise validation(
                f"token id {str(bad)[:20]} is outside the model's vocabulary of {self.about.vocab}. Ids must be those "
                "of this model's tokenizer; with langchain-openai set check_embedding_ctx_length=False to send text",
                param="input",
            )
        length = self.about.max_length
        if len(ids) <= length:
            return ids
        if not truncate:
            raise self._too_long(len(ids))
        return ids[-length:] if side == "left" else ids[:length]

    def _too_long(self, given: int | None) -> ApiError:
        shown = "more" if given is None else str(given)
        return validation(f"`inputs` must have less than {self.about.max_length + 1} tokens. Given: {shown}")

    def _prompt_tokens(self, prompt: str) -> int:
        if (known := self._skips.get(prompt)) is None:
            ids = self._tokenizer("right").encode(prompt).ids
            known = len(ids) - (len(ids) > 0 and ids[-1] in self.about.special_ids)
            self._skips[prompt] = known
        return known

    def _tokenizer(self, side: str) -> Any:
        with self._lock:
            if (found := self._truncating.get(side)) is None:
                found = self._truncating[side] = self._make(self.about.max_length, side)
            return found

    def _make(self, length: int | None, side: str) -> Any:
        from tokenizers import Tokenizer

        made: Any = Tokenizer.from_str(self.about.tokenizer)
        made.encode_special_tokens = self.about.encode_special_tokens
        if length is not None:
            made.enable_truncation(length, direction=side)
        return made


def _packed(rows: list[list[int]], characters: int) -> Encoded:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)), out=offsets[1:])
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return Encoded(ids, offsets, characters)
