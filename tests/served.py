"""A server for a test: in a thread of this process, or as a command; and a plain client."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import randomise

for _package in ("httptools", "msgspec", "orjson", "uvloop"):
    pytest.importorskip(_package, reason=f"{_package} is not installed: the extra ftbert[serve]")

from ftbert.server import Settings  # noqa: E402
from ftbert.server.worker import bind, serve_here  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Served:
    """A running server. process: of a command; None in a thread."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """body: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        sent = {"authorization": f"Bearer {self.key}"} if self.key else {}
        if body is not None:
            sent["content-type"] = "application/json"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        """The JSON of an answer that must be 200."""
        reply = self.call("POST", path, body, headers)
        assert reply.status == 200, (reply.status, reply.body[:300])
        return reply.json()

    def wait_ready(self, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if self.call("GET", "/health").status == 200:
                    return
            except OSError:
                pass
            if self.process is not None and self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.log.read_text() if self.log else ''}")


@contextmanager
def in_thread(*models: tuple[str, Path], load: Any = None, **settings: Any) -> Iterator[Served]:
    bound = bind("127.0.0.1", 0, shared=False)
    chosen = Settings(tuple((name, str(path)) for name, path in models), workers=0, **{"batch_tokens": 512, **settings})
    ending: list[Any] = []
    codes: list[Any] = []

    async def run() -> None:
        stop = asyncio.Event()
        ending.extend([asyncio.get_running_loop(), stop])
        codes.append(await serve_here(chosen, bound, stop, load))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    server = Served(bound.getsockname()[1], key=chosen.api_key)
    try:
        server.wait_ready()
        yield server
    finally:
        ending[0].call_soon_threadsafe(ending[1].set)
        thread.join(30)
    assert codes == [0]


@contextmanager
def as_command(folder: Path, *arguments: str, ready: bool = True) -> Iterator[Served]:
    """`ftbert serve ...`; folder: for its log."""
    log = folder / "serve.log"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ftbert", "serve", *arguments, "--hostname", "127.0.0.1", "--port", "0"],
            stderr=out, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        until = time.monotonic() + 30
        while (found := re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        server = Served(int(found[1]), process, log)
        if ready:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def with_head(folder: Path, labels: int, tiny_bert: Callable[..., Path], seed: int = 3) -> Path:
    from transformers import BertConfig, BertForSequenceClassification

    (base := tiny_bert(folder)).rename(folder / f"head{labels}")
    base = folder / f"head{labels}"
    config = BertConfig.from_pretrained(base, num_labels=labels)
    randomise(BertForSequenceClassification(config), seed).save_pretrained(base)
    return base
