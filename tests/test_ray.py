"""The examples for Ray on a cluster of two nodes, processes of this machine: encode's numbers, one run after another, a
worker that is killed. They run in a Python of their own that has Ray; this one has none."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from served import ROOT, Served

import ftbert

SECONDS = 300.0
TEXTS = ["word1 word2 a b", "word3", "the cat word9 word8 word7", "word4 word5!"]
# Two nodes without a dashboard, each with room for an actor of one CPU; its address; until standard input ends.
NODES = """
import sys
from ray.cluster_utils import Cluster
node = {"node_ip_address": "127.0.0.1", "num_cpus": 1, "num_gpus": 0}
made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
try:
    made.add_node(**node)
    print(made.address, flush=True)
    sys.stdin.read()
finally:
    made.shutdown()
"""


@dataclass(frozen=True)
class Nodes:
    """A cluster on loopback alone, and the Python and the environment of what runs there."""

    python: str
    environment: dict[str, str]
    address: str


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    python = os.environ.get("FTBERT_TEST_RAY_PYTHON")
    if not python:
        pytest.skip("FTBERT_TEST_RAY_PYTHON names no Python with Ray (make ray-test makes one)")
    with tempfile.TemporaryDirectory(prefix="ftbert-ray-", ignore_cleanup_errors=True) as files:  # its sockets: a short name
        environment = os.environ | {
            "RAY_TMPDIR": files, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1",
            # Else a driver takes 127.0.0.1 for this machine's other address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "API_KEY": "a-key", "BATCH_TOKENS": "512",  # else each replica times sizes for 5 s
            # Seconds; by default a proxy that imports for 15 is killed.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        }  # fmt: skip
        log = Path(files) / "nodes.log"
        with log.open("wb") as errors:
            nodes = subprocess.Popen(
                [python, "-c", NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        try:
            assert nodes.stdout is not None and nodes.stdin is not None
            address = nodes.stdout.readline().decode().strip()
            assert address, log.read_text()
            yield Nodes(python, environment, address)
        finally:
            nodes.communicate(timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def started(cluster: Nodes, log: Path, example: str, *arguments: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [cluster.python, str(ROOT / "examples" / example), *map(str, arguments), "--address", cluster.address]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=cluster.environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(found: Callable[[], Any], process: subprocess.Popen[bytes], log: Path) -> Any:
    """What `found` gives first that is not nothing."""
    end = time.monotonic() + SECONDS
    while not (what := found()):
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    return what


def workers() -> Iterator[psutil.Process]:
    """Ray's processes that were started from here."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::"):
                yield process


def holder(path: Path) -> psutil.Process | None:
    """The worker that has this folder open."""
    for process in workers():
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) == str(path) for fd in Path(f"/proc/{process.pid}/fd").iterdir()):
                return process
    return None


def test_embed_survives_a_killed_actor_and_goes_on(cluster: Nodes, folder: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    texts = {name: [f"{name} word{i % 40} {i}" for i in range(count)] for name, count in (("a", 40_000), ("b", 50), ("c", 9))}
    sources = [tmp_path / f"{name}.txt" for name in texts]
    for source, lines in zip(sources, texts.values(), strict=True):
        source.write_text("\n".join(lines) + "\n")
    with started(cluster, log, "ray_embed.py", folder, out, *sources, "--concurrency", 2) as process:
        manifest = out / "a.txt.npy.part" / "manifest.json"
        until(manifest.exists, process, log)
        killed = holder(manifest.parent)
        assert killed is not None, log.read_text()
        killed.kill()
        assert process.wait(SECONDS) == 0, log.read_text()
    said = next(line for line in log.read_text().splitlines() if line.startswith(f"{out}/a.txt.npy: 40000 records"))
    assert int(said.split(", ")[1].split()[0]) >= 8192  # the work of the actor that died was not done again
    model = ftbert.load(folder)
    for name, lines in texts.items():
        np.testing.assert_allclose(np.load(out / f"{name}.txt.npy"), model.encode(lines), atol=3e-6)
    assert sorted(path.name for path in out.iterdir()) == ["a.txt.npy", "b.txt.npy", "c.txt.npy"]

    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "word1"}\nno json\n')
    (also := tmp_path / "d.txt").write_text("word1\n")
    with started(cluster, log, "ray_embed.py", folder, out, *sources, bad, also) as process:
        assert process.wait(SECONDS) == 1
    assert "2 files to embed, 3 are there" in log.read_text()
    assert f"{out}/bad.jsonl.npy: " in log.read_text() and "line 2" in log.read_text()
    assert {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != "d.txt.npy"} == before
    np.testing.assert_allclose(np.load(out / "d.txt.npy"), model.encode(["word1"]), atol=3e-6)


def test_serve_answers_as_ftbert_serve_and_survives_a_killed_replica(cluster: Nodes, folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Served(port, key="a-key")

    def answers() -> bool:
        try:
            return server.call("GET", "/health").status == 200
        except OSError:
            return False

    options = ("--replicas", 2, "--num-cpus", 0.5, "--port", port)
    with started(cluster, log, "ray_serve.py", folder, *options) as process:
        until(answers, process, log)
        vectors = ftbert.load(folder).encode(TEXTS)
        check(server, vectors)
        assert server.call("POST", "/embed", {"inputs": 3}).status == 422
        assert server.call("POST", "/embed", b"{").status == 400
        assert server.call("GET", "/no/such/path").status == 404
        assert Served(port).call("GET", "/info").status == 401
        wrong = server.call("POST", "/rerank", {"query": "a", "texts": ["b"]})
        assert wrong.status == 424 and "not a re-ranker" in wrong.json()["error"]

        dropped, gone = re.compile(rb'te_request_failure{err="dropped",model="[^"]+",device="cpu"} (\d+)\n'), count(1)

        def counts_who_goes() -> bool:
            """Replicas answer in turns; a fast machine has computed the texts before the client goes."""
            clients = next(gone)
            go_away(server, 0.5 / clients)
            pages = (server.call("GET", "/metrics").body for _ in range(100))
            counted = max((int(found[1]) for page in pages if (found := dropped.search(page))), default=0)
            assert counted <= clients
            return counted > 0

        until(counts_who_goes, process, log)

        # Before both replicas are there one that dies ends the deployment.
        until(lambda: "Application 'default' is ready" in log.read_text(), process, log)
        replicas = until(lambda: two(serving()), process, log)
        replicas[0].kill()
        until(lambda: two([one for one in serving() if one != replicas[0]]), process, log)
        until(answers, process, log)
        check(server, vectors)


def go_away(server: Served, seconds: float) -> None:
    """A client that asks for much work and does not wait for it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"inputs": ["word1 " * 126] * 2048})
    connection.request("POST", "/embed", body, {"content-type": "application/json", "authorization": "Bearer a-key"})
    time.sleep(seconds)
    connection.close()


def serving() -> list[psutil.Process]:
    return [process for process in workers() if "ServeReplica" in process.cmdline()[0]]


def two(found: list[psutil.Process]) -> list[psutil.Process] | None:
    return found if len(found) == 2 else None


def check(server: Served, vectors: np.ndarray[Any, Any]) -> None:
    for _ in range(8):  # more than there are replicas
        np.testing.assert_allclose(server.post("/embed", {"inputs": TEXTS}), vectors, atol=3e-5)
    answer = server.post("/v1/embeddings", {"input": TEXTS})["data"]
    np.testing.assert_allclose([one["embedding"] for one in answer], vectors, atol=3e-5)
    one, *others = TEXTS
    found = server.post("/similarity", {"inputs": {"source_sentence": one, "sentences": others}})
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=3e-5)
