"""The bytes that a client sends, as requests: heads, bodies in one or many chunks, trailers, and what bounds each."""

from __future__ import annotations

import time
from typing import Protocol

import httptools

from ftbert.server.errors import ApiError
from ftbert.server.messages import Request

# Bytes of a head; of the size of a chunk with its extensions; of the trailers behind the last chunk.
MOST_HEAD = 65536
# What a name and a value cost beside their own bytes: a colon, a space, the end of the line.
_AROUND = 4


class Owner(Protocol):
    """What a reader tells of, in this order: one head, pieces of its body, its end."""

    def on_head(self, request: Request) -> None: ...

    def on_piece(self, request: Request, piece: bytes) -> None: ...

    def on_request(self, request: Request) -> None: ...


class RequestReader:
    """Feed it what a client sends. `reading`: the request that has begun, None between two. `in_head`: its head is not
    complete. `stopped`: what comes is not looked at."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._parser = httptools.HttpRequestParser(self)
        self.reading: Request | None = None
        self.in_head = True
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
        taken, self.reading, self.in_head = self.reading, None, True
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
        self._owner.on_head(request)

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        if self.reading is not None:
            self._owner.on_piece(self.reading, body)

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
        self._owner.on_request(request)


def _long_head() -> ApiError:
    words = f"the request's head, trailers or the line of a chunk's size have more than {MOST_HEAD} bytes"
    return ApiError("Validation", words, status=431)
