"""What answers take in a worker while they are made and sent: how much one may take, and how much all may."""

from __future__ import annotations

from collections.abc import Sequence

from ftbert.server.errors import ApiError
from ftbert.server.messages import Request

# Answers of so many bytes are bounded by the number of requests alone: a bulk answer must not refuse a single text.
_SMALL = 65536
# Of the largest answer, for all that a worker makes and sends at the same time.
_AT_ONCE = 2
# Bytes of a float32 of the model: its JSON, and the number itself in the worker and on the way from the engine.
PER_NUMBER = 13 + 8
# Of an entry of a sparse vector: its id and its weight as numbers, and its JSON.
PER_ENTRY = 2 * 8 + len('{"index":100000,"value":0.12345678},')
# Of what is written from an object for each, as one of /token_classify and /fill_mask: the object and its JSON.
PER_ENTITY = 600
# Of a token of a generated text, as an object and as JSON; as much for each of its alternatives.
PER_TOKEN_WRITTEN = 250
# Of /tokenize. A byte of the longest text, in `tokenizers` (293 of English, 217 of Chinese); of every text, as the
# JSON of a token.
_PER_BYTE_TOKENISED, _PER_BYTE_ANSWERED = 350, 80
# Of /decode: an id of the longest row in `tokenizers`; its text, of every row.
_PER_ID_DECODED, _PER_ID_ANSWERED = 100, 10


class Memory:
    """answer_limit: bytes that one answer may take. Only the event loop's thread calls it."""

    def __init__(self, answer_limit: int) -> None:
        self._limit = answer_limit
        self.held = 0

    def take(self, request: Request, size: int, items: int, name: str) -> None:
        """Until the answer to `request` is sent. size: bytes that it takes, estimated before it is made.

        ApiError 413, with the number of `items` (what it is made of, by name) that would fit; 429 where other answers
        leave no room.
        """
        if size > self._limit:
            words = (
                f"the answer would take {size} bytes of memory, more than {self._limit} (answer-limit): the request "
                f"has {items} {name}, of which about {items * self._limit // size} would fit; send it in parts"
            )
            raise ApiError("Validation", words, status=413)
        if size <= _SMALL:
            return
        if self.held + size > _AT_ONCE * self._limit:
            raise ApiError("Overloaded", "Model is overloaded", retry_after=1.0)
        self.held += size
        request.on_end(lambda: self._release(size))

    def _release(self, size: int) -> None:
        self.held -= size


def filled(offsets: Sequence[int], masks: Sequence[int], words: int) -> int:
    """Bytes that /fill_mask takes: the whole text for each word, `words` for each mask. offsets: [texts + 1], of their
    tokens; masks: [texts]."""
    pairs = zip(masks, offsets, offsets[1:], strict=False)
    return sum(count * words * (PER_ENTITY + _PER_ID_ANSWERED * (stop - start)) for count, start, stop in pairs)


def tokenised(texts: list[str]) -> int:
    """Bytes that /tokenize takes for these texts."""
    sizes = [len(text) if text.isascii() else len(text.encode()) for text in texts]
    return _PER_BYTE_TOKENISED * max(sizes, default=0) + _PER_BYTE_ANSWERED * sum(sizes)


def decoded(rows: list[list[int]]) -> int:
    """Bytes that /decode takes for these ids."""
    sizes = list(map(len, rows))
    return _PER_ID_DECODED * max(sizes, default=0) + _PER_ID_ANSWERED * sum(sizes)
