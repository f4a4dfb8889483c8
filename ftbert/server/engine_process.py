"""An engine process: a model on a device behind a Unix socket that all workers connect to."""

from __future__ import annotations

import fcntl
import gc
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftbert.server import frames
from ftbert.server.description import Description
from ftbert.server.engine import Engine
from ftbert.server.frames import Frame
from ftbert.server.job import Job, Result
from ftbert.server.links import TICK
from ftbert.server.loading import load_engine
from ftbert.server.logs import LOG
from ftbert.server.metrics import Metrics, Row
from ftbert.server.process import socket_path, wait_for_signal
from ftbert.server.settings import Settings

_AT_ONCE = 1 << 20
# Seconds between readings while no batch can be launched anyway: each costs the threads that launch and fetch.
_GATHER = 0.0005
# Seconds until a thread that waits for the interpreter gets it, of three that take turns. With Python's own 5 ms a
# server under three times its load serves 14 % less.
_SWITCH = 0.0005
# Seconds without work after which an engine that is to end does.
_QUIET = 0.2
# Bytes that wait for a worker that does not read; then it is given up.
_MOST_UNSENT = 2 << 30


def run_engine(settings: Settings, model: int, device: int, threads: int | None, folder: Path) -> int:
    """Returns the exit code; raises what loading raises."""
    row = Metrics(settings, folder / "metrics").engine(model, device)
    row.reset_gauges()
    engine, about = load_engine(settings, model, settings.engines[device], threads, row, lambda on: _alone(folder, on))
    sys.setswitchinterval(_SWITCH)
    gc.collect()
    gc.freeze()  # PyTorch's objects stay: to look at them again takes 250 ms, in which nothing is served
    path = socket_path(folder, model, device)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(64)
    server = _Server(engine, about, row)
    reader = threading.Thread(target=server.serve, args=(listening,), name="ftbert-read", daemon=True)
    reader.start()
    threading.Thread(target=server.tick, name="ftbert-tick", daemon=True).start()
    while wait_for_signal({signal.SIGTERM, signal.SIGINT}, 0.2) is None:
        if engine.broken:
            LOG.error("%s: the device failed", about.model.device)
            return 1
        if not reader.is_alive():
            return 1
    _finish(engine, settings.shutdown_timeout)
    engine.close()
    return 0


def _finish(engine: Engine, seconds: float) -> None:
    """What it has is computed; a worker may hear a moment later that nothing more is to be sent."""
    now = time.monotonic()
    until, quiet_from = now + seconds, now
    while now < until and now - quiet_from < _QUIET:
        time.sleep(0.01)
        now = time.monotonic()
        quiet_from = quiet_from if engine.idle else now


@contextmanager
def _alone(folder: Path, device: str) -> Iterator[None]:
    """No other engine of this server is timed on `device`: a lock, which a process that dies gives back."""
    with (folder / f"timing-{device}").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class _Server:
    """One thread reads what all workers send: a thread for each would make the engine wait for the interpreter."""

    def __init__(self, engine: Engine, about: Description, row: Row) -> None:
        self.engine, self.about, self._row = engine, about, row
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()

    def serve(self, listening: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listening, selectors.EVENT_READ)
            while True:
                jobs: list[Job] = []
                for key, _ in selector.select():
                    if key.data is None:
                        self._accept(listening, selector)
                    elif not self._read(key.data, jobs):
                        selector.unregister(key.fileobj)
                        jobs = [job for job in jobs if job.owner is not key.data]
                        self._drop(key.data)
                refused: dict[Any, list[Result]] = {}
                for job, failure in self.engine.submit(jobs):
                    refused.setdefault(job.owner, []).append(failure)
                for owner, failures in refused.items():
                    owner.deliver(failures)
                if self.engine.saturated:
                    time.sleep(_GATHER)

    def tick(self) -> None:
        while True:
            time.sleep(TICK)
            self._row.beat()
            frame = self._status()
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.send(frame)

    def _status(self) -> bytes:
        return frames.status(self.engine.ready, self.engine.queued_tokens, self.about.rate)

    def _accept(self, listening: socket.socket, selector: selectors.BaseSelector) -> None:
        connected, _ = listening.accept()
        connection = Connection(connected, self.engine)
        connection.send(frames.hello(self.about))
        connection.send(self._status())
        with self._lock:
            self._connections.add(connection)
        selector.register(connected, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection, jobs: list[Job]) -> bool:
        """False: the worker has gone."""
        try:
            return connection.read(jobs)
        except Exception as error:  # noqa: BLE001 - one worker's connection must not end the engine
            LOG.error("a worker's connection failed: %s", type(error).__name__)
            return False

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
        self.engine.forget(connection)
        connection.close()


class Connection:
    """One worker. deliver() never waits for it: what its socket does not take at once, a thread sends."""

    def __init__(self, connected: socket.socket, engine: Engine) -> None:
        self._socket, self._engine = connected, engine
        self._reader = frames.Reader()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._writer: threading.Thread | None = None

    def read(self, jobs: list[Job]) -> bool:
        """What has come, once: requests go to `jobs`. False at the end."""
        data = self._socket.recv(_AT_ONCE)
        for kind, payload in self._reader.feed(data):
            if kind == Frame.SUBMIT:
                job = frames.read_submit(payload)
                job.owner = self
                jobs.append(job)
            elif kind == Frame.CANCEL:
                ids = frames.read_cancel(payload)
                jobs[:] = [job for job in jobs if job.owner is not self or job.id not in ids]
                self._engine.cancel(self, ids)
        return bool(data)

    def deliver(self, results: list[Result]) -> None:
        self.send(frames.results(results))

    def send(self, frame: bytes) -> None:
        with self._changed:
            if self._closed:
                return
            if not self._unsent:
                try:
                    frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the reader sees it too
                if not frame:
                    return
            self._unsent.append(frame)
            self._unsent_bytes += len(frame)
            if self._unsent_bytes > _MOST_UNSENT:
                self._socket.shutdown(socket.SHUT_RDWR)
                return
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="ftbert-write", daemon=True)
                self._writer.start()
            self._changed.notify()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._unsent and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                frame = self._unsent[0]
            try:
                self._socket.sendall(frame)
            except OSError:
                return
            with self._changed:
                self._unsent_bytes -= len(self._unsent.popleft())

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._socket.close()
