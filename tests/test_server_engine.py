"""The engine with a computation that fails, hangs or runs out of memory: who is answered what, and who is not hurt."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed: the extra ftbert[serve]")

from ftbert.server import frames  # noqa: E402
from ftbert.server.app import App  # noqa: E402
from ftbert.server.batcher import Batch, Limits  # noqa: E402
from ftbert.server.engine import Engine  # noqa: E402
from ftbert.server.engine_process import Connection  # noqa: E402
from ftbert.server.job import Failure, Job, Kind, Part  # noqa: E402
from ftbert.server.links import LocalLink, SocketLink  # noqa: E402
from ftbert.server.memory import Memory  # noqa: E402
from ftbert.server.messages import Request  # noqa: E402
from ftbert.server.metrics import PLACES, Metrics, Row  # noqa: E402
from ftbert.server.routes import all_routes  # noqa: E402
from ftbert.server.served_model import ServedModel  # noqa: E402
from ftbert.server.settings import Settings  # noqa: E402
from ftbert.server.text_encoder import Encoded  # noqa: E402


class Compute:
    """A text's row is its ids' sum and count. Id 13 gives NaN, 66 raises, 77 needs more memory than 100 tokens leave."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.go = threading.Event()
        self.go.set()

    def launch(self, batch: Batch) -> Callable[[], Any]:
        self.batches.append(batch)
        assert self.go.wait(10)
        texts = [run.job.ids[run.job.offsets[i] : run.job.offsets[i + 1]] for run in batch.spans for i in range(run.start, run.stop)]
        everything = np.concatenate(texts)
        if 66 in everything:
            raise RuntimeError("a secret text")
        if 77 in everything and batch.tokens > 50:
            raise MemoryError
        rows = np.array([[text.sum(), len(text)] for text in texts], np.float32)
        rows[[13 in text for text in texts]] = np.nan
        return lambda: rows

    def free_memory(self) -> None:
        pass


