"""A request as it was read, a response as it is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from ftbert.server.errors import ApiError

JSON = "application/json"
# Bytes that are written at once: 1 ms, in which others of the event loop wait.
_PIECE = 1 << 20
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_STATUS_LINES[422] = "HTTP/1.1 422 Unprocessable Entity\r\n"  # Python's phrase changed between releases
_STATUS_LINES[413] = "HTTP/1.1 413 Payload Too Large\r\n"


@dataclass
class Response:
    """body: a long one as parts, which are never put together."""

    body: bytes | list[bytes] = b""
    status: int = 200
    content_type: str = JSON
    headers: list[tuple[str, str]] = field(default_factory=list)

    def pieces(self, close: bool, with_body: bool) -> deque[list[bytes]]:
        """The bytes to send: the parts of each piece that is sent at once. with_body: False for HEAD."""
        parts = self.body if isinstance(self.body, list) else [self.body]
        head = [_STATUS_LINES[self.status]]
        size = sum(map(len, parts))
        if size:
            head.append(f"content-type: {self.content_type}\r\n")
        if self.status != 204:
            head.append(f"content-length: {size}\r\n")
        head += [f"{name}: {value}\r\n" for name, value in self.headers]
        head.append("connection: close\r\n\r\n" if close else "\r\n")
        pieces, size = deque([["".join(head).encode("latin-1")]]), 0
        for part in parts if with_body else ():
            size += len(part)
            if size > _PIECE:
                pieces.append([])
                size = len(part)
            pieces[-1].append(part)
        return pieces


class Request:
    """headers: by lower-case name; of a name that is there twice, the last. began: at its first byte, monotonic."""

    __slots__ = (
        "began", "body", "disconnected", "error", "expects", "headers", "held", "interim", "keep_alive", "method",
        "model", "path", "query", "route", "url", "_cancels", "_ends",
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

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")
