"""Replicas in threads of their own: every job once, results in order, exceptions that name the device, no thread left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stub_model import WORDS, StubModel, StubSet, threads_left, write_tokenizer
from stub_model import pooling as stub_pooling

from ftbert.text import CallersThread, ReplicaThreads, compute_windows, embedding, text_options

SHARED_FIXTURE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECONDS = 30  # after which a test that waits for another thread fails


class Replica(SimpleNamespace):
    """Remembers its jobs."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=torch.device(device), jobs=[])


def run(workers: Any, jobs: Iterator[Any] | list[Any]) -> list[Any]:
    found = []
    with workers:
        for job in jobs:
            found += workers.put(job)
        while more := workers.rest():
            found += more
    return found


def squared(replica: Any, job: int) -> Callable[[], int]:
    replica.jobs.append(job)
    return lambda: job * job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("stub") / "model")


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.ftbert, "pooling", stub_pooling, raising=False)


@settings(max_examples=60, deadline=None)
@given(jobs=st.lists(st.integers()), count=st.integers(1, 4), threads=st.integers(1, 8))
def test_every_job_is_done_once(jobs: list[int], count: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        replicas = [Replica() for _ in range(count)]
        found = run(ReplicaThreads(replicas, squared), jobs)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert sorted(found) == sorted((job, job * job) for job in jobs)
    assert sorted(job for one in replicas for job in one.jobs) == sorted(jobs)
    assert threads_left() == 0
    assert run(CallersThread(Replica(), squared), jobs) == [(job, job * job) for job in jobs]


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 4), jobs=st.integers(1, 40), fails=st.integers(0, 39), late=st.booleans())
def test_an_exception_ends_the_others_after_their_job(count: int, jobs: int, fails: int, late: bool) -> None:
    """late: where the result is waited for."""
    replicas, after = [Replica() for _ in range(count)], list[int]()

    def failing(_: Any, job: int) -> Callable[[], int]:
        if workers._stopped.is_set():
            after.append(job)

        def fail() -> int:
            raise ValueError(f"job {job} failed")

        if job == fails and not late:
            fail()
        return fail if job == fails else lambda: job

    workers = ReplicaThreads(replicas, failing)
    if fails < jobs:
        with pytest.raises(ValueError, match=f"^cpu: job {fails} failed$"):
            run(workers, list(range(jobs)))
        assert len(after) < count, "each of the others ends the job that it was about to begin"
    else:
        assert len(run(workers, list(range(jobs)))) == jobs
    assert threads_left() == 0


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError, "^cpu: no memory$"),
        (OSError(2, "No such file"), RuntimeError, r"^cpu: FileNotFoundError: \[Errno 2\] No such file$"),
        (KeyError("word"), RuntimeError, "^cpu: KeyError: 'word'$"),
        (AssertionError(), RuntimeError, "^cpu: AssertionError: $"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_the_error_names_the_device(error: BaseException, kind: type[BaseException], words: str) -> None:
    def failing(_: Any, __: int) -> Callable[[], int]:
        raise error

    with pytest.raises(kind, match=words) as raised:
        run(ReplicaThreads([Replica(), Replica()], failing), [1, 2, 3])
    assert raised.value is error or raised.value.__cause__ is error
    assert threads_left() == 0


def test_one_job_is_one_thread() -> None:
    names: list[str] = []

    def named(replica: Any, _: int) -> Callable[[], None]:
        names.append(threading.current_thread().name)
        return lambda: None

    replicas = [Replica() for _ in range(3)]
    with ReplicaThreads(replicas, named) as workers:
        workers.put(1)
        assert len(workers.rest()) == 1 and workers.rest() == []
    assert names == ["ftbert-replica-cpu"]


def test_a_slow_replica_gets_less() -> None:
    """It ends its first job when the other one has done most of them, which began once it had that job."""
    replicas, began, done, most = [Replica(), Replica()], threading.Event(), threading.Event(), 30

    def work(replica: Any, job: int) -> Callable[[], int]:
        replica.jobs.append(job)
        if replica is replicas[0]:
            began.set()
            assert done.wait(SECONDS)
        else:
            assert began.wait(SECONDS)
        if len(replica.jobs) == most:
            done.set()
        return lambda: job

    found = run(ReplicaThreads(replicas, work), list(range(40)))
    assert len(found) == 40 and len(replicas[1].jobs) >= most and 1 <= len(replicas[0].jobs) <= 40 - most


def test_a_gpu_has_its_next_jobs_before_the_first_is_done() -> None:
    """Three are started, then the oldest is waited for."""
    replica, launched, fetched, all_there = Replica("cuda:0"), list[int](), list[tuple[int, int]](), threading.Event()

    def launch(_: Any, job: int) -> Callable[[], int]:
        assert all_there.wait(SECONDS)
        launched.append(job)

        def fetch() -> int:
            fetched.append((job, len(launched)))
            return job

        return fetch

    with ReplicaThreads([replica], launch) as workers:
        assert not any(workers.put(job) for job in range(3))
        all_there.set()
        found = [workers.rest() for _ in range(3)]
    assert found == [[(job, job)] for job in range(3)] and fetched == [(job, 3) for job in range(3)]


def work_of(model: Any, **given: Any) -> Any:
    return embedding(model, text_options(model, **given))


TEXT = st.lists(st.sampled_from(WORDS[4:]), max_size=12).map(" ".join)


@SHARED_FIXTURE
@given(texts=st.lists(TEXT, max_size=60), count=st.integers(1, 4), most=st.integers(1, 40), fails=st.none() | st.integers(0, 9))
def test_a_set_encodes_as_one(pooled: None, folder: Path, texts: list[str], count: int, most: int, fails: int | None) -> None:
    """Bit for bit, in order; a replica that raises ends the call, and the next one works."""
    alone, replicas = StubModel(folder), [StubModel(folder) for _ in range(count)]
    together = StubSet(replicas)
    want = alone.encode(texts, max_tokens=most)
    if fails is not None:
        replicas[-1].fail_at = fails
        with contextlib.suppress(RuntimeError):
            got = together.encode(texts, max_tokens=most)
            assert len(replicas[-1].calls) <= fails and np.array_equal(got, want)
        replicas[-1].fail_at = -1
    for one in replicas:
        one.calls.clear()
    assert np.array_equal(together.encode(texts, max_tokens=most), want)
    assert np.array_equal(together.encode((text for text in texts), max_tokens=most), want)
    assert sorted(call for one in replicas for call in one.calls) == sorted(2 * alone.calls)
    assert threads_left() == 0


@SHARED_FIXTURE
@given(sizes=st.lists(st.integers(0, 9), max_size=20), count=st.integers(2, 3), closed=st.none() | st.integers(0, 20))
def test_windows_come_in_order(pooled: None, folder: Path, sizes: list[int], count: int, closed: int | None) -> None:
    """Empty ones too, and a caller may stop early."""
    model = StubSet([StubModel(folder) for _ in range(count)])
    texts = [[f"{WORDS[4 + size]} cat"] * size for size in sizes]
    found = []
    with contextlib.closing(compute_windows(model, enumerate(texts), work_of(model, max_tokens=8))) as windows:
        for done in windows:
            found.append((done.item, len(done.results), done.tokens))
            if len(found) == closed:
                break
    want = [(place, size, 4 * size) for place, size in enumerate(sizes)]
    assert found == (want[:closed] if closed else want)
    assert threads_left() == 0


def test_a_replica_that_hangs_holds_up_a_few_windows(pooled: None, folder: Path) -> None:
    """What is read meanwhile does not pile up in memory."""
    replicas = [StubModel(folder) for _ in range(2)]
    model, drawn, seen = StubSet(replicas), list[int](), list[int]()
    forward, began = StubModel.forward_packed, threading.Event()

    def hanging(*args: Any, **given: Any) -> torch.Tensor:
        if not began.is_set():
            began.set()
            time.sleep(0.5)
            seen.append(len(drawn))
        return forward(replicas[0], *args, **given)

    def waiting(*args: Any, **given: Any) -> torch.Tensor:
        assert began.wait(SECONDS)
        return forward(replicas[1], *args, **given)

    replicas[0].forward_packed, replicas[1].forward_packed = hanging, waiting  # type: ignore[method-assign]

    def source() -> Iterator[tuple[int, list[str]]]:
        for place in range(200):
            drawn.append(place)
            yield place, ["the cat"]

    found = [done.item for done in compute_windows(model, source(), work_of(model))]
    assert found == list(range(200)) and seen[0] < 30


def test_callers_in_several_threads(pooled: None, folder: Path) -> None:
    model, alone = StubSet([StubModel(folder, 0.001) for _ in range(2)]), StubModel(folder)
    texts = [f"{WORDS[4 + i % 12]} cat {WORDS[4 + i % 5]}" for i in range(40)]
    want, wrong = alone.encode(texts), list[int]()

    def call(number: int) -> None:
        if not np.array_equal(model.encode(texts, max_tokens=5 + number), want):
            wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong and threads_left() == 0
