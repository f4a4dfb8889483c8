"""A listening socket, and how it is left without losing what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import socket
import struct
import time
from typing import Any

from ftbert.server.app import App

_BACKLOG = 4096
# After the last SYN that is let in: handshakes finish, clients on open connections see "connection: close".
_HANDSHAKES, _QUIET = 0.05, 0.25
_SO_ATTACH_FILTER = 26
# A classic BPF program on TCP segments: drop those with SYN, pass the others. No client is then connected to a queue
# that is closed with it in there; what is dropped is sent again a second later and refused.
_DROP_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))


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
        self._preparing = [loop.create_task(model.prepare()) for model in self._app.models]
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
        while time.monotonic() < until:
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
