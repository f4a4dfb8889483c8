"""A connection without a socket: bytes in, what the server wrote, and when it closed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import served  # noqa: F401  skips where the server's packages are not installed

from ftbert.server import Settings
from ftbert.server.errors import ApiError
from ftbert.server.http_protocol import Connections, HttpProtocol
from ftbert.server.messages import Request, Response

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Echo:
    """An application that answers with what it was asked; /no is refused by its head."""

    def gate(self, request: Request) -> ApiError | None:
        return ApiError("Validation", "no such path", status=404) if request.path == "/no" else None

    def refusal(self, request: Request) -> Response:
        assert request.error is not None
        return Response(request.error.body(False), request.error.status)

    async def handle(self, request: Request) -> Response:
        headers = {name.decode(): value.decode() for name, value in request.headers.items()}
        return Response(json.dumps([request.method, request.path, headers, bytes(request.body).decode()]).encode())


class Wire:
    """A connection without a socket: a transport that keeps what is written."""

    def __init__(self, shared: Connections) -> None:
        self.sent, self.paused, self.closed, self.ended = b"", False, False, False
        self.protocol: HttpProtocol = shared.protocol()
        self.protocol.connection_made(self)

    def feed(self, data: bytes) -> None:
        assert not self.paused and not self.closed
        self.protocol.data_received(data)

    async def take(self, data: bytes) -> None:
        """All of it is parsed."""
        self.feed(data)
        while self.paused and not self.ended:
            await asyncio.sleep(0)

    def write(self, data: bytes) -> None:
        assert not self.ended, "written after the end"
        self.sent += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def idle(wire: Wire) -> None:
    for _ in range(20):
        await asyncio.sleep(0)
    while wire.protocol.busy and wire.paused:
        await asyncio.sleep(0)


def talk(*parts: bytes, **settings: Any) -> tuple[bytes, bool]:
    """What is sent for `parts`, and whether the connection is over."""

    async def run() -> tuple[bytes, bool]:
        shared = Connections(Echo(), Settings((("m", "m"),), **settings))
        wire = Wire(shared)
        for part in parts:
            while wire.paused:
                await asyncio.sleep(0)
            if wire.closed:
                break
            wire.feed(part)
        await idle(wire)
        assert shared.held == 0 or wire.protocol.busy
        found = wire.sent, wire.closed or wire.ended
        wire.close()
        await asyncio.sleep(0)
        assert shared.held == 0 and not shared.open
        return found

    return asyncio.run(run())


def head(*lines: str, path: str = "/a", method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


def chunks(*parts: bytes, trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n" + trailers + b"\r\n"
