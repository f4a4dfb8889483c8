"""A model as a worker serves it: its engines, its tokenizer, texts in and rows out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ftbert.server.description import TASKS, Description
from ftbert.server.errors import ApiError, of_failure, validation
from ftbert.server.job import Job, Kind
from ftbert.server.links import Answer, Disconnected, Failed, Link, next_id
from ftbert.server.memory import Memory
from ftbert.server.messages import Request
from ftbert.server.settings import Settings
from ftbert.server.text_encoder import INLINE_CHARACTERS, Encoded, TextEncoder
from ftbert.server.tracing import Steps

T = TypeVar("T")
_WORDS = {"fill_mask": "a masked language", "generation": "a generating"}  # of what is no task of its own

# Where the engines were full within this time, in seconds, no more requests than this wait for a worker's tokenizer:
# others would wait for it, only to be refused then.
_LATELY, _MOST_WAITING = 1.0, 8


@dataclass
class Computed:
    """rows: see Answer. began: when it was tokenised, by time.monotonic(). Seconds that each step took. rows_of_texts:
    [texts + 1], where those of each text are among rows of tokens of which some were left out."""

    rows: Any
    encoded: Encoded
    began: float
    tokenization: float
    queue: float
    inference: float
    rows_of_texts: Any = None

    @property
    def steps(self) -> Steps:
        seconds = {"tokenization": self.tokenization, "queue": self.queue, "inference": self.inference}
        return Steps(self.began, seconds, self.encoded.tokens)

    @property
    def usage(self) -> dict[str, int]:
        """As OpenAI's."""
        return {"prompt_tokens": self.encoded.tokens, "total_tokens": self.encoded.tokens}


