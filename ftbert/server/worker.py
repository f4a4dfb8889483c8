"""A process that answers HTTP and tokenises: a worker, whose engines are other processes, or with the engines in it.

A worker imports no torch. A listening socket is left without losing what was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ftbert.server.app import App
from ftbert.server.catalogue import Catalogue
from ftbert.server.links import LocalLink, SocketLink
from ftbert.server.logs import LOG, say_where
from ftbert.server.metrics import BEAT, Metrics, Row
from ftbert.server.on_demand import OnDemand
from ftbert.server.process import socket_path
from ftbert.server.routes import all_routes
from ftbert.server.settings import Settings

_BACKLOG = 4096
# After the last SYN that is let in: handshakes finish, clients on open connections see "connection: close".
_HANDSHAKES, _QUIET = 0.05, 0.25
# Before the end of the time for a drain, texts that are still written get an end that says so.
_LAST_WORDS = 1.0
_SO_ATTACH_FILTER = 26
# A classic BPF program on TCP segments: drop those with SYN, pass the others. No client is then connected to a queue
# that is closed with it in there; what is dropped is sent again a second later and refused.
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))


def run_worker(settings: Settings, index: int, folder: Path) -> int:
    """index: among the workers. folder: where the engines' sockets are. Returns the exit code."""
    import uvloop

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the pool are the parallelism
    return uvloop.run(_run(settings, index, folder))


async def _run(settings: Settings, index: int, folder: Path) -> int:
    links = [
        [SocketLink(str(socket_path(folder, which, device))) for device in range(len(settings.engines))]
        for which in range(len(settings.models))
    ]
    metrics = Metrics(settings, folder / "metrics", index)
    app = App(settings, links, metrics, all_routes())
    server = HttpServer(app, bind(settings.hostname, settings.port, shared=True))
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    following = []
    if settings.on_demand:
        app.on_demand = OnDemand(app.models, Catalogue(settings, folder), settings.models_autoload)
        following = [asyncio.create_task(app.on_demand.follow())]
    connecting = [asyncio.create_task(link.connect()) for own in links for link in own]
    await server.start()
    beating = asyncio.create_task(_beat(metrics.requests()))
    gc.collect()
    gc.freeze()  # what is there now stays: the collector need not look at it again
    await ending.wait()
    if not await server.drain():
        LOG.warning("some requests were not finished in %.0f s", settings.shutdown_timeout)
    for task in (beating, *following, *connecting):
        task.cancel()
    await app.close()
    return 0


async def _beat(row: Row) -> None:
    """From the moment that it listens."""
    while True:
        row.beat()
        await asyncio.sleep(BEAT)


def run_one_process(settings: Settings, bound: socket.socket) -> int:
    """`--workers 0`, for the CPU and for tests. Serves until a signal. Returns the exit code. Raises what loading the
    model raises."""
    import uvloop

    return uvloop.run(serve_here(settings, bound))


async def serve_here(
    settings: Settings, bound: socket.socket, stop: asyncio.Event | None = None, load: Callable[..., Any] | None = None
) -> int:
    """stop: set to end it, instead of signals. load: instead of loading.load_engine."""
    links = [[LocalLink() for _ in settings.engines] for _ in settings.models]
    metrics = Metrics(settings)
    app = App(settings, links, metrics, all_routes())
    server = HttpServer(app, bound)
    await server.start()
    say_where(bound.getsockname()[:2], settings.api_key is not None)
    ending = stop or _on_signals()
    loading = asyncio.create_task(asyncio.to_thread(_load_all, settings, links, metrics, load))
    waiting = asyncio.create_task(ending.wait())
    await asyncio.wait([loading, waiting], return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done():
            loading.result()
        await waiting
        if not await server.drain():
            LOG.warning("some requests were not finished in %.0f s", settings.shutdown_timeout)
        return 0
    finally:
        await app.close()
        for link in (link for own in links for link in own):
            if link.engine is not None:
                await asyncio.to_thread(link.engine.close)


def _load_all(
    settings: Settings, links: list[list[LocalLink]], metrics: Metrics, load: Callable[..., Any] | None
) -> None:
    """All at the same time; timed one after the other. Raises what the first that fails raises."""
    from ftbert.server.loading import load_engine

    if load is None and len(links) * len(settings.engines) > 1:
        # Before there are threads, of which two that import them at once find half of a module.
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    one_at_a_time = threading.Lock()

    def make(number: int) -> None:
        which, device = divmod(number, len(settings.engines))
        made = (load or load_engine)(
            settings, which, settings.engines[device], None, metrics.engine(which, device), lambda _: one_at_a_time
        )
        links[which][device].attach(*made)

    with ThreadPoolExecutor(4, thread_name_prefix="ftbert-load") as threads:
        for made in [threads.submit(make, number) for number in range(len(links) * len(settings.engines))]:
            made.result()


def _on_signals() -> asyncio.Event:
    """Set by the first signal; the second ends the process at once."""
    ending, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        name = signal.Signals(number).name
        if ending.is_set():
            LOG.info("%s again: ending at once", name)
            os._exit(128 + number)
        LOG.info("%s: shutting down", name)
        ending.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return ending


def bind(host: str, port: int, shared: bool) -> socket.socket:
    """Not listening yet. shared: several processes bind it. OSError names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return bound


def raise_open_files() -> None:
    """As many connections as the system allows this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class HttpServer:
    def __init__(self, app: App, bound: socket.socket) -> None:
        self._app, self._socket = app, bound
        self._server: Any = None

    async def start(self) -> None:
        raise_open_files()
        loop = asyncio.get_running_loop()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._preparing = [loop.create_task(model.prepare()) for model in self._app.models if model.wanted]
        self._server = await loop.create_server(self._app.connections.protocol, sock=self._socket, backlog=_BACKLOG)

    async def drain(self) -> bool:
        """Answers what was accepted, then closes. False where that took longer than the settings allow."""
        settings, shared = self._app.settings, self._app.connections
        self._app.leaving = True
        await asyncio.sleep(settings.drain_delay)
        shared.draining = True
        _refuse_new(self._socket)
        await asyncio.sleep(_HANDSHAKES)
        self._server.close()
        until, quiet_from = time.monotonic() + settings.shutdown_timeout, time.monotonic()
        streams_until = until - min(_LAST_WORDS, settings.shutdown_timeout / 4)
        while time.monotonic() < until:
            if time.monotonic() > streams_until:
                self._app.end_streams("the server is shutting down")
            if shared.busy:
                quiet_from = time.monotonic()
            elif time.monotonic() - quiet_from > _QUIET:
                break
            await asyncio.sleep(0.01)
        finished = not shared.busy
        for connection in list(shared.open):
            connection.close_if_idle()
        await asyncio.sleep(0)
        return finished


def _refuse_new(listening: socket.socket) -> None:
    program = b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN)
    buffer = ctypes.create_string_buffer(program)
    # Where the system has no such filter a handshake of the last milliseconds may be reset.
    with contextlib.suppress(OSError):
        listening.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(_DROP_SYN), ctypes.addressof(buffer))
        )
