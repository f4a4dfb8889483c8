"""Workers and engines as processes: kills, drains, disconnects, and answers that are never swapped."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Served, as_command, in_thread
from served_load import TEXTS, Load

import ftbert
from ftbert.server import Settings
from ftbert.server.loading import load_engine
from ftbert.server.metrics import Row
from ftbert.server.supervisor import check_paths, default_workers

psutil = pytest.importorskip("psutil")

@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    return ftbert.load(folder).encode(TEXTS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the servers of this file make their folders."""
    places = tmp_path_factory.mktemp("places")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(places))
        yield places


@pytest.fixture(scope="module")
def server(folder: Path, places: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two workers, two engines on one device."""
    arguments = [str(folder), "--workers", "2", "--device", "cpu,cpu", "--batch-tokens", "256"]
    with as_command(tmp_path_factory.mktemp("log"), *arguments) as one:
        yield one


@pytest.fixture(scope="module")
def small(folder: Path, places: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A worker and an engine."""
    with as_command(tmp_path_factory.mktemp("log"), str(folder), "--workers", "1", "--batch-tokens", "256") as one:
        yield one


def children(server: Served, role: str) -> list[Any]:
    """Workers import no torch: they are the small ones."""
    assert server.process is not None
    chosen = []
    for one in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it was killed
            if any("libtorch" in mapped.path for mapped in one.memory_maps()) == (role == "engine"):
                chosen.append(one)
    return chosen


def start(server: Served, vectors: np.ndarray, clients: int = 4, most: int = 1 << 30) -> list[Load]:
    load = [Load(server.port, vectors, seed, most, server.key) for seed in range(clients)]
    for one in load:
        one.start()
    return load


def finish(load: list[Load]) -> dict[int, int]:
    """Statuses of all. No answer was wrong."""
    for one in load:
        one.stop = True
    for one in load:
        one.join(30)
        assert not one.is_alive()
    assert sum(one.wrong for one in load) == 0
    return {status: sum(one.statuses.get(status, 0) for one in load) for status in {s for one in load for s in one.statuses}}


def test_answers_are_never_swapped(server: Served, vectors: np.ndarray) -> None:
    load = start(server, vectors, clients=8, most=400)
    for one in load:
        one.join(60)
    assert finish(load) == {200: 3200}
    assert sum(one.lost + one.refused for one in load) == 0


def test_metrics_are_those_of_all_processes(server: Served, vectors: np.ndarray) -> None:
    def count() -> int:
        lines = server.call("GET", "/metrics").body.decode().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("te_embed_success{"))

    before = count()
    for _ in range(20):
        server.post("/embed", {"inputs": TEXTS[:3]})
    assert count() - before == 60
    assert {count() for _ in range(10)} == {before + 60}  # whichever worker is asked


def test_a_killed_worker_hurts_its_own_connections_only(server: Served, vectors: np.ndarray) -> None:
    load = start(server, vectors)
    time.sleep(0.3)
    victim, other = children(server, "worker")
    victim.kill()
    time.sleep(1.0)
    began = time.monotonic()
    while len(children(server, "worker")) < 2:
        assert time.monotonic() - began < 60  # 3 s on a quiet machine
        time.sleep(0.05)
    time.sleep(0.5)
    statuses = finish(load)
    assert set(statuses) <= {200, 503}
    assert all(one.lost <= 2 for one in load)  # a second time where it connects before the dead worker's socket is gone
    assert other.is_running()
    server.wait_ready()


def test_a_killed_engine_is_503_at_once_and_comes_back(server: Served, vectors: np.ndarray) -> None:
    load = start(server, vectors)
    time.sleep(0.3)
    victim = children(server, "engine")[0]
    victim.kill()
    time.sleep(1.5)
    statuses = finish(load)
    assert set(statuses) <= {200, 503} and statuses[200] > 0
    assert sum(one.lost + one.refused for one in load) == 0
    server.wait_ready(60)
    began = time.monotonic()
    while len(children(server, "engine")) < 2:
        assert time.monotonic() - began < 60
        time.sleep(0.2)


