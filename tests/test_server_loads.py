"""Servers under load and at their start: disconnects, overload, models that load, one process."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Served, in_thread
from served_load import TEXTS

import ftbert
from ftbert.server.loading import load_engine

psutil = pytest.importorskip("psutil")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    return ftbert.load(folder).encode(TEXTS)  # type: ignore[no-any-return]


def test_disconnects_are_cancelled(folder: Path, vectors: np.ndarray) -> None:
    """What a client no longer waits for leaves the queue, and is counted."""
    with in_thread(("m", folder), batch_tokens=128) as server:
        body = json.dumps({"inputs": ["word1 " * 120] * 1500}).encode()
        head = f"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        clients = []
        for _ in range(4):
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(head.encode() + body)
            clients.append(client)
        until = time.monotonic() + 20
        while metric(server, "te_queue_size") < 1000:
            assert time.monotonic() < until
            time.sleep(0.02)
        until = time.monotonic() + 20
        for client in clients:
            client.close()
        computed = metric(server, "ft_tokens_total")
        while metric(server, "te_queue_size") > 0:
            assert time.monotonic() < until
            time.sleep(0.02)
        server.post("/embed", {"inputs": "word1"})
        assert metric(server, "ft_tokens_total") - computed < 20_000  # of 700,000
        while sum(metric(server, f'te_request_failure{{err="{err}"') for err in ("dropped", "overloaded")) < 4:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert metric(server, 'te_request_failure{err="dropped"') >= 1


def test_what_cannot_be_done_in_time_is_refused_at_once(folder: Path) -> None:
    """By an idle server, with words that say what would fit, and what is said is true."""
    with in_thread(("m", folder), batch_tokens=128) as server:
        rate = server.call("GET", "/info").json()["tokens_per_second"]
        seconds = str(2048 * 126 / rate / 4)
        reply = server.call("POST", "/embed", {"inputs": [[5] * 126] * 2048}, {"x-request-timeout": seconds})
        assert reply.status == 413 and reply.json()["error_type"] == "Validation"
        fit = int(reply.json()["error"].split("at most ")[1].split(" texts")[0])
        assert 200 < fit < 2048 // 4 + 1
        assert len(server.post("/embed", {"inputs": [[5] * 126] * (fit // 4)}, **{"x-request-timeout": seconds})) == fit // 4


_SEES_IMPORTS = """
import sys
from types import SimpleNamespace
from ftbert.server import loading, worker
there = lambda *_: ("transformers.models.auto.tokenization_auto" in sys.modules,)
print(*there())
loading.load_engine = there
link = SimpleNamespace(attach=lambda found: sys.stdout.write(f"{found}\\n"))  # as one, of two threads
metrics = SimpleNamespace(engine=there)
worker._load_all(SimpleNamespace(engines=["cpu"]), [[link], [link]], metrics, None)
"""


def test_one_engine_over_several_ranks(folder: Path) -> None:
    with in_thread(("one", folder), devices=("cpu", "cpu"), parallel="tensor") as server:
        got = server.post("/embed", {"inputs": TEXTS})
    assert np.allclose(got, ftbert.load(folder).encode(TEXTS), atol=1e-5)


def test_threads_that_load_models_find_whole_modules() -> None:
    """Two that import the same one of transformers' at once may find half of it."""
    done = subprocess.run([sys.executable, "-c", _SEES_IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_models_are_loaded_at_once_and_timed_in_turn(folder: Path) -> None:
    both, inside, most = threading.Barrier(2), [], [0]

    def load(settings: Any, which: int, device: str, threads: Any, row: Any, alone: Any) -> Any:
        both.wait(30)  # the other model's loading has begun
        with alone(device):
            inside.append(which)
            time.sleep(0.2)
            most.append(len(inside))
            inside.remove(which)
        return load_engine(settings, which, device, threads, row)

    with in_thread(("one", folder), ("two", folder), load=load) as server:
        for name in ("one", "two"):
            assert server.post("/embed", {"inputs": "word1", "model": name})
    assert most == [0, 1, 1]


def test_tokens_without_a_row_are_refused_in_the_words_of_encode(folder: Path, tmp_path: Path) -> None:
    """Added to the tokenizer, or all of it another model's."""
    added, other = tmp_path / "added", tmp_path / "other"
    for one in (added, other):
        shutil.copytree(folder, one)
    file = json.loads((added / "tokenizer.json").read_text())
    rows = max(file["model"]["vocab"].values()) + 1
    file["added_tokens"].append({**file["added_tokens"][-1], "id": rows, "content": "geheim"})
    (added / "tokenizer.json").write_text(json.dumps(file))
    file["model"]["vocab"] = {token: one + rows * (token != "[PAD]") for token, one in file["model"]["vocab"].items()}
    file["post_processor"] = None
    file["added_tokens"] = [{**one, "id": file["model"]["vocab"].get(one["content"], 3 * rows)} for one in file["added_tokens"]]
    (other / "tokenizer.json").write_text(json.dumps(file))
    models = {"added": added, "other": other}
    with in_thread(*models.items()) as server:
        for name, path in models.items():
            with pytest.raises(ValueError, match="vocabulary has") as wanted:
                ftbert.load(path).encode(["word1 geheim"])
            for body in ({"inputs": "word1 geheim"}, {"inputs": [[1], "word1 geheim"]}):
                reply = server.call("POST", "/embed", {**body, "model": name})
                assert reply.status == 422 and str(wanted.value) in reply.json()["error"]
        assert server.post("/embed", {"inputs": "word1", "model": "added"})


def metric(server: Served, name: str) -> float:
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + ",")))


def test_overload_is_429_with_retry_after_and_nobody_is_dropped(folder: Path, vectors: np.ndarray) -> None:
    with in_thread(("m", folder), batch_tokens=64, max_queue_seconds=0.02) as server:
        found: list[Any] = []

        def ask() -> None:
            for _ in range(20):
                found.append(server.call("POST", "/embed", {"inputs": ["word1 " * 60] * 4}))

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        statuses = [reply.status for reply in found]
        assert len(statuses) == 320 and set(statuses) <= {200, 429} and 200 in statuses
        assert all(reply.headers["retry-after"].isdigit() for reply in found if reply.status == 429)
