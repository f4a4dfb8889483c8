"""A request as it was read, a response as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from ftbert.server.errors import ApiError

JSON = "application/json"
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_STATUS_LINES[422] = "HTTP/1.1 422 Unprocessable Entity\r\n"  # Python's phrase changed between releases
_STATUS_LINES[413] = "HTTP/1.1 413 Payload Too Large\r\n"


@dataclass
class Response:
    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: list[tuple[str, str]] = field(default_factory=list)

    def encoded(self, close: bool, with_body: bool) -> bytes:
        """The bytes to send. with_body: False for HEAD."""
        head = [_STATUS_LINES[self.status]]
        if self.body:
            head.append(f"content-type: {self.content_type}\r\n")
        head.append(f"content-length: {len(self.body)}\r\n")
        head += [f"{name}: {value}\r\n" for name, value in self.headers]
        head.append("connection: close\r\n\r\n" if close else "\r\n")
        return "".join(head).encode("latin-1") + (self.body if with_body else b"")


class Request:
    """headers: by lower-case name; of a name that is there twice, the last. began: at its first byte, monotonic."""

    __slots__ = (
        "began", "body", "bodies", "disconnected", "error", "headers", "keep_alive", "length", "method", "path",
        "query", "route", "url", "_cancels",
    )  # fmt: skip

    def __init__(self, began: float) -> None:
        self.began = began
        self.method, self.path, self.query, self.url = "", "", b"", b""
        self.headers: dict[bytes, bytes] = {}
        self.bodies: list[bytes] = []
        self.body = b""
        self.length = 0  # bytes of the body so far
        self.keep_alive = False
        self.route: Any = None
        self.error: ApiError | None = None  # found before the body was read
        self.disconnected = False
        self._cancels: list[Callable[[], None]] = []

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

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")