def test_a_stopped_process_is_replaced(small: Served) -> None:
    """Its connections would wait for ever; one that is stopped for seconds goes on."""
    assert small.log is not None
    for ended, role in enumerate(("worker", "engine")):
        (victim,) = children(small, role)
        victim.suspend()
        time.sleep(2.0)
        victim.resume()
        small.wait_ready()
        assert victim.is_running() and small.log.read_text().count("ending it") == ended
        victim.suspend()
        with socket.create_connection(("127.0.0.1", small.port), timeout=60) as client:
            client.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            if role == "worker":
                with contextlib.suppress(ConnectionError):
                    assert client.recv(1) == b""  # closed, not kept waiting
        assert not psutil.wait_procs([victim], timeout=60)[1]
        small.wait_ready()
        assert small.post("/embed", {"inputs": "word1"})
        assert small.log.read_text().count("ending it") == ended + 1


def test_health_with_a_stopped_engine(small: Served) -> None:
    """One that answers no more is noticed; /live is not about it. Going on is not a reason to end."""
    (engine,) = children(small, "engine")
    engine.suspend()
    time.sleep(2.5)
    assert small.call("GET", "/health").status == 503
    assert small.call("GET", "/live").status == 200
    reply = small.call("POST", "/embed", {"inputs": "a"})
    assert reply.status == 503 and reply.headers["retry-after"]
    assert small.process is not None
    supervisor = psutil.Process(small.process.pid)
    supervisor.suspend()
    time.sleep(0.3)
    supervisor.resume()
    engine.resume()
    small.wait_ready(10)
    assert children(small, "engine") == [engine]


def test_no_folder_stays(folder: Path, small: Served, places: Path, tmp_path: Path) -> None:
    """The children of a killed server end with it and remove its folder; where they were killed too, the next server
    does. Nobody removes a folder of other owners. The last test of `small`, which it ends."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "supervisor.lock").touch()
    (places / "ftbert-serve-link").symlink_to(elsewhere)
    (other := places / "ftbert-serve-other").mkdir()  # nothing says that it is ours
    before = set(places.iterdir())  # also that of `server`, which lives

    with as_command(tmp_path, str(folder), "--workers", "1", "--batch-tokens", "256") as two:
        assert before < (both := set(places.iterdir())) and len(both) == len(before) + 1  # who lives is left alone
        assert small.post("/embed", {"inputs": "word1"}) and two.post("/embed", {"inputs": "word1"})
        assert small.process is not None and two.process is not None
        family = psutil.Process(small.process.pid).children()
        small.process.kill()
        small.process.wait()
        assert not psutil.wait_procs(family, timeout=10)[1]
        kept = before & (left := set(places.iterdir()))
        assert len(kept) == len(before) - 1 and len(left) == len(before)
        family = psutil.Process(two.process.pid).children()
        for child in family:
            child.suspend()  # so that none removes it
        two.process.kill()
        for child in family:
            child.kill()
        psutil.wait_procs(family, timeout=10)
        assert set(places.iterdir()) == left
    with as_command(tmp_path, str(folder), "--workers", "1", "--batch-tokens", "256", ready=False):
        (third,) = set(places.iterdir()) - kept
        assert third not in both
    assert set(places.iterdir()) == kept
    assert elsewhere.exists() and (elsewhere / "supervisor.lock").exists() and other.exists()


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (4, 3), (8, 6), (9, 7), (10, 8), (12, 9), (16, 12), (96, 12)])
def test_workers_leave_cores_for_engines(cores: int, workers: int) -> None:
    assert default_workers(cores) == workers


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_log_says_what_happens(folder: Path, tmp_path: Path, vectors: np.ndarray, workers: str) -> None:
    """A line for a start, a signal, an end, an error of ours; on request one for each answer. Never a text or a key.
    SIGTERM loses no accepted request."""
    arguments = ["--workers", workers, "--batch-tokens", "256", "--access-log", "--json-output", "--api-key", "geheim"]
    with as_command(tmp_path, f"tiny={folder}", *arguments, ready=False) as server:
        assert server.call("GET", "/live").status == 200  # "listening" is said when it listens
        server.wait_ready()
        server.key = "geheim"
        reply = server.call("POST", "/embed?key=geheim&text=secret", {"inputs": ["secret"]})
        assert reply.status == 200
        assert server.call("POST", "/secretless", {"inputs": "secret"}).status == 404
        late = server.call("POST", "/tokenize", {"inputs": "secret " * 1000}, {"x-request-timeout": "0.000001"})
        assert late.status == 503
        sigterm(server, vectors)
        assert server.log is not None
        text = server.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    embed = next(one for one in lines if one.get("path") == "/embed")
    assert (embed["method"], embed["status"], embed["bytes"], embed["model"]) == ("POST", 200, len(reply.body), "tiny")
    assert 0 < embed["seconds"] < 30
    assert [one["status"] for one in lines if one.get("path") == "/secretless"] == [404]
    words = [one["message"] for one in lines]
    errors = [one for one in lines if one["level"] == "error"]
    assert len(errors) == 1 and errors[0]["message"].startswith("POST /tokenize: 503")
    assert not [one for one in lines if one.get("path") in ("/health", "/live")]  # probes
    for phrase in ("listening on", "tiny is ready", "SIGTERM: shutting down", "ended with exit code 0"):
        assert sum(phrase in one for one in words) == 1, phrase
    assert "geheim" not in text and "secret" not in text.replace("/secretless", "")


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for workers in ("0", "1"):
        with as_command(tmp_path, str(tmp_path / "empty"), "--workers", workers, ready=False) as server:
            assert server.process is not None and server.process.wait(60) == 1
            assert "empty" in server.log.read_text() and "Traceback" not in server.log.read_text()  # type: ignore[union-attr]


def test_a_panic_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Rust's, which is no Exception: a start ends with its words, not with a traceback; a request is answered."""

    def panics(*_: Any, **__: Any) -> None:
        raise type("PanicException", (BaseException,), {})("index out of bounds")

    monkeypatch.setattr("ftbert.server.info_routes.version", panics)
    with in_thread(("m", folder)) as server:
        assert server.call("GET", "/version").status == 500
    monkeypatch.setattr("ftbert.model.load", panics)
    with pytest.raises(RuntimeError, match="index out of bounds"):
        load_engine(Settings((("m", str(folder)),)), 0, "cpu", None, Row())


