"""The server for hours: fuzzed requests and bytes, checksums, disconnects, memory; then SIGTERMs under load, idle connections and
slow senders.

    PYTHONPATH=.:tests python tests/soak_server.py --requests 1000000 --sigterms 100 --idle 10000 --slow 1000

Exits with 1 where a request got a 5xx that no limit explains, an answer was wrong, a connection was lost, memory grew by
more than --most-mb, a SIGTERM lost an accepted request, an idle connection takes more than 30 kB, or a slow sender is not
closed in time. What slow senders cost others is printed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from conftest import VOCAB_WORDS, make_bert
from served import Served, as_command
from served_load import TEXTS, Load

import ftbert

PATHS = ["/embed", "/embed_all", "/similarity", "/predict", "/rerank", "/tokenize", "/decode", "/v1/embeddings", "/v1/rerank",
         "/classify", "/score", "/pooling", "/", "/info", "/metrics", "/nothing", "/v1/embed", "/v2/embed", "/api/embed",
         "/api/embeddings", "/openai/deployments/m/embeddings"]  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 10**30, 1.5, "", "a", "word1 " * 300, "\x00", "\ud7ff", [], [[]], ["a"], ["a", 1], [1, 2], [[1, 2], "a"],
    {}, {"text": "a"}, {"source_sentence": "a", "sentences": ["b"]}, ["a"] * 40, "left", "base64", [[99]],
    [{"text": "a"}], [{"content": [{"type": "text", "text": "a"}]}], ["float", "int8"], "int8", "bytes", "fp8_e4m3", "big",
]  # fmt: skip
KEYS = ["inputs", "input", "query", "texts", "documents", "ids", "truncate", "truncation_direction", "normalize", "dimensions",
        "prompt_name", "raw_scores", "encoding_format", "model", "top_n", "parameters", "data_1", "data_2", "task", "embedding_types", "output_dtype", "embedding_type", "output_dimension",
        "embed_dtype", "endianness", "instruct", "prompt", "options", "max_tokens", "normalized", "truncation"]  # fmt: skip
_HEAD = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_OFFERS = b"upgrade: h2c\r\nconnection: upgrade\r\n"
RAW = [
    _HEAD + b'content-length: 17\r\n\r\n{"inputs":"word"}', _HEAD + _CHUNKED + b'\r\n8\r\n{"inputs\r\n9;a=b\r\n":"word"}\r\n0\r\na: b\r\n\r\n',
    _HEAD + _CHUNKED + _OFFERS + b'\r\n11\r\n{"inputs":"word"}\r\n0\r\n\r\n', b"GET /health HTTP/1.1\r\n\r\n",
    _HEAD + _CHUNKED + b'expect: 100-continue\r\n\r\n11\r\n{"inputs":"word"}\r\n0\r\n\r\n', b"GET /nothing HTTP/1.0\r\n\r\n",
]  # fmt: skip


class Fuzzer(threading.Thread):
    def __init__(self, port: int, vectors: np.ndarray, seed: int, requests: int) -> None:
        super().__init__(daemon=True)
        self._port, self._vectors, self._random, self.left = port, vectors, random.Random(seed), requests
        self.statuses: dict[int, int] = {}
        self.bad: list[str] = []

    def run(self) -> None:
        connection = self._connect()
        while self.left > 0:
            self.left -= 1
            try:
                connection = self._one(connection)
            except (OSError, http.client.HTTPException) as error:
                self.bad.append(f"lost: {type(error).__name__}")
                connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def _one(self, connection: http.client.HTTPConnection) -> http.client.HTTPConnection:
        kind = self._random.random()
        if kind < 0.4:
            rows = [self._random.randrange(len(TEXTS)) for _ in range(self._random.randint(1, 4))]
            status, body = self._call(connection, "POST", "/embed", json.dumps({"inputs": [TEXTS[i] for i in rows]}).encode())
            if status == 200 and not np.allclose(np.array(json.loads(body), np.float32), self._vectors[rows], atol=3e-5):
                self.bad.append("a wrong answer")
            return connection
        if kind < 0.45:  # goes away before the answer
            connection.request("POST", "/embed", json.dumps({"inputs": TEXTS[:20]}), {"content-type": "application/json"})
            connection.close()
            return self._connect()
        if kind < 0.5:
            self._nearly_http()
            return connection
        body = self._body()
        method = self._random.choice(["POST"] * 8 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
        path = self._random.choice(PATHS)
        status, _ = self._call(connection, method, path, body)
        if status >= 500 and status != 503:
            self.bad.append(f"{status} for {method} {path} {body[:200]!r}")
        return connection

    def _nearly_http(self) -> None:
        """Requests with changed bytes, cut anywhere, behind which this side is closed: the server answers and closes."""
        sent = bytearray(b"".join(self._random.choices(RAW, k=self._random.randint(1, 4))))
        for _ in range(self._random.choice([0, 1, 1, 3])):
            sent[self._random.randrange(len(sent))] = self._random.choice(b"\r\n :;0123456789abcdef\x00\xff")
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as one:
            try:
                cut = self._random.randrange(len(sent))
                one.sendall(sent[:cut])
                one.sendall(sent[cut:])
                one.shutdown(socket.SHUT_WR)
                answers = b"".join(iter(lambda: one.recv(65536), b""))
            except TimeoutError:
                raise
            except OSError:  # it was refused, and its second part came too late
                return
        if not answers.startswith(b"HTTP/1.1 ") or b"HTTP/1.1 500" in answers:
            self.bad.append(f"{answers[:100]!r} for {bytes(sent)!r}")

    def _body(self) -> bytes:
        keys = self._random.sample(KEYS, self._random.randint(0, 5))
        body = json.dumps({key: self._random.choice(VALUES) for key in keys}).encode()
        changed = bytearray(body)
        for _ in range(self._random.choice([0, 0, 1, 3])):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)

    def _call(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        found = answer.read()
        self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
        if answer.status >= 400 and method != "HEAD":
            json.loads(found)  # every error is JSON
        return answer.status, found


def resident(server: Served) -> float:
    """MB of all processes."""
    assert server.process is not None
    family = psutil.Process(server.process.pid)
    return sum(one.memory_info().rss for one in (family, *family.children())) / 1e6


def fuzz(options: argparse.Namespace, folder: Path, vectors: np.ndarray) -> list[str]:
    log = Path(tempfile.mkdtemp())
    with as_command(log, str(folder), "--workers", options.workers, "--batch-tokens", "512") as server:
        time.sleep(2.0)
        before = None
        bad: list[str] = []
        statuses: dict[int, int] = {}
        for part in range(10):
            threads = [Fuzzer(server.port, vectors, options.seed * 1000 + part * 100 + i, options.requests // 10 // options.clients)
                       for i in range(options.clients)]  # fmt: skip
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
                bad += thread.bad
                for status, count in thread.statuses.items():
                    statuses[status] = statuses.get(status, 0) + count
            before = before or resident(server)  # after the first tenth: pools and caches are filled
            print(f"{part + 1}0 %: {statuses}, {resident(server):.0f} MB, {len(bad)} bad", flush=True)
        grown = resident(server) - before
        if grown > options.most_mb:
            bad.append(f"memory grew by {grown:.0f} MB")
        assert server.log is not None
        bad += ["a traceback in the log"] * ("Traceback" in server.log.read_text())
        return bad


def sigterms(options: argparse.Namespace, folder: Path, vectors: np.ndarray) -> list[str]:
    bad = []
    for turn in range(options.sigterms):
        log = Path(tempfile.mkdtemp())
        with as_command(log, str(folder), "--workers", options.workers, "--batch-tokens", "512") as server:
            load = [Load(server.port, vectors, turn * 100 + i) for i in range(8)]
            for one in load:
                one.start()
            time.sleep(random.Random(turn).uniform(0.2, 0.6))
            assert server.process is not None
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(40)
            for one in load:
                one.stop = True
            for one in load:
                one.join(30)
            lost, wrong = sum(one.lost for one in load), sum(one.wrong for one in load)
            found = {status for one in load for status in one.statuses}
            if code or lost or wrong or found != {200}:
                bad.append(f"SIGTERM {turn}: exit code {code}, {lost} lost, {wrong} wrong, statuses {found}")
        print(f"SIGTERM {turn + 1}: {len(bad)} bad", flush=True)
    return bad


def idle(options: argparse.Namespace, folder: Path, _: np.ndarray) -> list[str]:
    with as_command(Path(tempfile.mkdtemp()), str(folder), "--workers", options.workers, "--batch-tokens", "512") as server:
        time.sleep(1.0)
        before, held = resident(server), []
        for _ in range(options.idle):
            held.append(connected(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"))
            if not held[-1].recv(4096).startswith(b"HTTP/1.1 200"):
                return ["an idle connection was refused"]
        each = 1e3 * (resident(server) - before) / len(held)
        status = server.call("POST", "/embed", {"inputs": TEXTS[:3]}).status
        print(f"{len(held)} idle connections: {each:.1f} kB each, then a request: {status}", flush=True)
        for one in held:
            one.close()
        return ["an idle connection takes over 30 kB"] * (each > 30) + ["a request failed beside them"] * (status != 200)


def slow(options: argparse.Namespace, folder: Path, _: np.ndarray) -> list[str]:
    """Heads and bodies at a byte a second, beside a client that asks as it always does."""
    with as_command(Path(tempfile.mkdtemp()), str(folder), "--workers", options.workers, "--batch-tokens", "512") as server:
        alone = p99(server, 15.0)
        head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n"
        began = time.monotonic()
        open_ones = {connected(server, head if i % 2 else b"POST /"): 60 if i % 2 else 10 for i in range(options.slow)}
        beside: list[float] = []
        asking = threading.Thread(target=lambda: beside.append(p99(server, 15.0)))
        asking.start()
        late = set()
        while open_ones and time.monotonic() - began < 90:
            time.sleep(1.0)
            for one, limit in list(open_ones.items()):
                if not sent_a_byte(one):
                    one.close()
                    del open_ones[one]
                elif time.monotonic() - began > limit + 5:
                    late.add(one)
        asking.join()
        print(f"{options.slow} slow senders: closed after {time.monotonic() - began:.0f} s, {len(open_ones)} left, {len(late)} late; "
              f"p99 of another client {alone:.2f} ms alone, {beside[0]:.2f} ms beside them", flush=True)  # fmt: skip
        return ["slow senders were not closed in time"] * bool(late or open_ones)


def connected(server: Served, data: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    one.sendall(data)
    return one


def sent_a_byte(one: socket.socket) -> bool:
    """False once the server has answered or closed."""
    try:
        one.recv(1, socket.MSG_DONTWAIT)
        return False
    except BlockingIOError:
        pass  # nothing has come
    except OSError:
        return False
    try:
        one.send(b"x")
    except OSError:
        return False
    return True


def p99(server: Served, seconds: float) -> float:
    """Of a request after the other, milliseconds."""
    times, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.perf_counter()
        server.post("/embed", {"inputs": TEXTS[0]})
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[int(0.99 * len(times))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--sigterms", type=int, default=3)
    parser.add_argument("--idle", type=int, default=200, help="connections; `ulimit -n` must allow them")
    parser.add_argument("--slow", type=int, default=0, help="connections, for 90 seconds")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-mb", type=float, default=50.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bert(vocab_size=len(VOCAB_WORDS)).save_pretrained(folder)
        from transformers import BertTokenizerFast

        (folder / "vocab.txt").write_text("\n".join(VOCAB_WORDS) + "\n", encoding="utf-8")
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        vectors = ftbert.load(folder).encode(TEXTS)
        bad: list[str] = []
        for name, part in {"requests": fuzz, "sigterms": sigterms, "idle": idle, "slow": slow}.items():
            bad += part(options, folder, vectors) if getattr(options, name) else []
    for line in bad[:20]:
        print(line, file=sys.stderr)
    print(f"{options.requests} requests, {options.sigterms} SIGTERMs, {options.idle} idle, {options.slow} slow: {len(bad)} bad")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
