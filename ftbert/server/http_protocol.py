"""HTTP/1.1 on one connection: limits and timeouts while a request arrives, one answer after the other.

What an ASGI server does not offer is why this is our own: a deadline for head and body each, an error before the body
is read, a callback when the client goes away, a drain that answers all that was accepted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import Any

from ftbert.server.errors import ApiError, too_large
from ftbert.server.http_stream import OutgoingStream, is_reset
from ftbert.server.messages import Request, RequestReader, Response
from ftbert.server.settings import Settings

# Bytes of bodies that are held at once, by all connections of a process.
_MOST_HELD = 1 << 30
# Bytes that are parsed at once: 700 chunks of a byte, or 200 of the shortest requests, which take 5 ms to be refused.
_FEED = 4096
# Seconds in which a turn of the event loop parses what came as more than that: others are served between two turns.
_TURN = 0.005
# An error that is known before a larger body has come is sent at once; after smaller ones the connection lives on.
_SMALL_BODY = 65536
# After an early error the client may still send: closing at once would reset the connection before it reads the answer.
_LINGER_SECONDS = 2.0
# A client that closes its side is asked after this time whether it is still there: most answers are sent before.
_PROBE_SECONDS, _RESET_SECONDS = 0.05, 0.01
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connections:
    """What all connections of a process share. app: gate(request), handle(request)."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.app, self.settings = app, settings
        self.open: set[HttpProtocol] = set()
        self.draining = False
        self.held = 0  # bytes of bodies that have come, of requests without an answer
        self.running = 0  # requests that are being worked on
        self._behind: deque[HttpProtocol] = deque()  # whose bytes wait to be parsed
        self._turning = False

    def protocol(self) -> HttpProtocol:
        return HttpProtocol(self)

    @property
    def busy(self) -> bool:
        return any(connection.busy for connection in self.open)

    def full(self, more: int = 0) -> bool:
        """No `more` bytes of bodies can be held."""
        return self.held + more > _MOST_HELD

    def later(self, connection: HttpProtocol) -> None:
        """It reads a piece in its turn: one connection that floods the server holds up itself alone."""
        self._behind.append(connection)
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        until = time.monotonic() + _TURN
        try:
            self._behind.popleft().read()
            while self._behind and time.monotonic() < until:
                self._behind.popleft().read()
        finally:
            self._turning = len(self._behind) > 0
            if self._turning:
                asyncio.get_running_loop().call_soon(self._turn)


