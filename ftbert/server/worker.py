"""A worker process: HTTP and tokenising. Its engines are other processes; it imports no torch."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from pathlib import Path

import uvloop

from ftbert.server.app import App
from ftbert.server.http_server import HttpServer, bind
from ftbert.server.links import SocketLink
from ftbert.server.metrics import BEAT, Row, open_rows
from ftbert.server.routes import all_routes
from ftbert.server.settings import Settings

LOG = logging.getLogger("ftbert.serve")


def run_worker(settings: Settings, index: int, folder: Path, rows: int) -> int:
    """index: its row of metrics. folder: where the engines' sockets are. Returns the exit code."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the pool are the parallelism
    return uvloop.run(_run(settings, index, folder, rows))


async def _run(settings: Settings, index: int, folder: Path, count: int) -> int:
    links = [
        [SocketLink(str(socket_path(folder, which, device))) for device in range(len(settings.devices))]
        for which in range(len(settings.models))
    ]
    rows = open_rows(folder / "metrics", count)
    row = Row(rows[index])
    row.reset_gauges()
    app = App(settings, links, rows, row, all_routes())
    server = HttpServer(app, bind(settings.hostname, settings.port, shared=True))
    ending, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    connecting = [asyncio.create_task(link.connect()) for own in links for link in own]
    await server.start()
    beating = asyncio.create_task(_beat(row))
    gc.collect()
    gc.freeze()  # what is there now stays: the collector need not look at it again
    await ending.wait()
    if not await server.drain():
        LOG.warning("some requests were not finished in %.0f s", settings.shutdown_timeout)
    for task in (beating, *connecting):
        task.cancel()
    app.threads.shutdown(wait=False, cancel_futures=True)
    return 0


async def _beat(row: Row) -> None:
    """From the moment that it listens."""
    while True:
        row.beat()
        await asyncio.sleep(BEAT)


def socket_path(folder: Path, model: int, device: int) -> Path:
    return folder / f"engine-{model}-{device}.sock"
