"""What workers ask of engines: the texts of one request, as token ids, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ftbert.server.memory import PER_ENTITY, PER_ENTRY, PER_NUMBER, PER_TOKEN_WRITTEN

BEST = 100  # what may stand in the place of a masked token; of a smaller vocabulary fewer
TEXTS = 128  # that one request may have written
ENTRIES = 4096  # of a sparse vector, the largest: trained models give some hundred


def _bytes_of_labels(about: Any) -> int:
    labels = about.scores.labels
    return PER_NUMBER * len(labels) + sum(map(len, labels)) + len(labels) * len('{"score":,"label":""},')


class Kind(IntEnum):
    """What is computed of a text. One batch has one kind; WRITTEN is the writer's (writer.py), which knows no batches.

    rows_of: what has a row of the result, "texts", "tokens" or "masks". method: of `Compute`, which computes the rows.
    bytes_of: by the model's Description, what the answer for a row takes, as numbers and as JSON.
    """

    rows_of: str
    method: str
    bytes_of: Callable[[Any], int]

    def __new__(cls, value: int, rows_of: str, method: str, bytes_of: Callable[[Any], int]) -> Kind:
        made = int.__new__(cls, value)
        made._value_, made.rows_of, made.method, made.bytes_of = value, rows_of, method, bytes_of
        return made

    # The pooled vector as it is, through Dense modules, [width].
    EMBED = 0, "texts", "pooled", lambda about: PER_NUMBER * about.model.hidden
    # The last hidden state, [tokens, hidden].
    TOKENS = 1, "tokens", "states", lambda about: PER_NUMBER * about.model.token_width
    # Of the sequence classification head, [labels].
    LOGITS = 2, "texts", "logits", _bytes_of_labels
    # Of the token classification head, [tokens, labels].
    TOKEN_LOGITS = 3, "tokens", "token_logits", lambda about: PER_NUMBER * len(about.scores.labels) + PER_ENTITY
    # Of each marked token the best of the vocabulary: [marked, 2 * BEST], probabilities, then ids.
    FILLED = 4, "masks", "filled", lambda about: PER_NUMBER * 2 * BEST
    # Ids and weights in turn, [2 * entries], at most 2 * ENTRIES and 0 behind the last.
    SPARSE = 5, "texts", "sparse_vectors", lambda about: PER_ENTRY * min(ENTRIES, about.model.vocab)
    # Of each token for its own entry, [tokens, 1].
    WEIGHTS = 6, "tokens", "weights", lambda about: PER_ENTRY
    # Of each token, through a folder's Dense modules, [tokens, width].
    VECTORS = 7, "tokens", "vectors", lambda about: PER_NUMBER * about.model.token_width
    # Of each part of a text, pooled as a text is, [width]; `marked` are the first tokens of parts, a text's first too.
    CHUNKS = 8, "masks", "chunks", lambda about: PER_NUMBER * about.model.hidden
    # MaxSim of the job's query with each text, [1].
    SIMILARITIES = 9, "texts", "similarities", lambda about: PER_NUMBER
    # Tokens that follow a prompt, as they come: `Written` instead of rows.
    WRITTEN = 10, "tokens", "", lambda about: PER_TOKEN_WRITTEN


class Writing(msgspec.Struct, frozen=True, array_like=True):
    """How a text goes on after its prompt, by the names of Model.generate. None: as the model's folder says.

    logprobs: of so many tokens beside each chosen one; None: of none.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_new_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None


class WrittenToken(NamedTuple):
    """logprob: of the model's own logits, None where not asked for. top: the most likely ids and theirs."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Written(NamedTuple):
    """How the text of a request goes on. end: "" where more follows, "eos" behind the token `last`, which is no part of
    the text, or "length". cached: tokens of the prompt that were there already. queue: seconds until the prompt's turn
    came, and computing was begun."""

    id: int
    tokens: list[WrittenToken]
    end: str = ""
    last: WrittenToken | None = None
    cached: int = 0
    queue: float = 0.0


@dataclass(eq=False, slots=True)
class Job:
    """All texts of one request.

    ids: int32 [tokens] of all texts; offsets: int64 [texts + 1], each text's place in them. skip: int32 [texts],
    tokens at the beginning of each text that are not pooled, or None. types: uint8 [tokens] or None for zeros.
    adapter: of the model's tasks, counted from 1; 0: the weights as they were loaded.
    marked: int32, places in ids, of Kind.FILLED and CHUNKS. targets: int32, at most BEST ids which alone are asked
    for, or None. keys: int32 [texts], tokens of each text that are attended to, or None: all. query: float32
    [vectors, width], of Kind.SIMILARITIES. writing: of Kind.WRITTEN, whose only text is the prompt. deadline: by
    time.monotonic(), which all processes of a machine share. owner: whom the answer goes to.
    """

    id: int
    kind: Kind
    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    deadline: float
    skip: NDArray[np.int32] | None = None
    types: NDArray[np.uint8] | None = None
    marked: NDArray[np.int32] | None = None
    targets: NDArray[np.int32] | None = None
    keys: NDArray[np.int32] | None = None
    query: NDArray[np.float32] | None = None
    writing: Writing | None = None
    adapter: int = 0
    owner: Owner | None = None
    sent: float = inf  # to the engine, by time.monotonic()
    arrived: float = 0.0  # in its queue
    rate: float = 1.0  # tokens/s of the engine at that time
    over: bool = False  # cancelled, failed or expired: what is left of it is not computed
    left: int = field(init=False)  # texts that no batch has taken
    queued_tokens: int = 0  # of these, once the request is admitted
    queued_spans: int = 0  # entries of the queue that these are in
    texts: int = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.texts = len(self.offsets) - 1
        self.tokens = int(self.offsets[-1])

    def rows(self, start: int, stop: int) -> slice:
        """Where the results of the texts start..stop are among those of the request."""
        if self.kind.rows_of == "tokens":
            return slice(int(self.offsets[start]), int(self.offsets[stop]))
        if self.kind.rows_of == "masks":
            assert self.marked is not None
            before = self.marked.searchsorted(self.offsets[[start, stop]])
            return slice(int(before[0]), int(before[1]))
        return slice(start, stop)


@dataclass(slots=True)
class Part:
    """An answer for the texts start..stop of a request. rows: float32, as `Kind` says. queue, compute: seconds."""

    id: int
    start: int
    stop: int
    rows: NDArray[np.float32]
    queue: float
    compute: float


@dataclass(frozen=True)
class Failure:
    """A request that gets no answer. status: of HTTP. retry_after: seconds, 0 for none. full: seconds for which the
    worker is to refuse everybody itself."""

    id: int
    status: int
    words: str
    retry_after: float = 0.0
    full: float = 0.0


Result = Part | Failure | Written


class Owner(Protocol):
    """Whoever submits jobs: a worker's connection, or the worker itself."""

    def deliver(self, results: list[Result]) -> None:
        """From any thread; never blocks. One call for each batch."""


class EngineFace(Protocol):
    """What a worker needs of an engine in its own process."""

    @property
    def ready(self) -> bool: ...

    @property
    def queued_tokens(self) -> int: ...

    def submit(self, jobs: list[Job]) -> list[tuple[Job, Failure]]: ...

    def cancel(self, owner: Owner, ids: list[int]) -> None: ...

    def close(self) -> None: ...