class HttpProtocol(asyncio.Protocol):
    def __init__(self, shared: Connections) -> None:
        self._shared, self._settings = shared, shared.settings
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._reader = RequestReader(self)
        self._unread: bytes | memoryview = b""  # has come, while a request or this connection waits for its turn
        self._behind = False  # this connection does
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf  # at which the connection is given up; a timer is for this or an earlier time
        self._write_timer: asyncio.TimerHandle | None = None
        self._half_closed = False  # the client sends no more
        self._paused = False  # nothing more is read, until no request waits
        self._refused = False  # before all of a request had come: more of it may come
        self._closing = False  # nothing more is answered
        self._write_paused = False
        self._unsent: deque[list[bytes]] = deque()  # pieces of the answer to the running request
        self._last = False  # that answer is the last of this connection
        self._stream: OutgoingStream | None = None  # that answer, where it is sent while it is made

    @property
    def busy(self) -> bool:
        """A request is being read, worked on or its answer sent."""
        unsent = not self._closing and self._transport.get_write_buffer_size() > 0
        return self._answering or self._reader.reading is not None or len(self._unread) > 0 or unsent

    @property
    def _answering(self) -> bool:
        return self._running is not None or len(self._waiting) > 0

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
        self._closing = True
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        reading = self._reader.stop()
        if self._running is not None:
            self._running.disconnect()
            if self._unsent:  # its answer was being sent
                self._running.end()
        for request in (reading, *self._waiting):
            if request is not None:
                request.disconnect()
                self._release(request)
        self._waiting.clear()
        self._unsent.clear()
        self._unread = b""
        if self._stream is not None:
            self._stream.resume()

    def eof_received(self) -> bool:
        """The client sends no more; what it has asked for is answered."""
        if self._closing:
            return False
        self._half_closed = True
        if self._reader.reading is not None:
            self._refuse(ApiError("Validation", "the request ended before it was complete", status=400))
        elif not self._answering:
            return False
        self._loop.call_later(_PROBE_SECONDS, self._probe)
        return True

    def _probe(self) -> None:
        """Who closes its side waits for the answer, or has gone. One that has gone resets the connection when anything
        is sent to it, and 100 Continue may be sent before any answer."""
        if self._running is None or self._closing or self._unsent or self._stream or not self._running.interim:
            return
        self._transport.write(_CONTINUE)
        self._loop.call_later(_RESET_SECONDS, self._watch, _RESET_SECONDS)

    def _watch(self, pause: float) -> None:
        if self._closing:
            return
        if is_reset(self._transport):
            self._transport.abort()
        else:
            self._loop.call_later(pause, self._watch, min(2 * pause, 1.0))

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._stream is not None:
            self._stream.pause()
        self._write_timer = self._loop.call_later(self._settings.body_timeout, self._transport.abort)

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self._stream is not None:
            self._stream.resume()
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._reader.stopped:
            return
        if len(data) <= self._piece():
            self._unread = data
            self.read()
        else:
            self._unread = memoryview(data)
            self._pause(True)
            self._read_later()

    def _piece(self) -> int:
        """Bytes that are parsed at once."""
        return max(_FEED, self._reader.body_left)

    def _read_later(self) -> None:
        if not self._behind:
            self._behind = True
            self._shared.later(self)

    def read(self) -> None:
        """A piece of what has come, unless a request waits for its turn: then the rest is read when none waits."""
        self._behind = False
        reader, before, in_head = self._reader, self._reader.reading, self._reader.in_head
        if self._unread and not self._waiting and not reader.stopped:
            size = self._piece()
            piece, self._unread = self._unread[:size], self._unread[size:]
            try:
                reader.feed(piece)
            except ApiError as error:
                self._refuse(error)
        if reader.stopped:
            self._unread = b""
            return
        self._pause(len(self._waiting) > 0 or len(self._unread) > 0)
        if self._unread and not self._waiting:
            self._read_later()
        # A request that came as a whole sets no timer.
        if reader.reading is None or reader.reading.expects:
            return
        if reader.reading is not before:
            self._set_timer(self._settings.header_timeout if reader.in_head else self._settings.body_timeout)
        elif in_head and not reader.in_head:
            self._set_timer(self._settings.body_timeout)

    def _pause(self, paused: bool) -> None:
        if paused != self._paused and not self._transport.is_closing():
            self._paused = paused
            self._transport.pause_reading() if paused else self._transport.resume_reading()

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
        if self._reader.reading is not None:
            self._refuse(ApiError("Validation", "the request did not arrive in time", status=408))
        else:
            self._transport.abort() if self._closing else self._transport.close()

    # -- the reader's side

    def on_head(self, request: Request) -> None:
        request.error = request.error or self._shared.app.gate(request)
        length = int(request.headers.get(b"content-length", b"0"))
        chunked = b"transfer-encoding" in request.headers
        expects = request.headers.get(b"expect", b"").lower() == b"100-continue"
        if request.error is not None:
            if length > _SMALL_BODY or chunked or expects:
                self._refuse(request.error)
        elif expects and request.interim and (length or chunked):
            request.expects = True
            if not self._answering and not self._write_paused:
                self._continue(request)

    def on_piece(self, request: Request, piece: bytes) -> None:
        if request.error is not None:
            return
        request.held += len(piece)
        self._shared.held += len(piece)
        if request.held > self._settings.payload_limit:
            self._refuse(too_large(self._settings.payload_limit))
        elif self._shared.full():
            self._refuse(ApiError("Overloaded", "Model is overloaded", retry_after=1.0))
        else:
            request.add(piece)

    def on_request(self, request: Request) -> None:
        self._deadline = math.inf
        self._waiting.append(request)
        self._go_on()

    def _continue(self, request: Request) -> None:
        """The client that waits for it may send its body. Where another answer is ahead of it, that is sent first."""
        request.expects = False
        self._transport.write(_CONTINUE)
        self._set_timer(self._settings.body_timeout)

    def _refuse(self, error: ApiError) -> None:
        """The request that is being read. It is the last one of this connection; what still comes is not looked at."""
        request = self._reader.stop() or Request(time.monotonic())
        self._release(request)
        request.error, request.keep_alive = error, False
        self._deadline, self._refused = math.inf, True
        self._waiting.append(request)
        self._go_on()

    # -- answers

    def _go_on(self) -> None:
        """Sends what is to be sent and begins what can begin."""
        while not self._write_paused and not self._closing:
            if self._unsent:
                self._transport.write(b"".join(self._unsent.popleft()))
                if self._unsent:  # the event loop comes to other connections first
                    self._loop.call_soon(self._go_on)
                    return
                if self._running is not None:
                    self._running.end()
                self._running = None
                if self._last:
                    self._finish()
            elif self._running is not None:
                return
            elif self._waiting:
                self._begin(self._waiting.popleft())
            else:
                self._rest()
                return

    def _begin(self, request: Request) -> None:
        self._running = request
        if request.error is not None:
            self._respond(request, self._shared.app.refusal(request))
        else:
            self._shared.running += 1
            self._task = self._loop.create_task(self._work(request))

    async def _work(self, request: Request) -> None:
        try:
            response = await self._shared.app.handle(request)
            if response.stream is not None:
                await self._send_stream(request, response)
        finally:
            self._shared.running -= 1
            self._release(request)
        if response.stream is None:
            self._respond(request, response)
        self._go_on()

    async def _send_stream(self, request: Request, response: Response) -> None:
        self._release(request)
        self._stream = OutgoingStream(self._transport, request, response, chunked=request.interim)
        self._last = self._is_last(request) or not request.interim
        try:
            await self._stream.send(self._last)
        finally:
            self._stream = self._running = None
            request.end()
        if self._last and not self._closing:
            self._finish()

    def _is_last(self, request: Request) -> bool:
        """No answer follows this one on the connection, and it says so."""
        ending = self._shared.draining or self._half_closed
        return not request.keep_alive or (ending and not self._waiting and not self._unread)

    def _respond(self, request: Request, response: Response) -> None:
        self._release(request)
        if request.disconnected or self._transport.is_closing():
            request.end()
            self._running = None
            return
        self._last = self._is_last(request)
        self._unsent = response.pieces(self._last, request.method != "HEAD")

    def _rest(self) -> None:
        """Nothing is to be answered: the next request is read."""
        reading = self._reader.reading
        if self._half_closed:
            self._finish()
            return
        if self._paused:
            self._read_later()
        if reading is None:
            self._set_timer(self._settings.keep_alive)
        elif reading.expects:
            self._continue(reading)

    def _finish(self) -> None:
        """After the last answer. A client that may still send has a moment to read it."""
        self._closing = True
        sending = self._refused or self._reader.reading is not None
        if (reading := self._reader.stop()) is not None:
            self._release(reading)
        if self._half_closed or not sending or self._transport.is_closing():
            self._transport.close()
            return
        self._transport.write_eof()
        self._pause(False)
        self._set_timer(_LINGER_SECONDS)

    def _release(self, request: Request) -> None:
        self._shared.held -= request.held
        request.held = 0
        request.body = b""
