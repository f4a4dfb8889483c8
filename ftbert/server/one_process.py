"""`--workers 0`: HTTP, tokenising and the engines in one process, for the CPU and for tests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ftbert.server.app import App
from ftbert.server.http_server import HttpServer
from ftbert.server.links import LocalLink
from ftbert.server.logs import say_where
from ftbert.server.metrics import Row, open_rows
from ftbert.server.routes import all_routes
from ftbert.server.settings import Settings

LOG = logging.getLogger("ftbert.serve")


def run_one_process(settings: Settings, bound: socket.socket) -> int:
    """Serves until a signal. Returns the exit code. Raises what loading the model raises."""
    import uvloop

    return uvloop.run(serve_here(settings, bound))


async def serve_here(
    settings: Settings, bound: socket.socket, stop: asyncio.Event | None = None, load: Callable[..., Any] | None = None
) -> int:
    """stop: set to end it, instead of signals. load: instead of loading.load_engine."""
    links = [[LocalLink() for _ in settings.devices] for _ in settings.models]
    rows = open_rows(None, 1 + len(settings.models) * len(settings.devices))
    app = App(settings, links, rows, Row(rows[0]), all_routes())
    server = HttpServer(app, bound)
    await server.start()
    say_where(*bound.getsockname()[:2])
    ending = stop or _on_signals()
    loading = asyncio.create_task(asyncio.to_thread(_load_all, settings, links, rows, load))
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
        app.threads.shutdown(wait=False, cancel_futures=True)
        for link in (link for own in links for link in own):
            if link.engine is not None:
                await asyncio.to_thread(link.engine.close)


def _load_all(settings: Settings, links: list[list[LocalLink]], rows: Any, load: Callable[..., Any] | None) -> None:
    """All at the same time; timed one after the other. Raises what the first that fails raises."""
    from ftbert.server.loading import load_engine

    one_at_a_time = threading.Lock()

    def make(place: int) -> None:
        which, device = divmod(place, len(settings.devices))
        made = (load or load_engine)(
            settings, which, settings.devices[device], None, Row(rows[1 + place]), lambda _: one_at_a_time
        )
        links[which][device].attach(*made)

    with ThreadPoolExecutor(4, thread_name_prefix="ftbert-load") as threads:
        for made in [threads.submit(make, place) for place in range(len(links) * len(settings.devices))]:
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