class ServedModel:
    """names: what requests may call it."""

    def __init__(
        self, name: str, source: str, links: Sequence[Link], settings: Settings, threads: Executor, memory: Memory
    ) -> None:
        self.name, self.source, self.links = name, source, list(links)
        self._settings, self._threads, self._memory = settings, threads, memory
        self.wanted = self.resident = True  # resident: of the command line, there as long as the server is
        self._preparing: asyncio.Task[None] | None = None
        self._encoder: TextEncoder | None = None
        self._table_encoder: TextEncoder | None = None
        self._waiting: deque[None] = deque()  # for the tokenizer, or in it; threads take from it
        self._full_lately = 0.0  # until then

    @property
    def ready(self) -> bool:
        if self._encoder is None:
            return False
        for link in self.links:  # noqa: SIM110 - as App._loaded
            if link.ready:
                return True
        return False

    @property
    def state(self) -> str:
        """In llama.cpp's words."""
        return "unloaded" if not self.wanted else "loaded" if self.ready else "loading"

    def want(self, wanted: bool) -> None:
        """It is loaded or unloaded while the server runs: its engines are connected to, or their end is waited for."""
        if wanted == self.wanted:
            return
        self.wanted, self._encoder, self._table_encoder = wanted, None, None
        for link in self.links:
            link.wanted = wanted
            link.description = None if wanted else link.description  # until then answers are made by it
        if self._preparing is not None:
            self._preparing.cancel()
        self._preparing = asyncio.get_running_loop().create_task(self.prepare()) if wanted else None

    def retry_after(self) -> float:
        """Seconds, where a new request is to be refused; else 0."""
        now = time.monotonic()
        if len(self._waiting) < _MOST_WAITING or now >= self._full_lately:
            for link in self.links:
                if not link.full:
                    return 0.0
        self._full_lately = now + _LATELY
        return min(link.retry_after for link in self.links)

    @property
    def task(self) -> str | None:
        """None before an engine has loaded the model."""
        return None if (about := self._described) is None else about.task

    @property
    def _described(self) -> Description | None:
        for link in self.links:
            if link.description is not None:
                return link.description
        return None

    def does(self, task: str | None) -> bool:
        """Whether it is for this; an embedding model may be for "fill_mask", "sparse" and "generation" too. None: not
        known yet."""
        if task not in ("fill_mask", "sparse", "generation"):
            return self.task == task
        if (about := self._described) is None:
            return False
        if task == "generation":
            return about.generation is not None
        return about.text.mask_id is not None if task == "fill_mask" else bool(about.vectors.sparse)

    @property
    def about(self) -> Description:
        """ApiError 503 before an engine has loaded the model."""
        if (about := self._described) is None:
            raise ApiError("Unhealthy", "the model is loading", retry_after=1.0)
        return about

    def encoder(self) -> TextEncoder:
        """ApiError 503 before `prepare` has made it."""
        if self._encoder is None:
            raise ApiError("Unhealthy", "the model is loading", retry_after=1.0)
        return self._encoder

    async def prepare(self) -> None:
        """Makes the tokenizer once an engine has told of it, off the event loop: that takes 30 ms and more."""
        while (about := self._described) is None:
            await asyncio.sleep(0.02)
        if about.table is not None:
            of_table = msgspec.structs.replace(about, text=about.table.text)
            self._table_encoder = await asyncio.to_thread(_warm_encoder, of_table)
        self._encoder = await asyncio.to_thread(_warm_encoder, about)

    def prompt(self, name: str | None) -> str:
        """ApiError 422 for an unknown name."""
        if name is None:
            return self.about.text.default_prompt
        if (found := self.about.text.prompts.get(name)) is None:
            known = ", ".join(map(repr, self.about.text.prompts))
            raise validation(f"`default-prompt-name` or `prompt_name` must be one of {known}; got {name[:100]!r}")
        return found

    def deadline(self, request: Request) -> float:
        """By time.monotonic(). ApiError 400 for a header that is no time."""
        return _deadline(request, self._settings.request_timeout)

    def truncates(self, given: bool | None) -> bool:
        return self._settings.auto_truncate if given is None else given

    def expect(self, *tasks: str) -> None:
        """ApiError 424, as TEI, where the model is for something else."""
        if not any(map(self.does, tasks)):
            wanted = _WORDS.get(tasks[0]) or TASKS[tasks[0]].words
            words = f"model is not {wanted} model (it is: {self.about.task})"
            raise ApiError("Backend", words, counted="model_type")

    async def look_up(self, request: Request, characters: int, encode: Callable[[TextEncoder], Encoded]) -> Computed:
        """The ids of texts for which a table has the entries: no engine computes. encode: by the table's tokenizer."""
        encoder = self.table_encoder()
        began = time.monotonic()
        encoded = await self.in_thread(request, characters, lambda: encode(encoder), encoder.inline)
        self._memory.take(request, encoded.tokens * Kind.WEIGHTS.bytes_of(self.about), encoded.tokens, "tokens")
        return Computed(None, encoded, began, time.monotonic() - began, 0.0, 0.0)

    def table_encoder(self) -> TextEncoder:
        """Of the description's table. ApiError 503 before `prepare` has made it."""
        if self._table_encoder is None:
            raise ApiError("Unhealthy", "the model is loading", retry_after=1.0)
        return self._table_encoder

    async def in_thread(
        self, request: Request, characters: int, call: Callable[[], T], inline: int = INLINE_CHARACTERS
    ) -> T:
        """`call`, off the event loop where there are more than `inline` characters to tokenise. Disconnected where the
        client has gone before its turn came."""
        request.model = self.name
        if characters <= inline:
            return call()

        def run() -> T:
            try:
                if request.disconnected:
                    raise Disconnected
                return call()
            finally:
                self._waiting.pop()

        self._waiting.append(None)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    async def compute(
        self, request: Request, kind: Kind, characters: int, encode: Callable[[], Encoded],
        inline: int = INLINE_CHARACTERS, adapter: int = 0,
    ) -> Computed:  # fmt: skip
        """Tokenises, sends to the engine with the least to do, waits. ApiError; Disconnected."""
        self.about  # noqa: B018 - 503 while it loads, before any work
        began = time.monotonic()
        encoded = await self.in_thread(request, characters, encode, inline)
        tokenised = time.monotonic()
        job = Job(
            next_id(), kind, encoded.ids, encoded.offsets, self.deadline(request),
            encoded.skip, encoded.types, encoded.marked, encoded.targets, encoded.keys, encoded.query,
            adapter=adapter,
        )  # fmt: skip
        if request.disconnected:
            raise Disconnected
        items = job.rows(0, job.texts).stop
        self._memory.take(request, items * kind.bytes_of(self.about), items, kind.rows_of)
        link = self.link()
        try:
            pending = link.submit(job)
            request.on_disconnect(lambda: link.cancel(pending, Disconnected()))
            answer: Answer = await pending.future
        except Failed as failed:
            failure = failed.failure
            raise of_failure(failure.status, failure.words, failure.retry_after) from None
        return Computed(answer.rows, encoded, began, tokenised - began, answer.queue, answer.compute)

    def link(self) -> Link:
        """Of the engine with the least to do."""
        if len(self.links) == 1:
            return self.links[0]
        ready = [link for link in self.links if link.ready] or self.links
        # An engine that does not come to reading has few tokens queued.
        return min([link for link in ready if not link.full] or ready, key=lambda one: one.load)

    def take_memory(self, request: Request, size: int, items: int, name: str) -> None:
        """As of Memory."""
        self._memory.take(request, size, items, name)


def _warm_encoder(about: Description) -> TextEncoder:
    made = TextEncoder(about)
    with contextlib.suppress(ApiError):  # each request is told
        made.encode(["a"], "", True, "right")
    return made


def _deadline(request: Request, most: float) -> float:
    text = request.header(b"x-request-timeout")
    if text:
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e9:
            raise ApiError("Validation", f"x-request-timeout must be seconds above 0; got {text[:20]!r}", status=400)
        most = min(most, seconds)
    return request.began + most
