"""A worker's side of an engine: requests out, answers put together. In the same process, or over a Unix socket."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server import frames
from ftbert.server.description import Description
from ftbert.server.frames import Frame
from ftbert.server.job import EngineFace, Failure, Job, Part, Result, Written
from ftbert.server.joined_jobs import JoinedJobs

# An engine says that it lives every TICK seconds; without a word for STALE it counts as not ready.
TICK, STALE = 0.1, 2.0
# Seconds between two looks for requests past their deadline: a timer for each would cost every request one.
_LOOK = 0.02
# Requests that are sent together at most: the engine wakes for each write, and may have done others' work by then.
# Single texts become one request (joined_jobs.py), as many as the engine computes in _JOINED seconds: a request's later
# texts yield to newcomers by the time that its earlier texts take.
_TOGETHER, _JOINED = 16, 0.002
_ids = itertools.count(1)
_NO_ROWS = np.empty((0, 0), np.float32)


@dataclass
class Answer:
    """rows: float32, as `Kind` says. queue: of the first text, compute: of the longest batch, seconds."""

    rows: NDArray[np.float32]
    queue: float
    compute: float


class Failed(Exception):
    """What an engine, or the way to it, says instead of an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.words)
        self.failure = failure


class Disconnected(Exception):
    """The client has gone; nobody waits for the answer."""


class _Pending:
    def __init__(self, job: Job, future: asyncio.Future[Answer]) -> None:
        self.job, self.future = job, future
        self.left = job.texts
        self.rows: NDArray[np.float32] | None = None
        self.queue, self.compute = -1.0, 0.0
        self.status = -1  # the engine's last one when it was sent

    def add(self, part: Part) -> bool:
        """Whether the answer is complete."""
        self.queue = part.queue if self.queue < 0 else min(self.queue, part.queue)
        self.compute = max(self.compute, part.compute)
        self.left -= part.stop - part.start
        if self.left == 0 and self.rows is None:
            self.rows = part.rows
            return True
        if self.rows is None:
            self.rows = np.empty((self.job.rows(0, self.job.texts).stop, part.rows.shape[1]), np.float32)
        if part.rows.shape[1] > self.rows.shape[1]:  # batches of sparse vectors differ in their most entries
            self.rows = np.pad(self.rows, ((0, 0), (0, part.rows.shape[1] - self.rows.shape[1])))
        where = self.job.rows(part.start, part.stop)
        self.rows[where, : part.rows.shape[1]] = part.rows
        self.rows[where, part.rows.shape[1] :] = 0
        return self.left == 0


class Stream(_Pending):
    """The text that follows a prompt, as it comes. What waits here is bounded by the tokens that the job asks for.
    changed: called when there is more to take, or it has failed."""

    def __init__(self, job: Job, future: asyncio.Future[Answer], changed: Callable[[], None]) -> None:
        super().__init__(job, future)
        self._come: list[Written] = []
        self._changed = changed
        future.add_done_callback(self._settled)

    def write(self, found: Written) -> bool:
        """Whether it is complete."""
        self.begin()
        self._come.append(found)
        self.left = int(not found.end)
        self._changed()
        return bool(found.end)

    def begin(self) -> None:
        """The deadline was of the first token."""
        self.job.deadline = inf

    def take(self) -> list[Written]:
        """What has come since the last call. Failed, Disconnected once that is taken."""
        found, self._come = self._come, []
        if not found and self.future.done():
            self.future.result()
        return found

    def _settled(self, future: asyncio.Future[Answer]) -> None:
        future.exception()  # nobody need ask
        self._changed()


