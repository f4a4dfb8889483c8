"""Lines on standard error: what the processes do, requests where that is asked for, failures of the server always.

Never a text, a key, a header, a body or a query string.
"""

from __future__ import annotations

import json
import logging
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftbert.server.errors import ApiError
    from ftbert.server.messages import Request, Response

LOG = logging.getLogger("ftbert.serve")
# Seconds in which the same error is one line: of a server without an engine every request fails.
_SAME = 1.0
_MOST_PATH = 200  # characters


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        values |= getattr(record, "fields", {})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


def set_up(as_json: bool) -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("ftbert: %(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines() if as_json else plain)
    LOG.handlers[:] = [handler]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    # What packages say, as the exporter of traces without its collector, and Python's warnings: lines of the same form.
    logging.basicConfig(handlers=[handler])
    logging.captureWarnings(True)


def say_where(address: tuple[str, int], has_key: bool) -> None:
    """That the server listens now. address: of the socket."""
    host, port = address
    LOG.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    warn_without_key(host, has_key)


def warn_without_key(host: str, has_key: bool) -> None:
    """Where other machines reach the address. host: a number or a name."""
    try:
        here = ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        here = host == "localhost"
    if not here and not has_key:
        LOG.warning("other machines reach %s without a key: set API_KEY, or listen on 127.0.0.1", host)


class AccessLog:
    """every: a line for each answer. Only the event loop's thread calls it."""

    def __init__(self, every: bool) -> None:
        self._every = every
        self._last, self._until, self._same = "", 0.0, 0

    def answered(self, request: Request, response: Response) -> None:
        """When the answer is made, but to a probe. The status of a client that has gone is 499."""
        if not self._every or (request.route is not None and request.route.probe):
            return
        values = {
            "method": request.method or "-",
            "path": request.path[:_MOST_PATH] or "-",
            "status": 499 if request.disconnected else response.status,
            "bytes": response.size,
            "seconds": round(time.monotonic() - request.began, 4),
            "model": request.model or "-",
        }
        LOG.info(" ".join(["{}"] * len(values)).format(*values.values()), extra={"fields": values})

    def failed(self, request: Request, error: ApiError) -> None:
        """5xx, but of the routes that are asked for the server's state."""
        if error.status < 500 or (request.route is not None and request.route.public):
            return
        line, now = f"{request.method} {request.path[:_MOST_PATH]}: {error.status} {error.words}", time.monotonic()
        if line == self._last and now < self._until:
            self._same += 1
            return
        more = f" (and {self._same} more like the one before)" if self._same else ""
        self._last, self._until, self._same = line, now + _SAME, 0
        LOG.error("%s%s", line, more)