def test_what_is_wrong_before_it_listens_is_one_line(folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for source, words in ((folder, f"127.0.0.1:{port}: Address already in use"), (tmp_path / "none", "")):
            command = [sys.executable, "-m", "ftbert", "serve", str(source), "--port", port]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            words = words or f"{source}: expected a model folder (with config.json and weights) or a hub id"
            assert done.returncode == 1 and done.stderr == f"ftbert: error: {words}\n"


def test_a_path_from_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    source = f"~/{folder.name}"
    check_paths([("m", source)])
    with pytest.raises(FileNotFoundError, match="~/none: expected a model folder"):
        check_paths([("m", "~/none")])
    engine, about = load_engine(Settings((("m", source),)), 0, "cpu", None, Row())
    engine.close()
    assert about.name == "m"


def test_one_process(folder: Path, tmp_path: Path, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log holds no text and no key. SIGTERM: it still answers for --drain-delay; a second one ends it at once."""
    monkeypatch.setenv("CORS_ALLOW_ORIGIN", "*")
    arguments = [str(folder), "--workers", "0", "--json-output", "true", "--api-key", "geheim", "--drain-delay", "30"]
    with as_command(tmp_path, *arguments) as server:
        server.key = "geheim"
        reply = server.call("POST", "/embed", {"inputs": "word1 secret"}, {"origin": "https://a.example"})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")
        server.call("POST", "/embed", b'{"inputs": "secret')
        server.call("POST", "/embed", {"inputs": "secret", "prompt_name": "secret"})
        assert server.process is not None and server.log is not None
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.call("GET", "/health").status == 503
        assert server.call("POST", "/embed", {"inputs": "a"}).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) != 0
        lines = server.log.read_text().splitlines()
    assert all(json.loads(line)["message"] for line in lines)
    assert not any(word in line for line in lines for word in ("secret", "geheim"))


def sigterm(server: Served, vectors: np.ndarray) -> None:
    load = start(server, vectors, clients=6)
    time.sleep(0.5)
    assert server.process is not None and server.log is not None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(40) == 0
    assert set(finish(load)) == {200}
    assert sum(one.lost for one in load) == 0
    assert "Traceback" not in server.log.read_text()


def test_sigterm_loses_no_accepted_request(server: Served, vectors: np.ndarray) -> None:
    """The last test of this file: it ends the server that the others use."""
    server.wait_ready(60)
    sigterm(server, vectors)


def test_what_packages_say_is_json_too() -> None:
    """As the exporter of traces, without its collector, and Python's warnings."""
    code = (
        "import logging, warnings; from ftbert.server.logs import LOG, set_up; set_up(True); LOG.info('one'); "
        "logging.getLogger('opentelemetry.sdk').warning('two'); warnings.warn('three')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in found.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "warning"] and "three" in lines[2]["message"]
