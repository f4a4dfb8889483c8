"""An engine: a queue, a thread that launches batches, a thread that fetches their results. One a model and device."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftbert.server.batcher import Batch, Batcher, Limits
from ftbert.server.metrics import Row
from ftbert.server.work import Failure, Owner, Part, Work

LOG = logging.getLogger("ftbert.serve")

# Batches between launch and result: one computes while the next is prepared.
_IN_FLIGHT = 2
# A batch that takes longer means a device that hangs: the engine is no longer ready.
_STUCK_SECONDS = 60.0


@dataclass
class _Launched:
    batch: Batch
    fetch: Callable[[], Any]
    began: float


class Engine:
    """compute: launch(batch) -> fetch() -> rows, and free_memory(). Thread-safe."""

    def __init__(self, compute: Any, limits: Limits, rate: float, metrics: Row) -> None:
        self._compute, self._metrics = compute, metrics
        self._batcher = Batcher(limits, rate)
        self._changed = threading.Condition()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._in_flight = 0
        self._closed = False
        self.broken = False  # the device failed: only a new process can use it again
        self._busy_since = 0.0  # 0: nothing is computed
        self._finished = 0.0
        self._works: dict[tuple[int, int], Work] = {}  # by owner and id: what may be cancelled
        self._threads = [
            threading.Thread(target=self._launch_loop, name="ftbert-launch", daemon=True),
            threading.Thread(target=self._fetch_loop, name="ftbert-fetch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, works: list[Work]) -> list[tuple[Work, Failure]]:
        """Queues requests; those that it refuses are returned. Answers go to work.owner."""
        refused = []
        with self._changed:
            now = time.monotonic()
            for work in works:
                failure = self._batcher.admit(work, now) if not self._closed else _stopped(work)
                if failure is not None:
                    refused.append((work, failure))
                else:
                    self._works[id(work.owner), work.id] = work
            self._changed.notify()
            self._gauges()
        return refused

    def cancel(self, owner: Owner, ids: list[int]) -> None:
        """Nobody waits for these requests any more; unknown ones are ignored."""
        with self._changed:
            for one in ids:
                if work := self._works.pop((id(owner), one), None):
                    self._batcher.give_up(work)
            self._gauges()

    def forget(self, owner: Owner) -> None:
        """Everything of an owner that is gone."""
        with self._changed:
            for key in [key for key in self._works if key[0] == id(owner)]:
                self._batcher.give_up(self._works.pop(key))
            self._gauges()

    @property
    def ready(self) -> bool:
        """Whether both threads live and no batch hangs."""
        since = self._busy_since
        stuck = since > 0 and time.monotonic() - since > _STUCK_SECONDS
        return not (self._closed or self.broken or stuck) and all(thread.is_alive() for thread in self._threads)

    @property
    def saturated(self) -> bool:
        """As many batches are in flight as may be: what arrives now waits."""
        return self._in_flight >= _IN_FLIGHT

    @property
    def queued_tokens(self) -> int:
        return self._batcher.queued_tokens

    def close(self) -> None:
        """Stops after the batches in flight; what waits is answered 503."""
        with self._changed:
            self._closed = True
            left = list(self._works.values())
            self._works.clear()
            self._changed.notify_all()
        for work in left:
            if work.owner is not None:
                work.owner.deliver([_stopped(work)])
        for thread in self._threads:
            thread.join()

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
            for work, failure in expired:
                self._fail(work, failure)
            if batch is not None:
                self._launch(batch)

    def _launch(self, batch: Batch) -> None:
        self._metrics.batch(batch.texts, batch.tokens)
        began = time.monotonic()
        try:
            self._launched.put(_Launched(batch, self._compute.launch(batch), began))
        except Exception as error:  # noqa: BLE001 - one batch that fails must not end the engine
            self._failed(batch, error)

    def _fetch_loop(self) -> None:
        while (launched := self._launched.get()) is not None:
            try:
                rows = launched.fetch()
            except Exception as error:  # noqa: BLE001 - as above
                self._failed(launched.batch, error)
                continue
            now = time.monotonic()
            self._answer(launched.batch, rows, launched.began, now)
            seconds = now - max(launched.began, self._finished)  # batches overlap
            self._finished = now
            self._done(launched.batch, seconds)

    def _answer(self, batch: Batch, rows: Any, began: float, now: float) -> None:
        good = np.isfinite(rows).all(axis=1)
        everything = bool(good.all())
        by_owner: dict[int, tuple[Owner, list[Any]]] = {}
        at = 0
        for run in batch.runs:
            work = run.work
            where = work.rows(run.start, run.stop)
            mine = slice(at, at + where.stop - where.start)
            at = mine.stop
            if work.over or work.owner is None:
                continue
            if not everything and not good[mine].all():
                self._fail(work, Failure(work.id, 424, "the model's result for this input is not finite"))
                continue
            part = Part(work.id, run.start, run.stop, rows[mine], began - work.arrived, now - began)
            by_owner.setdefault(id(work.owner), (work.owner, []))[1].append(part)
            if work.left == 0:
                self._works.pop((id(work.owner), work.id), None)
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
        self.broken = self.broken or (not memory and "CUDA" in str(error))
        if not again and len(batch.runs) > 1 and not self.broken:
            self._one_by_one(batch)
        elif not again:
            words = "out of memory" if memory else f"the computation failed ({type(error).__name__})"
            for run in batch.runs:
                if not run.work.over:
                    self._fail(run.work, Failure(run.work.id, 424, words))
        with self._changed:
            self._leave(batch)

    def _one_by_one(self, batch: Batch) -> None:
        """After a failure: whose request it was is told, the others get their answers."""
        for run in batch.runs:
            began = time.monotonic()
            alone = Batch(batch.kind, [run], run.tokens, run.stop - run.start)
            try:
                self._answer(alone, self._compute.launch(alone)(), began, time.monotonic())
            except Exception as error:  # noqa: BLE001 - as in _launch
                if not run.work.over:
                    words = f"the computation failed ({type(error).__name__})"
                    self._fail(run.work, Failure(run.work.id, 424, words))

    def _fail(self, work: Work, failure: Failure) -> None:
        with self._changed:
            self._batcher.give_up(work)
            self._works.pop((id(work.owner), work.id), None)
            self._gauges()
        if work.owner is not None:
            work.owner.deliver([failure])

    def _gauges(self) -> None:
        self._metrics.queue(len(self._batcher), self._batcher.queued_tokens, self._batcher.budget)


def _stopped(work: Work) -> Failure:
    return Failure(work.id, 503, "the engine has stopped", 1.0)
