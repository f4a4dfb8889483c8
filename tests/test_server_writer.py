"""The engine's writer without a model, and its frames: who joins, who leaves, who is refused; and processes with one."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generation_servers import joined, streamed
from language_models import random_llama
from served import as_command
from stub_generation import Compute, Steps, request, until

import ftbert
from ftbert.server import frames
from ftbert.server.batcher import Limits
from ftbert.server.engine import Engine
from ftbert.server.job import Failure, Job, Kind, Result, Writing, Written, WrittenToken
from ftbert.server.metrics import PLACES, Row
from ftbert.server.writer import Writer

psutil = pytest.importorskip("psutil")


class Owner:
    def __init__(self) -> None:
        self.found: list[Result] = []

    def deliver(self, results: list[Result]) -> None:
        self.found += results

    def texts(self) -> dict[int, int]:
        """Tokens of each job."""
        counts: dict[int, int] = {}
        for one in self.found:
            if isinstance(one, Written):
                counts[one.id] = counts.get(one.id, 0) + len(one.tokens)
        return counts


def job(one: int, owner: Any, most: int = 3, seconds: float = 60.0) -> Job:
    ids, offsets = np.array([4, 5], dtype=np.int32), np.array([0, 2], dtype=np.int64)
    deadline = time.monotonic() + seconds
    return Job(one, Kind.WRITTEN, ids, offsets, deadline, writing=Writing(max_new_tokens=most), owner=owner)


def made(slots: int = 2) -> tuple[Engine, Steps, Row]:
    steps, row = Steps(slots), Row()
    return Engine(Compute(), Limits(512), 1e6, row, Writer(steps, request, slots, row)), steps, row


def test_texts_join_leave_and_are_counted() -> None:
    engine, steps, row = made()
    owner, other = Owner(), Owner()
    steps.go.clear()
    assert engine.submit([job(1, owner), job(2, owner, 10**6), job(1, other), job(3, owner)]) == []
    assert row.cells[PLACES["ft_generation_slots_used"]] == row.cells[PLACES["ft_generation_waiting"]] == 2
    assert engine.queued_tokens == 8
    steps.go.set()
    until(lambda: other.texts().get(1) == 3 and owner.texts().get(3) == 3)
    engine.cancel(owner, [2, 77])
    until(lambda: not steps.texts)
    time.sleep(0.01)
    seen = owner.texts()[2]
    time.sleep(0.03)
    assert owner.texts() == {1: 3, 2: seen, 3: 3} and engine.queued_tokens == 0
    assert [one.end for one in other.found if isinstance(one, Written)] == ["", "", "length"]
    engine.submit([job(4, owner, 10**6)])
    engine.forget(owner)
    until(lambda: not steps.texts)
    assert engine.ready
    engine.close()
    assert engine.submit([job(5, owner)])[0][1].status == 503


def test_a_full_engine_refuses_what_would_wait_too_long() -> None:
    engine, steps, _ = made(slots=1)
    owner = Owner()
    steps.pause = 0.01
    engine.submit([job(1, owner, 30)])
    until(lambda: owner.texts().get(1) == 30)
    engine.submit([job(2, owner, 10**6)])
    (refused,) = engine.submit([job(3, owner, seconds=0.1)])
    assert refused[1].status == 429 and refused[1].retry_after >= 1
    assert engine.submit([job(4, owner, seconds=5)]) == []
    assert engine.submit([job(5, owner, seconds=-1)])[0][1].status == 503
    statuses = [failure.status for _, failure in engine.submit([job(i, owner, seconds=10**6) for i in range(10, 200)])]
    assert statuses == [429] * len(statuses) and len(statuses) == 190 - (128 - 1)
    engine.close()


def test_a_step_that_fails_ends_its_texts_alone() -> None:
    engine, steps, _ = made()
    owner = Owner()
    steps.fails = 2
    engine.submit([job(1, owner, 100), job(2, owner, 100), job(3, owner, 100)])
    until(lambda: sum(isinstance(one, Failure) for one in owner.found) == 3)
    assert {one.status for one in owner.found if isinstance(one, Failure)} == {424}
    steps.fails = -1
    engine.submit([job(4, owner)])
    until(lambda: owner.texts().get(4) == 3)
    assert engine.ready
    engine.close()


def test_what_the_model_cannot_do_is_said() -> None:
    def refuse(ids: list[int], writing: Writing) -> Any:
        raise ValueError("top_p must be above 0")

    row = Row()
    engine = Engine(Compute(), Limits(512), 1e6, row, Writer(Steps(1), refuse, 1, row))
    ((_, failure),) = engine.submit([job(1, Owner())])
    assert (failure.status, failure.words) == (422, "top_p must be above 0")
    engine.close()


def test_frames() -> None:
    writing = Writing(max_new_tokens=7, temperature=0.5, logit_bias={3: -1.5}, seed=1 << 60, logprobs=2)
    sent = job(9, None)
    sent.writing = writing
    tokens = [WrittenToken(5, -0.25, ((5, -0.25), (6, -3.5))), WrittenToken(7)]
    told: list[Result] = [Written(9, tokens, "eos", WrittenToken(2, -0.5), 4, 0.5), Failure(3, 424, "x"), Written(10, [])]
    found = list(frames.Reader().feed(frames.submit(sent) + frames.results(told)))
    assert [kind.name for kind, _ in found] == ["SUBMIT", "FAILURES", "TOKENS"]
    got = frames.read_submit(found[0][1])
    assert (got.writing, got.ids.tolist(), got.kind, got.deadline) == (writing, [4, 5], Kind.WRITTEN, sent.deadline)
    assert frames.read_tokens(found[2][1]) == [told[0], told[2]]


def test_in_processes(tmp_path: Path) -> None:
    """A worker and an engine: the library's texts, a killed engine in the middle of a stream, and a drain."""
    folder = random_llama(tmp_path / "m", max_position_embeddings=4096)
    want = ftbert.load(folder).generate(["hello"], max_new_tokens=20)[0]
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 20}
    long = json.dumps({"prompt": "hello", "ignore_eos": True, "max_tokens": 4000, "stream": True, "logprobs": 20}).encode()

    def stream(port: int) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", port), timeout=20)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(long), long))
        assert client.recv(10) == b"HTTP/1.1 2"
        return client

    def rest(client: socket.socket) -> bytes:
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while not found.endswith(b"\r\n0\r\n\r\n") and (piece := client.recv(1 << 16)):
                found += piece
        return found

    with as_command(tmp_path, f"tiny={folder}", "--workers", "1", "--generation-slots", "2", "--batch-tokens", "256", "--shutdown-timeout", "1") as server:
        assert server.post("/v1/completions", body)["choices"][0]["text"] == want
        assert joined(streamed(server, "/v1/completions", body)) == want
        assert server.process is not None
        engines = [one for one in psutil.Process(server.process.pid).children() if any("libtorch" in m.path for m in one.memory_maps())]
        with stream(server.port) as client:
            engines[0].send_signal(signal.SIGKILL)
            found = rest(client)
        assert found.endswith(b"\r\n0\r\n\r\n") and b"the engine has stopped" in found
        server.wait_ready()
        assert server.post("/v1/completions", body)["choices"][0]["text"] == want
        with stream(server.port) as client:
            server.process.terminate()
            found = rest(client)
        assert found.endswith(b"\r\n0\r\n\r\n") and (b"[DONE]" in found or b"the server is shutting down" in found)
        assert server.process.wait(20) == 0
