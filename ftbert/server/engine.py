"""An engine: a queue, a thread that launches batches, a thread that fetches their results. One a model and device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ftbert.server.batcher import Batch, Batcher, Limits
from ftbert.server.job import Failure, Job, Kind, Owner, Part
from ftbert.server.logs import LOG
from ftbert.server.metrics import Row
from ftbert.server.writer import Writer

# Batches between launch and result: one computes while the next is prepared.
_IN_FLIGHT = 2
# A batch that takes longer means a device that hangs: the engine is no longer ready.
_STUCK_SECONDS = 60.0


_Launched = tuple[Batch, Callable[[], Any], float]  # and what fetches its rows, and when it was launched


class Engine:
    """compute: launch(batch) -> fetch() -> rows, and free_memory(). writer: of a model that generates. Thread-safe."""

    def __init__(
        self, compute: Any, limits: Limits, rate: float, metrics: Row, writer: Writer | None = None
    ) -> None:  # fmt: skip
        self._compute, self._metrics, self._writer = compute, metrics, writer
        if writer is not None:
            writer.done = self._written
        self._batcher = Batcher(limits, rate)
        self._changed = threading.Condition()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._in_flight = 0
        self._closed = False
        self._broken = False
        self._busy_since = 0.0  # 0: nothing is computed
        self._finished = 0.0
        self._jobs: dict[tuple[int, int], Job] = {}  # by owner and id: what may be cancelled
        self._threads = [
            threading.Thread(target=self._launch_loop, name="ftbert-launch", daemon=True),
            threading.Thread(target=self._fetch_loop, name="ftbert-fetch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: list[Job]) -> list[tuple[Job, Failure]]:
        """Queues requests; those that it refuses are returned. Answers go to job.owner."""
        refused = []
        with self._changed:
            now = time.monotonic()
            for job in jobs:
                failure = _stopped(job) if self._closed else self._queue_of(job).admit(job, now)
                if failure is not None:
                    refused.append((job, failure))
                else:
                    self._jobs[id(job.owner), job.id] = job
            self._changed.notify()
            self._gauges()
        return refused

    def cancel(self, owner: Owner, ids: list[int]) -> None:
        """Nobody waits for these requests any more; unknown ones are ignored."""
        with self._changed:
            for one in ids:
                if job := self._jobs.pop((id(owner), one), None):
                    self._queue_of(job).give_up(job)
            self._gauges()

    def forget(self, owner: Owner) -> None:
        """Everything of an owner that is gone."""
        with self._changed:
            for key in [key for key in self._jobs if key[0] == id(owner)]:
                job = self._jobs.pop(key)
                self._queue_of(job).give_up(job)
            self._gauges()

    @property
    def broken(self) -> bool:
        """The device failed: only a new process can use it again."""
        return self._broken or (self._writer is not None and self._writer.broken)

    @property
    def ready(self) -> bool:
        """Whether its threads live and nothing that is computed hangs."""
        begun = [self._busy_since, *([self._writer.busy_since] if self._writer else [])]
        stuck = any(since > 0 and time.monotonic() - since > _STUCK_SECONDS for since in begun)
        alive = all(thread.is_alive() for thread in self._threads) and (self._writer is None or self._writer.alive)
        return alive and not (self._closed or self.broken or stuck)

    @property
    def idle(self) -> bool:
        """Nothing waits or is computed."""
        return not self._jobs and self._in_flight == 0

    @property
    def saturated(self) -> bool:
        """As many batches are in flight as may be: what arrives now waits."""
        return self._in_flight >= _IN_FLIGHT

    @property
    def queued_tokens(self) -> int:
        return self._batcher.queued_tokens + (0 if self._writer is None else self._writer.queued_tokens)

    def close(self) -> None:
        """Stops after the batches in flight; what waits is answered 503."""
        with self._changed:
            self._closed = True
            left = list(self._jobs.values())
            self._jobs.clear()
            self._changed.notify_all()
        for job in left:
            if job.owner is not None:
                job.owner.deliver([_stopped(job)])
        for thread in self._threads:
            thread.join()
        if self._writer is not None:
            self._writer.close()

    def _queue_of(self, job: Job) -> Batcher | Writer:
        if job.kind != Kind.WRITTEN:
            return self._batcher
        assert self._writer is not None  # workers know who generates
        return self._writer

    def _written(self, job: Job) -> None:
        with self._changed:
            self._jobs.pop((id(job.owner), job.id), None)

    def _launch_loop(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._in_flight < _IN_FLIGHT and len(self._batcher)):
                    self._changed.wait()
                if self._closed:
                    self._launched.put(None)
                    return
                batch = self._batcher.next_batch(time.monotonic())
                expired, self._batcher.dropped = self._batcher.dropped, []
                if batch is not None:
                    self._in_flight += 1
                    self._busy_since = self._busy_since or time.monotonic()
                self._gauges()
            for job, failure in expired:
                self._fail(job, failure)
            if batch is not None:
                self._launch(batch)

    def _launch(self, batch: Batch) -> None:
        self._metrics.batch(batch.texts, batch.tokens)
        began = time.monotonic()
        try:
            self._launched.put((batch, self._compute.launch(batch), began))
        except Exception as error:  # noqa: BLE001 - one batch that fails must not end the engine
            self._failed(batch, error)

    def _fetch_loop(self) -> None:
        while (launched := self._launched.get()) is not None:
            batch, fetch, began = launched
            try:
                rows = fetch()
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(batch, error)
                continue
            now = time.monotonic()
            self._answer(batch, rows, began, now)
            seconds = now - max(began, self._finished)  # batches overlap
            self._finished = now
            self._done(batch, seconds)

    def _answer(self, batch: Batch, rows: Any, began: float, now: float) -> None:
        good = np.isfinite(rows).all(axis=1)
        everything = bool(good.all())
        by_owner: dict[int, tuple[Owner, list[Any]]] = {}
        at = 0
        for span in batch.spans:
            job = span.job
            where = job.rows(span.start, span.stop)
            mine = slice(at, at + where.stop - where.start)
            at = mine.stop
            if job.over or job.owner is None:
                continue
            if not everything and not good[mine].all():
                self._fail(job, Failure(job.id, 424, "the model's result for this input is not finite"))
                continue
            part = Part(job.id, span.start, span.stop, rows[mine], began - job.arrived, now - began)
            by_owner.setdefault(id(job.owner), (job.owner, []))[1].append(part)
            if job.left == 0:
                self._jobs.pop((id(job.owner), job.id), None)
        for owner, parts in by_owner.values():
            owner.deliver(parts)

    def _done(self, batch: Batch, seconds: float) -> None:
        with self._changed:
            self._batcher.computed(batch.tokens, seconds)
            self._leave(batch)
            self._metrics.computed(batch.tokens, seconds)

    def _leave(self, batch: Batch) -> None:
        now = time.monotonic()
        self._batcher.leave(batch, now)
        self._in_flight -= 1
        self._busy_since = now if self._in_flight else 0.0
        self._gauges()
        self._changed.notify()

    def _failed(self, batch: Batch, error: Exception) -> None:
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        again = False
        if memory:
            self._compute.free_memory()
            with self._changed:
                again = self._batcher.requeue(batch)
            LOG.warning("out of memory at %d tokens; now %d at once", batch.tokens, self._batcher.budget)
        else:
            # The message may quote an input: only its kind is logged.
            LOG.error("a batch of %d texts failed: %s", batch.texts, type(error).__name__)
        self._broken = self._broken or (not memory and "CUDA" in str(error))
        if not again and len(batch.spans) > 1 and not self.broken:
            self._one_by_one(batch)
        elif not again:
            words = "out of memory" if memory else f"the computation failed ({type(error).__name__})"
            for span in batch.spans:
                if not span.job.over:
                    self._fail(span.job, Failure(span.job.id, 424, words))
        with self._changed:
            self._leave(batch)

    def _one_by_one(self, batch: Batch) -> None:
        """After a failure: whose request it was is told, the others get their answers."""
        for span in batch.spans:
            began = time.monotonic()
            alone = Batch(batch.kind, [span], span.tokens, span.stop - span.start, batch.adapter)
            try:
                self._answer(alone, self._compute.launch(alone)(), began, time.monotonic())
            except Exception as error:  # noqa: BLE001 - as in _launch
                if not span.job.over:
                    words = f"the computation failed ({type(error).__name__})"
                    self._fail(span.job, Failure(span.job.id, 424, words))

    def _fail(self, job: Job, failure: Failure) -> None:
        with self._changed:
            self._batcher.give_up(job)
            self._jobs.pop((id(job.owner), job.id), None)
            self._gauges()
        if job.owner is not None:
            job.owner.deliver([failure])

    def _gauges(self) -> None:
        self._metrics.queue(len(self._batcher), self._batcher.queued_tokens, self._batcher.budget)


def _stopped(job: Job) -> Failure:
    return Failure(job.id, 503, "the engine has stopped", 1.0)
