"""Who computes jobs: the caller's thread on one model, or a thread for each of several replicas of it."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ftbert.packed_model import PackedModel

Job = TypeVar("Job")
Result = TypeVar("Result")
# launch(model, job) starts a job; what it returns waits for the result.
Launch: TypeAlias = Callable[[Any, Job], Callable[[], Result]]

# Jobs that a GPU has before their results are waited for, so that it never waits for the host. A CPU's host is itself.
_AHEAD = {"cuda": 3, "cpu": 0}
_AHEAD_OF_REPLICA = {"cuda": 2, "cpu": 0}  # fewer, since what waits for one replica is not there for another
_THREADS = "ftbert-replica"  # what their names begin with


class Workers(ABC, Generic[Job, Result]):
    """Entered once; leaving it gives up what is not done and waits for what is being computed.

    Jobs are done in any order. An exception of one is raised by `put` or `rest`. most: jobs under way at most.
    """

    most: int

    def __enter__(self) -> Workers[Job, Result]:
        return self

    @abstractmethod
    def __exit__(self, *_: Any) -> None: ...

    @abstractmethod
    def put(self, job: Job) -> list[tuple[Job, Result]]:
        """Takes one more; waits where too many are under way. Returns those done by now."""

    @abstractmethod
    def rest(self) -> list[tuple[Job, Result]]:
        """Waits for at least one that is under way; empty once there is none."""


class CallersThread(Workers[Job, Result]):
    """A `Workers` of one model, without a thread: jobs are done in their order."""

    def __init__(self, model: PackedModel, launch: Launch[Job, Result]) -> None:
        self._model, self._launch = model, launch
        self._ahead = _AHEAD[model.device.type]
        self._under_way: deque[tuple[Job, Callable[[], Result]]] = deque()
        self.most = self._ahead + 1

    def __exit__(self, *_: Any) -> None:
        self._under_way.clear()

    def put(self, job: Job) -> list[tuple[Job, Result]]:
        self._under_way.append((job, self._launch(self._model, job)))
        return [self._oldest()] if len(self._under_way) > self._ahead else []

    def rest(self) -> list[tuple[Job, Result]]:
        return [self._oldest()] if self._under_way else []

    def _oldest(self) -> tuple[Job, Result]:
        job, fetch = self._under_way.popleft()
        return job, fetch()


class ReplicaThreads(Workers[Job, Result]):
    """A `Workers` of several replicas, each with a thread that takes the next job whenever it has room for it.

    Threads start as there is work for them: one job alone is the first replica's. After an exception, which names the
    replica's device, no thread begins another job.
    """

    def __init__(self, models: Sequence[Any], launch: Launch[Job, Result]) -> None:
        self._models, self._launch = models, launch
        # One waits for each, so that none waits for the caller.
        self.most = sum(_AHEAD_OF_REPLICA[model.device.type] + 2 for model in models)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: a thread ends
        self._done: queue.SimpleQueue[tuple[Job, Result] | BaseException] = queue.SimpleQueue()
        self._under_way, self._stopped = 0, threading.Event()
        self._threads: list[threading.Thread] = []
        self._cores = torch.get_num_threads()

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        for _thread in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._threads and self._models[0].device.type == "cpu":
            torch.set_num_threads(self._cores)  # new threads get what was set last, in whichever thread

    def put(self, job: Job) -> list[tuple[Job, Result]]:
        self._under_way += 1
        if len(self._threads) < min(self._under_way, len(self._models)):
            model = self._models[len(self._threads)]
            thread = threading.Thread(target=self._work, args=(model,), name=f"{_THREADS}-{model.device}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)
        found = [] if self._under_way < self.most else self.rest()
        while not self._done.empty():
            found += self.rest()
        return found

    def rest(self) -> list[tuple[Job, Result]]:
        if not self._under_way:
            return []
        done = self._done.get()
        if isinstance(done, BaseException):
            raise done
        self._under_way -= 1
        return [done]

    def _work(self, model: PackedModel) -> None:
        try:
            self._compute(model)
        except BaseException as error:  # noqa: BLE001 - the caller's, whatever it is
            self._stopped.set()
            self._done.put(_naming(error, model.device))

    def _compute(self, model: PackedModel) -> None:
        if model.device.type == "cpu":  # replicas share its cores: a thread's number of OpenMP threads is its own
            torch.set_num_threads(max(1, self._cores // len(self._models)))
        ahead = _AHEAD_OF_REPLICA[model.device.type]
        under_way: deque[tuple[Job, Callable[[], Result]]] = deque()
        while True:
            job = self._next(wait=not under_way)
            if self._stopped.is_set():
                return
            if job is not None:
                under_way.append((job, self._launch(model, job)))
            if job is None or len(under_way) > ahead:
                oldest, fetch = under_way.popleft()
                self._done.put((oldest, fetch()))

    def _next(self, wait: bool) -> Job | None:
        """None without one, where it does not wait, and at the end."""
        try:
            return self._jobs.get(block=wait)
        except queue.Empty:
            return None


def _naming(error: BaseException, device: torch.device) -> BaseException:
    """The same exception, whose words begin with the device; another one where it has no words of its own."""
    if not isinstance(error, Exception):
        return error
    if len(error.args) == 1 and isinstance(error.args[0], str) and str(error) == error.args[0]:
        error.args = (f"{device}: {error.args[0]}",)
        return error
    named = RuntimeError(f"{device}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
