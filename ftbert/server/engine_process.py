"""An engine process: a model on a device behind a Unix socket that all workers connect to."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from ftbert.server import frames
from ftbert.server.description import Description
from ftbert.server.engine import Engine
from ftbert.server.frames import Frame
from ftbert.server.links import TICK
from ftbert.server.loading import load_engine
from ftbert.server.metrics import Row, open_rows
from ftbert.server.settings import Settings
from ftbert.server.work import Failure, Part
from ftbert.server.worker import socket_path

LOG = logging.getLogger("ftbert.serve")
_AT_ONCE = 1 << 20
# Bytes that wait for a worker that does not read; then it is given up.
_MOST_UNSENT = 2 << 30


def run_engine(
    settings: Settings, model: int, device: int, threads: int | None, index: int, folder: Path, rows: int
) -> int:
    """index: its row of metrics. Returns the exit code; raises what loading raises."""
    row = Row(open_rows(folder / "metrics", rows)[index])
    row.reset_gauges()
    engine, about = load_engine(settings, model, settings.devices[device], threads, row)
    path = socket_path(folder, model, device)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(64)
    LOG.info("%s is ready on %s: %d tokens at once, %.0f tokens/s", about.name, about.device, about.batch_tokens,
             about.rate)  # fmt: skip
    server = _Server(engine, about)
    threading.Thread(target=server.accept, args=(listening,), name="ftbert-accept", daemon=True).start()
    threading.Thread(target=server.tick, name="ftbert-tick", daemon=True).start()
    while signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, 0.2) is None:
        if engine.broken:
            LOG.error("%s: the device failed", about.device)
            return 1
    engine.close()
    return 0


class _Server:
    def __init__(self, engine: Engine, about: Description) -> None:
        self.engine, self.about = engine, about
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()

    def accept(self, listening: socket.socket) -> None:
        while True:
            connected, _ = listening.accept()
            connection = _Connection(connected, self.engine)
            connection.send(frames.hello(self.about))
            connection.send(self._status())
            with self._lock:
                self._connections.add(connection)
            threading.Thread(target=self._read, args=(connection,), name="ftbert-read", daemon=True).start()

    def tick(self) -> None:
        while True:
            time.sleep(TICK)
            frame = self._status()
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.send(frame)

    def _status(self) -> bytes:
        return frames.status(self.engine.ready, self.engine.queued_tokens, self.about.rate)

    def _read(self, connection: _Connection) -> None:
        try:
            connection.read()
        except Exception as error:  # noqa: BLE001 - one worker's connection must not end the engine
            LOG.error("a worker's connection failed: %s", type(error).__name__)
        finally:
            with self._lock:
                self._connections.discard(connection)
            self.engine.forget(connection)
            connection.close()


class _Connection:
    """One worker. deliver() never waits for it: what its socket does not take at once, a thread sends."""

    def __init__(self, connected: socket.socket, engine: Engine) -> None:
        self._socket, self._engine = connected, engine
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._writer: threading.Thread | None = None

    def read(self) -> None:
        """Until the worker goes."""
        reader = frames.Reader()
        while data := self._socket.recv(_AT_ONCE):
            for kind, payload in reader.feed(data):
                if kind == Frame.SUBMIT:
                    work: Any = frames.read_submit(payload)
                    work.owner = self
                    if (refused := self._engine.submit(work)) is not None:
                        self.deliver([refused])
                elif kind == Frame.CANCEL:
                    self._engine.cancel(self, frames.read_cancel(payload))

    def deliver(self, results: list[Part | Failure]) -> None:
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