class Caller:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.failures: list[Failure] = []
        self.changed = threading.Condition()

    def deliver(self, results: list[Part | Failure]) -> None:
        with self.changed:
            self.parts += [one for one in results if isinstance(one, Part)]
            self.failures += [one for one in results if isinstance(one, Failure)]
            self.changed.notify_all()

    def texts(self, one: int) -> int:
        return sum(part.stop - part.start for part in self.parts if part.id == one)

    def wait(self, done: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(done, 10), (self.parts, self.failures)


def job(one: int, owner: Any, *texts: list[int], seconds: float = 60.0) -> Job:
    offsets = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    ids = np.concatenate([np.asarray(text, np.int32) for text in texts])
    return Job(one, Kind.EMBED, ids, offsets, time.monotonic() + seconds, owner=owner)


@pytest.fixture
def compute() -> Compute:
    return Compute()


@pytest.fixture
def engine(compute: Compute) -> Any:
    made = Engine(compute, Limits(100), 1e6, Row())
    yield made
    compute.go.set()
    made.close()
    assert made._batcher.computing == 0


def submit(engine: Engine, *jobs: Job) -> None:
    assert engine.submit(list(jobs)) == []


def hold(engine: Engine, compute: Compute, caller: Caller) -> None:
    """The engine computes one text until compute.go is set."""
    compute.go.clear()
    submit(engine, job(999, caller, [1]))
    while not compute.batches:
        time.sleep(0.001)


def test_rows_go_to_their_callers(engine: Engine) -> None:
    callers = [Caller() for _ in range(8)]

    def run(caller: Caller, seed: int) -> None:
        for one in range(200, 400):
            submit(engine, job(one, caller, [seed, one, 1000], [1000 + one]))

    threads = [threading.Thread(target=run, args=(caller, i)) for i, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    for seed, caller in enumerate(callers):
        caller.wait(lambda caller=caller: sum(p.stop - p.start for p in caller.parts) == 400)  # type: ignore[misc]
        for part in caller.parts:
            want = np.array([[seed + part.id + 1000, 3], [1000 + part.id, 1]], np.float32)
            assert np.array_equal(part.rows, want[part.start : part.stop])
    for thread in threads:
        thread.join()
    assert engine.queued_tokens == 0


def test_nan_hurts_its_own_request_only(engine: Engine, compute: Compute) -> None:
    caller = Caller()
    hold(engine, compute, caller)
    for one, ids in ((1, [5]), (2, [13]), (3, [6])):
        submit(engine, job(one, caller, ids))
    compute.go.set()
    caller.wait(lambda: caller.texts(1) == caller.texts(3) == 1 and len(caller.failures) == 1)
    assert (caller.failures[0].id, caller.failures[0].status) == (2, 424)
    assert compute.batches[1].texts == 3  # they were in one batch


def test_a_failed_batch_is_answered_without_its_words(engine: Engine, compute: Compute, caplog: pytest.LogCaptureFixture) -> None:
    caller = Caller()
    hold(engine, compute, caller)
    submit(engine, job(1, caller, [66]))
    submit(engine, job(3, caller, [7]))  # in the same batch
    compute.go.set()
    caller.wait(lambda: len(caller.failures) == 1 and caller.texts(3) == 1)
    assert caller.failures[0].status == 424 and "secret" not in caller.failures[0].words + caplog.text
    submit(engine, job(2, caller, [5]))
    caller.wait(lambda: caller.texts(2) == 1)
    assert engine.ready


def test_lack_of_memory(engine: Engine) -> None:
    caller = Caller()
    submit(engine, job(1, caller, *[[77] * 20] * 10))
    caller.wait(lambda: caller.texts(1) == 10)
    submit(engine, job(2, caller, [77] * 80))
    caller.wait(lambda: len(caller.failures) == 1)
    assert (caller.failures[0].id, caller.failures[0].status) == (2, 424)


def test_cancelled_and_forgotten_work_is_not_computed(engine: Engine, compute: Compute) -> None:
    caller, gone = Caller(), Caller()
    hold(engine, compute, caller)
    for one in range(1, 50):
        submit(engine, job(one, caller, [one]))
        submit(engine, job(one, gone, [one]))
    engine.cancel(caller, list(range(1, 40)))
    engine.forget(gone)
    left = 10  # a token each, before anything else is computed
    assert engine.queued_tokens == left == engine._metrics.cells[PLACES["te_queue_size"]]
    assert engine._metrics.cells[PLACES["ft_queue_tokens"]] == left
    compute.go.set()
    caller.wait(lambda: sum(part.stop - part.start for part in caller.parts) == 11)
    assert sum(batch.texts for batch in compute.batches) == 11
    assert not gone.parts and engine.queued_tokens == 0


def test_a_request_that_failed_is_not_computed_further(engine: Engine, compute: Compute) -> None:
    caller = Caller()
    submit(engine, job(1, caller, [13] * 60, *[[5] * 60] * 1000))
    caller.wait(lambda: len(caller.failures) == 1)
    assert engine.queued_tokens == 0
    assert sum(batch.texts for batch in compute.batches) < 10


def test_a_request_cancelled_in_the_same_breath_is_not_queued(engine: Engine) -> None:
    ours, theirs = socket.socketpair()
    connection, other = Connection(ours, engine), Caller()
    theirs.sendall(b"".join(frames.submit(job(one, None, [one])) for one in (1, 2, 3)) + frames.cancel([2, 9]))
    jobs = [job(2, other, [7])]
    assert connection.read(jobs)
    assert [(one.id, one.owner) for one in jobs] == [(2, other), (1, connection), (3, connection)]
    theirs.close()
    assert not connection.read(jobs) and len(jobs) == 3
    connection.close()


def test_expired_work_is_answered_503_and_not_computed(engine: Engine, compute: Compute) -> None:
    caller = Caller()
    hold(engine, compute, caller)
    submit(engine, job(1, caller, [5], seconds=0.01))
    time.sleep(0.03)
    compute.go.set()
    caller.wait(lambda: len(caller.failures) == 1)
    assert (caller.failures[0].status, caller.failures[0].retry_after) == (503, 1.0)
    assert sum(batch.texts for batch in compute.batches) == 1


def test_close_answers_what_waits(engine: Engine, compute: Compute) -> None:
    caller = Caller()
    hold(engine, compute, caller)
    submit(engine, job(1, caller, *[[5] * 60] * 3))
    threading.Timer(0.05, compute.go.set).start()
    engine.close()
    caller.wait(lambda: any(one.id == 1 and one.status == 503 for one in caller.failures))
    late = job(2, caller, [1])
    ((refused, failure),) = engine.submit([late])
    assert refused is late and failure.status == 503
    assert not engine.ready


def test_behind_a_refusal_of_everybody_requests_are_refused_unread() -> None:
    """Behind that of one request which asked for too much, or for too little time, they are not."""

    async def gate(path: str, *full: float) -> float:
        """Retry-After; 0: the request is let in. full: of each engine."""
        links = [LocalLink() for _ in full]
        for i, link in enumerate(links):
            link.deliver_here([Failure(1, 429, "Model is overloaded", 7.0 + i, full[i])])
        await asyncio.sleep(0.02)
        app = App(Settings((("m", "m"),)), [links], Metrics(Settings((("m", "m"),))), all_routes())
        request = Request(time.monotonic())
        request.method, request.path, request.headers = "POST", path, {b"content-type": b"application/json"}
        error = app.gate(request)
        return 0.0 if error is None else error.retry_after

    assert [asyncio.run(gate("/embed", full)) for full in (0.0, 0.01, 9.0)] == [0.0, 0.0, 7.0]
    assert [asyncio.run(gate("/embed", 9.0, full)) for full in (0.0, 9.0)] == [0.0, 7.0]
    assert asyncio.run(gate("/tokenize", 9.0)) == 0.0  # needs no engine


class Sink(LocalLink):
    """An engine that answers at once."""

    ready, load = True, 0

    def __init__(self) -> None:
        super().__init__()
        self.description: Any = SimpleNamespace(model=SimpleNamespace(hidden=2))
        self.jobs: list[Job] = []

    def _send(self, job: Job) -> None:
        self.jobs.append(job)
        self.loop.call_soon(self.deliver_here, [Part(job.id, 0, 1, np.ones((1, 2), np.float32), 0, 0)])


def test_a_full_engine_is_passed_over() -> None:
    """It may have few tokens queued: what it does not come to reading is in no queue."""

    async def run() -> list[list[Job]]:
        links = [Sink(), Sink()]
        links[0].deliver_here([Failure(1, 429, "Model is overloaded", 1.0, 9.0)])
        with ThreadPoolExecutor(1) as threads:
            model = ServedModel("m", "m", links, Settings((("m", "m"),)), threads, Memory(1 << 30))
            for _ in range(3):
                text = Encoded(np.array([1, 2], np.int32), np.array([0, 2]), 1)
                await model.compute(Request(time.monotonic()), Kind.EMBED, 1, lambda text=text: text)  # type: ignore[misc]
        return [link.jobs for link in links]

    first, second = asyncio.run(run())
    assert (len(first), len(second)) == (0, 3)
    assert all(time.monotonic() - 10 < job.sent <= time.monotonic() for job in second)


def test_what_is_refused_or_cancelled_leaves_the_load_of_a_link() -> None:
    """Before and after the engine's next figure, which holds what it was sent before."""

    async def run() -> list[int]:
        link = SocketLink("nowhere")
        link._transport, link._says_ready, link.description = SimpleNamespace(write=len), True, object()  # type: ignore[assignment]
        loads = []
        for status in (False, True):
            link.data_received(frames.status(True, 0, 1.0))
            calls = [link.submit(job(one, None, [1] * 100, [2] * 100)) for one in (1, 2, 3)]
            if status:
                link.data_received(frames.status(True, 600, 1.0))
                link.data_received(frames.results([Part(1, 0, 1, np.ones((1, 2), np.float32), 0, 0)]))
            loads.append(link.load)
            link.cancel(calls[0], RuntimeError())
            loads.append(link.load)
            link.data_received(frames.results([Failure(2, 429, "Model is overloaded")]))
            loads.append(link.load)
            link.cancel(calls[2], RuntimeError())
            loads.append(link.load)
            await asyncio.gather(*(call.future for call in calls), return_exceptions=True)
        return loads

    assert asyncio.run(run()) == [600, 400, 200, 0, 600, 500, 300, 100]


def test_few_requests_wait_for_the_tokenizer_of_a_full_model() -> None:
    """Where the engines were never full they may be any number."""

    async def refused_behind(requests: int, full: float) -> list[bool]:
        link, go = Sink(), threading.Event()
        if full:
            link.deliver_here([Failure(1, 429, "Model is overloaded", 3.0, full)])
        with ThreadPoolExecutor(1) as threads:
            model = ServedModel("m", "m", [link], Settings((("m", "m"),)), threads, Memory(1 << 30))
            first = model.retry_after()
            await asyncio.sleep(0.02)

            def encode() -> Encoded:
                assert go.wait(10)
                return Encoded(np.array([1, 2], np.int32), np.array([0, 2]), 1)

            calls = [
                asyncio.create_task(model.compute(Request(time.monotonic()), Kind.EMBED, 1 << 20, encode))
                for _ in range(requests)
            ]
            await asyncio.sleep(0)
            held = model.retry_after()
            go.set()
            await asyncio.gather(*calls)
            return [first > 0, held > 0, model.retry_after() > 0]

    assert asyncio.run(refused_behind(7, 0.01)) == [True, False, False]
    assert asyncio.run(refused_behind(8, 0.01)) == [True, True, False]
    assert asyncio.run(refused_behind(100, 0.0)) == [False, False, False]


def test_frames_round_trip_however_they_are_cut() -> None:
    sent = job(7, None, [1, 2, 3], [4])
    sent.sent, sent.skip, sent.types = 12.5, np.array([1, 0], np.int32), np.array([0, 1, 1, 0], np.uint8)
    results: list[Part | Failure] = [
        Part(7, 0, 2, np.arange(6, dtype=np.float32).reshape(2, 3), 0.5, 0.25), Part(8, 3, 4, np.ones((1, 3), np.float32), 0, 0),
        Failure(9, 503, "später", 1.5, 0.25),
    ]  # fmt: skip
    stream = frames.submit(sent) + frames.cancel([1, 2**60]) + frames.status(True, 12, 3.5) + frames.results(results)
    for size in (1, 3, 7, len(stream)):
        reader = frames.Reader()
        found = [frame for i in range(0, len(stream), size) for frame in reader.feed(stream[i : i + size])]
        assert [kind.name for kind, _ in found] == ["SUBMIT", "CANCEL", "STATUS", "FAILURES", "PARTS"]
        got = frames.read_submit(found[0][1])
        for name in ("ids", "offsets", "skip", "types"):
            assert np.array_equal(getattr(got, name), getattr(sent, name))
        assert (got.id, got.kind, got.deadline, got.sent) == (7, Kind.EMBED, sent.deadline, 12.5)
        assert frames.read_cancel(found[1][1]) == [1, 2**60]
        assert frames.read_status(found[2][1]) == (True, 12, 3.5)
        assert frames.read_failures(found[3][1]) == [results[2]]
        first, second = frames.read_parts(found[4][1])
        assert isinstance(first, Part) and isinstance(second, Part)
        assert np.array_equal(first.rows, results[0].rows) and second.rows.tolist() == [[1, 1, 1]]  # type: ignore[union-attr]
        assert (first.id, first.stop, second.id, second.start) == (7, 2, 8, 3)