class Link:
    """What both kinds share. Only the event loop's thread calls it."""

    def __init__(self) -> None:
        self.description: Description | None = None
        self.wanted = True  # its engine is there, or will be
        self.loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._sent = 0  # tokens that the engine's own figure does not hold yet
        self._queued = 0  # that figure
        self._statuses = 0
        self._full_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due = inf  # when it looks for requests past their deadline
        self.retry_after = 1.0  # seconds, where it is full

    @property
    def ready(self) -> bool:
        raise NotImplementedError

    @property
    def load(self) -> int:
        """Queued tokens, as far as this worker knows."""
        return self._queued + self._sent

    @property
    def full(self) -> bool:
        """The engine has just refused a request as it would have any."""
        return time.monotonic() < self._full_until

    def submit(self, job: Job) -> _Pending:
        """Failed, where there is no engine."""
        return self._submit(_Pending(job, self.loop.create_future()))

    def write(self, job: Job, changed: Callable[[], None]) -> Stream:
        """Of Kind.WRITTEN. changed: see Stream. Failed, where there is no engine."""
        stream = Stream(job, self.loop.create_future(), changed)
        self._submit(stream)
        return stream

    def end_streams(self, words: str) -> None:
        """They fail now, the engine is told."""
        for pending in [one for one in self._pending.values() if isinstance(one, Stream)]:
            self.cancel(pending, Failed(Failure(pending.job.id, 503, words, 1.0)))

    def _submit(self, pending: _Pending) -> _Pending:
        job = pending.job
        if not self.ready:
            raise Failed(Failure(job.id, 503, "no engine is ready", 1.0))
        self._pending[job.id] = pending
        self._sent += job.tokens
        pending.status = self._statuses
        job.sent = time.monotonic()
        if job.deadline < self._due:
            self._look_at(job.deadline, job.sent)
        self._send(job)
        return pending

    def cancel(self, pending: _Pending, why: Exception) -> None:
        """Nobody waits any more."""
        if self._finish(pending):
            self._uncount(pending)
            pending.future.set_exception(why)
            self._send_cancel(pending.job)

    def deliver_here(self, found: list[Result]) -> None:
        for one in found:
            if isinstance(one, Failure) and one.full:
                self._full_until, self.retry_after = time.monotonic() + one.full, one.retry_after
            pending = self._pending.get(one.id)
            if pending is None:
                continue
            if isinstance(one, Failure):
                self._finish(pending)
                self._uncount(pending)
                pending.future.set_exception(Failed(one))
            elif isinstance(one, Written):
                assert isinstance(pending, Stream)
                if pending.write(one):
                    self._finish(pending)
                    pending.future.set_result(Answer(_NO_ROWS, one.queue, 0.0))
            elif pending.add(one):
                self._finish(pending)
                pending.future.set_result(Answer(pending.rows, pending.queue, pending.compute))  # type: ignore[arg-type]

    def fail_all(self, words: str) -> None:
        for pending in list(self._pending.values()):
            self._finish(pending)
            pending.future.set_exception(Failed(Failure(pending.job.id, 503, words, 1.0)))

    def _look_at(self, due: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = due, self.loop.call_later(max(0.0, due - now), self._expire_late)

    def _expire_late(self) -> None:
        now = time.monotonic()
        for pending in [one for one in self._pending.values() if one.job.deadline <= now]:
            self._expire(pending)
        self._due, self._timer = inf, None
        if (first := min((one.job.deadline for one in self._pending.values()), default=inf)) < inf:
            self._look_at(max(first, now + _LOOK), now)

    def _expire(self, pending: _Pending) -> None:
        words = "the request was not answered before its deadline"
        self.cancel(pending, Failed(Failure(pending.job.id, 503, words, 1.0)))

    def _uncount(self, pending: _Pending) -> None:
        """What is left of it leaves the load now, not with the engine's next figure."""
        left = pending.job.tokens * pending.left // pending.job.texts
        if pending.status == self._statuses:
            self._sent = max(0, self._sent - left)
        else:
            self._queued = max(0, self._queued - left)

    def _finish(self, pending: _Pending) -> bool:
        return self._pending.pop(pending.job.id, None) is not None and not pending.future.done()

    def _send(self, job: Job) -> None:
        raise NotImplementedError

    def _send_cancel(self, job: Job) -> None:
        raise NotImplementedError


class LocalLink(Link):
    """An engine in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: EngineFace | None = None

    def attach(self, engine: EngineFace, description: Description) -> None:
        self.engine, self.description = engine, description

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.engine.ready

    @property
    def load(self) -> int:
        return 0 if self.engine is None else self.engine.queued_tokens

    def deliver(self, results: list[Result]) -> None:
        """From the engine's threads."""
        self.loop.call_soon_threadsafe(self.deliver_here, results)

    def _send(self, job: Job) -> None:
        job.owner = self
        assert self.engine is not None
        self.deliver_here([failure for _, failure in self.engine.submit([job])])

    def _send_cancel(self, job: Job) -> None:
        assert self.engine is not None
        self.engine.cancel(self, [job.id])


class SocketLink(Link, asyncio.Protocol):
    """An engine in another process. connect() keeps the connection, for ever."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._reader = frames.Reader()
        self._transport: Any = None
        self._heard = 0.0
        self._says_ready = False
        self._lost = asyncio.Event()
        self._unsent: list[Job] = []
        self._joined = JoinedJobs()
        self._rate = 0.0  # the engine's tokens/s

    async def connect(self) -> None:
        while True:
            self._lost.clear()
            with suppress(OSError):
                if self.wanted:
                    await self.loop.create_unix_connection(lambda: self, self._path)
                    await self._lost.wait()
            await asyncio.sleep(0.1)

    @property
    def ready(self) -> bool:
        alive = self._transport is not None and time.monotonic() - self._heard < STALE
        return alive and self._says_ready and self.description is not None

    def connection_made(self, transport: Any) -> None:
        self._transport, self._reader = transport, frames.Reader()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self._says_ready = None, False
        self._unsent.clear()
        self._joined.clear()
        self._queued = self._sent = 0
        self.fail_all("the engine has stopped")
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        for kind, payload in self._reader.feed(data):
            if kind == Frame.PARTS:
                self._deliver_apart(frames.read_parts(payload))
            elif kind == Frame.FAILURES:
                self._deliver_apart(frames.read_failures(payload))
            elif kind == Frame.TOKENS:
                self.deliver_here(frames.read_tokens(payload))
            elif kind == Frame.STATUS:
                self._says_ready, self._queued, self._rate = frames.read_status(payload)
                self._sent, self._statuses = 0, self._statuses + 1
            elif kind == Frame.HELLO:
                self.description = frames.read_hello(payload)

    def _deliver_apart(self, found: list[Result]) -> None:
        results, again = self._joined.apart(found)
        self.deliver_here(results)
        for job in again:
            job.sent = self._heard
        self._write([frames.submit(job) for job in again])

    def _send(self, job: Job) -> None:
        """At once where the engine has nothing of this worker to compute; else with what others send in this turn."""
        self._unsent.append(job)
        if len(self._pending) == 1 or len(self._unsent) == _TOGETHER:
            self._flush()
        elif len(self._unsent) == 1:
            self.loop.call_soon(self._flush)

    def _send_cancel(self, job: Job) -> None:
        if job in self._unsent:
            self._unsent.remove(job)
            return
        if (cancelled := self._joined.leave(job)) is not None:
            self._write([frames.cancel([cancelled])])

    def _flush(self) -> None:
        if self._unsent:
            jobs, self._unsent = self._unsent, []
            self._write([frames.submit(job) for job in self._joined.join(jobs, next_id(), _JOINED * self._rate)])

    def _write(self, made: list[bytes]) -> None:
        if made and self._transport is not None:
            self._transport.write(b"".join(made))


def next_id() -> int:
    """Unique in this process."""
    return next(_ids)
