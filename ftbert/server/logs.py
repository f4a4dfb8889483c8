"""Lines on standard error. Never texts, keys or bodies of requests."""

from __future__ import annotations

import json
import logging
import time


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        values |= getattr(record, "fields", {})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


class _Lines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("ftbert: %(asctime)s %(message)s", "%H:%M:%S")
        self.converter = time.localtime


def set_up(as_json: bool) -> logging.Logger:
    log = logging.getLogger("ftbert.serve")
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if as_json else _Lines())
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
    return log


def say_where(host: str, port: int) -> None:
    """That the server listens now."""
    logging.getLogger("ftbert.serve").info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
