"""HTTP/1.1 on one connection: limits and timeouts while a request arrives, one answer after the other.

httptools parses. What an ASGI server does not offer is why this is our own: a deadline for head and body each, an error
before the body is read, a callback when the client goes away, a drain that answers all that was accepted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Any

import httptools

from ftbert.server.errors import ApiError
from ftbert.server.messages import Request, Response
from ftbert.server.settings import Settings

_MOST_HEAD = 65536
# An error that is known before a larger body has come is sent at once; after smaller ones the connection lives on.
_SMALL_BODY = 65536
# After an early error the client may still send: closing at once would reset the connection before it reads the answer.
_LINGER_SECONDS = 2.0


class Connections:
    """What all connections of a process share. app: gate(request), handle(request)."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.open: set[HttpProtocol] = set()
        self.draining = False
        self.buffered = 0  # bytes of bodies that are being read or worked on
        self.running = 0  # requests that are being worked on

    def protocol(self) -> HttpProtocol:
        return HttpProtocol(self)

    @property
    def busy(self) -> bool:
        return any(connection.busy for connection in self.open)

    def close_idle(self) -> None:
        for connection in list(self.open):
            connection.close_if_idle()


class HttpProtocol(asyncio.Protocol):
    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._settings = shared.settings
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._reading: Request | None = None
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf  # at which the connection is given up; a timer is for this or an earlier time
        self._write_timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._header_bytes = 0
        self._unparsed = 0  # bytes of a body that the parser does not read
        self._closing = False
        self._write_paused = False
        self._unsent: deque[list[bytes]] = deque()  # pieces of the answer to the running request
        self._last = False  # that answer is the last of this connection

    @property
    def busy(self) -> bool:
        """A request is being read, worked on or its answer sent."""
        unsent = not self._closing and self._transport.get_write_buffer_size() > 0
        return self._running is not None or self._reading is not None or bool(self._waiting) or unsent

    def close_if_idle(self) -> None:
        if not self.busy and not self._closing:
            self._transport.close()

    # -- the transport's side

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._shared.open.add(self)
        self._set_timer(self._settings.header_timeout)

    def connection_lost(self, error: Exception | None) -> None:
        self._shared.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._write_timer is not None:
            self._write_timer.cancel()
        for request in (self._reading, self._running, *self._waiting):
            if request is not None:
                request.disconnect()
        for request in (self._reading, *self._waiting):
            self._release(request)
        self._reading = None
        self._waiting.clear()
        self._unsent.clear()
        self._closing = True
        self._parser = None

    def eof_received(self) -> bool:
        return False  # who closes its side has gone

    def pause_writing(self) -> None:
        self._write_paused = True
        self._write_timer = self._loop.call_later(self._settings.body_timeout, self._transport.abort)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self._unsent:
            self._send()
        else:
            self._next()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        begins = self._head_bytes == 0 and self._running is None
        in_head, reading = self._in_head, self._reading
        if in_head:
            self._head_bytes += len(data)
        self._feed(data)
        # A request that came as a whole sets no timer.
        if self._closing:
            return
        if self._in_head and self._head_bytes:
            if begins:
                self._set_timer(self._settings.header_timeout)
        elif not self._in_head and (in_head or self._reading is not reading):
            self._set_timer(self._settings.body_timeout)

    def _feed(self, data: bytes) -> None:
        if self._unparsed:
            self._read_unparsed(data)
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # No other protocol is spoken, but some clients (Java's) offer one with every request: it is answered.
            if self._unparsed:
                self._read_unparsed(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(ApiError("Validation", "the request is not valid HTTP", status=400))
            return
        if self._in_head and self._head_bytes > _MOST_HEAD and not self._closing:
            self._refuse(ApiError("Validation", "the head of the request is too large", status=431))

    def _read_unparsed(self, data: bytes) -> None:
        """The body of a request that offered another protocol: the parser ends such a request at its head."""
        body = data[: self._unparsed]
        self._unparsed -= len(body)
        self.on_body(body)
        if self._unparsed == 0:
            self._complete()

    def _set_timer(self, seconds: float) -> None:
        """From now on. A timer that is due earlier stays and is set again then: most requests touch none."""
        self._deadline = deadline = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._timed_out)

    def _timed_out(self) -> None:
        self._timer = None
        if (now := self._loop.time()) < self._deadline:
            if self._deadline < math.inf:  # uvloop gives no timer for less than a millisecond
                self._timer = self._loop.call_at(max(self._deadline, now + 0.001), self._timed_out)
            return
        started = self._reading is not None or self._head_bytes > 0
        if started and not self._closing:
            self._refuse(ApiError("Validation", "the request did not arrive in time", status=408))
        else:
            self._transport.abort() if self._closing else self._transport.close()

    # -- the parser's side

    def on_message_begin(self) -> None:
        self._reading = Request(time.monotonic())
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        if self._reading is not None:
            self._reading.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is not None:
            self._header_bytes += len(name) + len(value)
            self._reading.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        request = self._reading
        if request is None or self._closing:
            return
        self._in_head = False
        request.method = self._parser.get_method().decode("ascii")
        request.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        try:
            parsed = httptools.parse_url(request.url)
            request.path, request.query = (parsed.path or b"/").decode("ascii"), parsed.query or b""
        except (httptools.HttpParserError, UnicodeDecodeError):
            request.error = ApiError("Validation", "the request's path is not valid", status=400)
        if self._header_bytes > _MOST_HEAD:
            request.error = ApiError("Validation", "the head of the request is too large", status=431)
            request.keep_alive = False
        if request.error is None:
            request.error = self._shared.app.gate(request)
        length = int(request.headers.get(b"content-length", b"0"))
        expects = request.headers.get(b"expect", b"").lower() == b"100-continue"
        if request.error is not None:
            chunked = b"transfer-encoding" in request.headers
            if length > _SMALL_BODY or chunked or expects:
                self._stop_reading(request)
                return
        elif expects and self._running is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._parser.should_upgrade():
            self._unparsed = length

    def on_body(self, body: bytes) -> None:
        request = self._reading
        if request is None or self._closing or request.error is not None:
            return
        request.length += len(body)
        self._shared.buffered += len(body)
        if request.length > self._settings.payload_limit:
            request.error = too_large(self._settings.payload_limit)
            request.bodies.clear()
            self._stop_reading(request)
            return
        request.bodies.append(body)

    def on_message_complete(self) -> None:
        if not self._unparsed:
            self._complete()

    def _complete(self) -> None:
        request = self._reading
        self._in_head, self._head_bytes = True, 0
        if request is None or self._closing:
            return
        self._reading = None
        self._deadline = math.inf
        request.body = request.bodies[0] if len(request.bodies) == 1 else b"".join(request.bodies)
        request.bodies.clear()
        self._waiting.append(request)
        self._next()
        if self._waiting:
            self._transport.pause_reading()

    def _stop_reading(self, request: Request) -> None:
        """Its error is the last answer of this connection; what still comes is not looked at."""
        request.keep_alive = False
        self._reading = None
        self._deadline = math.inf
        self._closing = True
        self._waiting.append(request)
        self._next()

    def _refuse(self, error: ApiError) -> None:
        request = self._reading or Request(time.monotonic())
        request.error = error
        self._stop_reading(request)

    # -- answers

    def _next(self) -> None:
        if self._running is not None or self._write_paused or self._parser is None:
            return
        if not self._waiting:
            return
        request = self._running = self._waiting.popleft()
        if request.error is not None:
            self._respond(request, self._shared.app.refusal(request))
            return
        self._shared.running += 1
        self._task = self._loop.create_task(self._work(request))

    async def _work(self, request: Request) -> None:
        try:
            response = await self._shared.app.handle(request)
        finally:
            self._shared.running -= 1
        self._respond(request, response)

    def _respond(self, request: Request, response: Response) -> None:
        self._release(request)
        if request.disconnected or self._transport.is_closing():
            self._running = None
            return
        self._last = not request.keep_alive or self._shared.draining
        self._unsent = response.pieces(self._last, request.method != "HEAD")
        self._send()

    def _send(self) -> None:
        """The next piece of the answer: between two the event loop comes to other connections."""
        if not self._unsent or self._write_paused:
            return
        self._transport.write(b"".join(self._unsent.popleft()))
        if self._unsent:
            self._loop.call_soon(self._send)
            return
        self._running = None
        if self._last:
            self._finish(unread=self._closing)
        elif self._waiting:
            self._next()
        else:
            self._transport.resume_reading()
            if self._in_head:
                begun = self._head_bytes > 0 or self._reading is not None
                self._set_timer(self._settings.header_timeout if begun else self._settings.keep_alive)

    def _finish(self, unread: bool) -> None:
        self._closing = True
        self._waiting.clear()
        if not unread:
            self._transport.close()
            return
        self._transport.write_eof()
        self._transport.resume_reading()
        self._set_timer(_LINGER_SECONDS)

    def _release(self, request: Request | None) -> None:
        if request is not None:
            self._shared.buffered -= request.length
            request.length = 0


def too_large(limit: int) -> ApiError:
    words = f"the request has more than {limit} bytes (payload-limit)"
    return ApiError("Validation", words, status=413, counted="validation")
