"""The part of an engine that continues texts: they join and leave between two steps, while others go on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from ftbert.server.job import TEXTS, Failure, Job, Owner, Result, Writing, Written, WrittenToken
from ftbert.server.logs import LOG
from ftbert.server.metrics import Row

# Texts that wait for a slot, at most, for each slot; those of one request may in any case.
_MOST_WAITING = 64
# How fast the estimate follows of the seconds that a text has its slot.
_FOLLOW = 0.2


class _Text:
    """One job in the generation."""

    __slots__ = ("begun", "job")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = 0.0  # its first token was there


class Writer:
    """generation: add(request) -> place, end(place), step() -> tokens, reset(), waiting, running; see
    ftbert.decoding.Generation. request: of prompt and Writing, ValueError where the model cannot do it. done: called
    with a job that has ended by itself. Thread-safe."""

    def __init__(self, generation: Any, request: Callable[[list[int], Writing], Any], slots: int, metrics: Row) -> None:
        self._generation, self._request, self._slots, self._metrics = generation, request, slots, metrics
        self.done: Callable[[Job], None] = lambda job: None
        self.broken = False
        self.busy_since = 0.0  # 0: no step is computed
        self.queued_tokens = 0  # of prompts that wait or whose texts grow
        self._changed = threading.Condition()
        self._texts: dict[int, _Text] = {}  # by place
        self._places: dict[Job, int] = {}
        self._seconds = 0.0  # that a text has its slot, by those that have ended; 0: none has
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="ftbert-write", daemon=True)
        self._thread.start()

    def admit(self, job: Job, now: float) -> Failure | None:
        """It joins, or waits for a slot; or why it may not."""
        assert job.writing is not None
        if job.deadline <= now:
            return Failure(job.id, 503, "the request was not computed before its deadline", 1.0)
        try:
            request = self._request(job.ids.tolist(), job.writing)
        except ValueError as error:
            return Failure(job.id, 422, str(error))
        with self._changed:
            if (wait := self._seconds_until_slot()) > job.deadline - now:
                return Failure(job.id, 429, "Model is overloaded", max(1.0, math.ceil(min(wait, 3600.0))))
            job.arrived = now
            try:
                place = self._generation.add(request)
            except ValueError as error:
                return Failure(job.id, 422, str(error))
            self._texts[place], self._places[job] = _Text(job), place
            self.queued_tokens += job.tokens
            self._gauges()
            self._changed.notify()
        return None

    def give_up(self, job: Job) -> None:
        """Nobody waits for the rest."""
        with self._changed:
            place = self._places.get(job)
            if place is not None:
                self._leave(place)
                self._generation.end(place)
            self._gauges()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """After the step that is computed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _seconds_until_slot(self) -> float:
        """As long as those before it take, if they take as long as others did."""
        ahead = len(self._texts)
        if ahead < self._slots:
            return 0.0
        if ahead - self._slots >= max(_MOST_WAITING * self._slots, TEXTS):
            return math.inf
        return self._seconds * (ahead - self._slots + 1) / self._slots

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._texts:
                    self._changed.wait()
                if self._closed:
                    return
            began = self.busy_since = time.monotonic()
            try:
                tokens = self._generation.step()
            except Exception as error:  # noqa: BLE001 - what fails must not end the engine
                self._failed(error)
                continue
            finally:
                self.busy_since = 0.0
            now = time.monotonic()
            self._metrics.written(len(tokens), now - began)
            self._tell(tokens, now)

    def _tell(self, tokens: list[Any], now: float) -> None:
        by_owner: dict[int, tuple[Owner, list[Result]]] = {}
        ended = []
        with self._changed:
            for token in tokens:
                text = self._texts.get(token.place)
                if text is None or text.job.owner is None:
                    continue  # it was given up meanwhile
                text.begun = text.begun or now
                by_owner.setdefault(id(text.job.owner), (text.job.owner, []))[1].append(_result(token, text))
                if token.end:
                    self._follow(now - text.begun)
                    self._leave(token.place)
                    ended.append(text.job)
            self._gauges()
        for job in ended:
            self.done(job)
        for owner, results in by_owner.values():
            owner.deliver(results)

    def _follow(self, seconds: float) -> None:
        self._seconds = seconds if not self._seconds else self._seconds + _FOLLOW * (seconds - self._seconds)

    def _leave(self, place: int) -> None:
        job = self._texts.pop(place).job
        job.over = True
        self.queued_tokens -= job.tokens
        del self._places[job]

    def _failed(self, error: Exception) -> None:
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        LOG.error("writing %d texts failed: %s", len(self._texts), type(error).__name__)  # the message may quote one
        self.broken = not memory and "CUDA" in str(error)
        with self._changed:
            jobs = list(self._places)
            for place in list(self._texts):
                self._leave(place)
            self._gauges()
            if not self.broken:
                self._generation.reset()
        words = "out of memory" if memory else f"the computation failed ({type(error).__name__})"
        for job in jobs:
            self.done(job)
            if job.owner is not None:
                job.owner.deliver([Failure(job.id, 424, words)])

    def _gauges(self) -> None:
        running = min(len(self._texts), self._slots)
        self._metrics.slots(self._slots, running, len(self._texts) - running)


def _result(token: Any, text: _Text) -> Result:
    job = text.job
    if token.end == "error":
        return Failure(job.id, 424, "the model's result for this input is not finite")
    made = WrittenToken(token.id, token.logprob, token.top)
    tokens, last = ([], made) if token.end == "eos" else ([made], None)
    return Written(job.id, tokens, token.end, last, token.cached, text.begun - job.arrived)
