"""HTTP/1.1 as bytes: requests as they are read, responses as they are written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import httptools

from ftbert.server.errors import ApiError

JSON = "application/json"
# Bytes that are written at once: 1 ms, in which others of the event loop wait.
_PIECE = 1 << 20
# Bytes of a head; of the size of a chunk with its extensions; of the trailers behind the last chunk.
MOST_HEAD = 65536
# What a name and a value cost beside their own bytes: a colon, a space, the end of the line.
_AROUND = 4
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_STATUS_LINES[422] = "HTTP/1.1 422 Unprocessable Entity\r\n"  # Python's phrase changed between releases
_STATUS_LINES[413] = "HTTP/1.1 413 Payload Too Large\r\n"


@dataclass
class Response:
    """body: a long one as parts, which are never put together. stream: instead of it, pieces that are sent as they
    come; sent: bytes of those so far."""

    body: bytes | list[bytes] = b""
    status: int = 200
    content_type: str = JSON
    headers: list[tuple[str, str]] = field(default_factory=list)
    stream: AsyncGenerator[bytes, None] | None = None
    sent: int = 0

    @property
    def parts(self) -> list[bytes]:
        """Of the body, which they are when joined."""
        return self.body if isinstance(self.body, list) else [self.body]

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(map(len, self.parts)) + self.sent

    def pieces(self, close: bool, with_body: bool) -> deque[list[bytes]]:
        """The bytes to send: the parts of each piece that is sent at once. with_body: False for HEAD."""
        parts, size = self.parts, self.size
        framing = [f"content-type: {self.content_type}\r\n"] if size else []
        if self.status != 204:
            framing.append(f"content-length: {size}\r\n")
        pieces, size = deque([[self._head(framing, close)]]), 0
        for part in parts if with_body else ():
            size += len(part)
            if size > _PIECE:
                pieces.append([])
                size = len(part)
            pieces[-1].append(part)
        return pieces

    def stream_head(self, close: bool, chunked: bool) -> bytes:
        """What stands before a stream's pieces. chunked: False to HTTP/1.0, where the connection's end is theirs. nginx
        gathers pieces unless it is told not to."""
        framing = [f"content-type: {self.content_type}\r\n", "cache-control: no-cache\r\nx-accel-buffering: no\r\n"]
        return self._head(framing + ["transfer-encoding: chunked\r\n"] * chunked, close)

    def _head(self, framing: list[str], close: bool) -> bytes:
        head = [_STATUS_LINES[self.status], *framing, *(f"{name}: {value}\r\n" for name, value in self.headers)]
        return "".join([*head, "connection: close\r\n\r\n" if close else "\r\n"]).encode("latin-1")


class Request:
    """headers: by lower-case name; of a name that is there twice, the last. began: at its first byte, monotonic."""

    __slots__ = (
        "began", "body", "computed", "disconnected", "error", "expects", "headers", "held", "interim", "keep_alive",
        "method", "model", "path", "query", "route", "template", "url", "_cancels", "_ends",
    )  # fmt: skip

    def __init__(self, began: float) -> None:
        self.began = began
        self.method, self.path, self.query, self.url = "", "", b"", b""
        self.model = ""  # the name of the one that works on it
        self.headers: dict[bytes, bytes] = {}
        self.body: bytes | bytearray = b""
        self.held = 0  # bytes of the body that are counted as held
        self.keep_alive = False
        self.interim = False  # its client understands answers before the answer: 100 Continue
        self.expects = False  # it waits for one, before it sends the body
        self.route: Any = None
        self.template = ""  # the path of that: /v1/models/{id}
        self.computed: Any = None  # what has `steps`, of a trace
        self.error: ApiError | None = None  # found before the body was read
        self.disconnected = False
        self._cancels: list[Callable[[], None]] = []
        self._ends: list[Callable[[], None]] = []

    def add(self, piece: bytes) -> None:
        """To the body. Small pieces cost what they weigh."""
        if not self.body:
            self.body = piece
        elif isinstance(self.body, bytearray):
            self.body += piece
        else:
            self.body = bytearray(self.body)
            self.body += piece

    def on_disconnect(self, cancel: Callable[[], None]) -> None:
        """`cancel` is called when the client goes away before it has its answer."""
        if self.disconnected:
            cancel()
        else:
            self._cancels.append(cancel)

    def disconnect(self) -> None:
        self.disconnected = True
        for cancel in self._cancels:
            cancel()
        self._cancels.clear()

    def on_end(self, call: Callable[[], None]) -> None:
        """`call` is called once the answer is sent, or nobody makes it any more."""
        self._ends.append(call)

    def end(self) -> None:
        ends, self._ends = self._ends, []
        for call in ends:
            call()
        self.computed = None

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")


class Listener(Protocol):
    """What a reader tells of, in this order: one head, pieces of its body, its end."""

    def on_head(self, request: Request) -> None: ...

    def on_piece(self, request: Request, piece: bytes) -> None: ...

    def on_request(self, request: Request) -> None: ...


class RequestReader:
    """Feed it what a client sends. `reading`: the request that has begun, None between two. `in_head`: its head is not
    complete. `body_left`: bytes that are still to come of a body of known length, which are one piece for the parser.
    `stopped`: what comes is not looked at."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._parser = httptools.HttpRequestParser(self)
        self.reading: Request | None = None
        self.in_head = True
        self.body_left = 0
        self.stopped = False
        self._fields = 0  # bytes of the head, then of the trailers, as far as the parser told of them
        self._unfinished = 0  # bytes since it told of the end of a head, a chunk or a request, or of a piece of a body
        self._advanced = False
        self._resuming = False

    def feed(self, data: bytes | memoryview) -> None:
        """ApiError for what is not HTTP and for lines that are too long: nothing can be read behind those."""
        if self.stopped:
            return
        self._advanced, size = False, len(data)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError:
            if self.stopped:
                return
            raise ApiError("Validation", "the request is not valid HTTP", status=400) from None
        self._unfinished = 0 if self._advanced else self._unfinished + size
        if self._unfinished > MOST_HEAD:
            raise _long_head()

    def _parse(self, data: bytes | memoryview) -> bytes | memoryview:
        """What the parser leaves behind a head that offers another protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade()
            return data[upgrade.args[0] :]
        return b""

    def stop(self) -> Request | None:
        """Nothing more is told. The request that has begun."""
        self.stopped = True
        return self._take()

    def _take(self) -> Request | None:
        taken, self.reading, self.in_head, self.body_left = self.reading, None, True, 0
        return taken

    def _decline_upgrade(self) -> None:
        """No other protocol is spoken, but some clients (Java's) offer one with every request. The parser ends such a
        request at its head; another one goes on behind a head that has only what frames the body."""
        request = self.reading
        if self.stopped or request is None:
            return
        self._parser = httptools.HttpRequestParser(self)
        name = b"transfer-encoding" if b"transfer-encoding" in request.headers else b"content-length"
        framing = name + b": " + request.headers.get(name, b"0")
        self._resuming = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
        self._resuming = False

    # -- the parser's side

    def on_message_begin(self) -> None:
        if not self._resuming and not self.stopped:
            self.reading, self._fields = Request(time.monotonic()), 0

    def on_url(self, url: bytes) -> None:
        if self.reading is not None and not self._resuming:
            self._fields += len(url)
            self.reading.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reading is None or self._resuming:
            return
        self._fields += len(name) + len(value) + _AROUND
        if self.in_head:  # what a trailer says is not looked at: it comes after what it would decide
            self.reading.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        request = self.reading
        if request is None or self._resuming:
            return
        self._advanced = True
        request.method = self._parser.get_method().decode("ascii")
        request.keep_alive = self._parser.should_keep_alive()
        request.interim = self._parser.get_http_version() == "1.1"
        try:
            parsed = httptools.parse_url(request.url)
            request.path, request.query = (parsed.path or b"/").decode("ascii"), parsed.query or b""
        except (httptools.HttpParserError, UnicodeDecodeError):
            request.error = ApiError("Validation", "the request's path is not valid", status=400)
        if self._fields > MOST_HEAD:
            request.error = _long_head()
            request.keep_alive = False
        self.in_head, self._fields = False, 0
        chunked = b"transfer-encoding" in request.headers
        self.body_left = 0 if chunked else int(request.headers.get(b"content-length", b"0"))
        self._listener.on_head(request)

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        self.body_left -= len(body)  # of chunks it is below 0
        if self.reading is not None:
            self._listener.on_piece(self.reading, body)

    def on_chunk_complete(self) -> None:
        self._advanced = True

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():  # its body is still to come
            return
        self._advanced = True
        request = self._take()
        if request is None:
            return
        if self._fields > MOST_HEAD:
            request.error = request.error or _long_head()
            request.keep_alive = False
        self.stopped = not request.keep_alive
        self._listener.on_request(request)


def _long_head() -> ApiError:
    words = f"the request's head, trailers or the line of a chunk's size have more than {MOST_HEAD} bytes"
    return ApiError("Validation", words, status=431)
