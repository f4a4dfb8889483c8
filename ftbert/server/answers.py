"""What answers have in common: JSON of many numbers, headers and metrics of what was computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import orjson

from ftbert.server.app import App
from ftbert.server.description import Description
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import Computed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Floats that are written without letting others of the event loop in between: 2 ms.
_FLOATS_AT_ONCE, _BYTES_AT_ONCE = 65536, 1 << 18


def json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


async def json_matrix(rows: NDArray[np.float32]) -> list[bytes]:
    """Parts of float32 [n, width] as a list of lists."""
    step = max(1, _FLOATS_AT_ONCE // max(1, rows.shape[-1]))
    if len(rows) <= step:
        return [json(rows)]
    parts = []
    for start in range(0, len(rows), step):
        parts.append((b"," if start else b"[") + json(rows[start : start + step])[1:-1])
        await asyncio.sleep(0)
    return [*parts, b"]"]


async def json_list(items: Iterable[Any]) -> list[bytes]:
    """Parts of a list. An item is taken when its turn comes: as Python objects they are large."""
    parts, size = [b"["], 0
    for item in items:
        parts.append((b"," if len(parts) > 1 else b"") + json(item))
        size += len(parts[-1])
        if size > _BYTES_AT_ONCE:
            size = 0
            await asyncio.sleep(0)
    return [*parts, b"]"]


def html(page: bytes) -> Response:
    """A page that may call this server, and load nothing from elsewhere."""
    policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    headers = [("content-security-policy", policy), ("x-content-type-options", "nosniff")]
    return Response(page, content_type="text/html; charset=utf-8", headers=headers)


def computed_headers(about: Description, request: Request, done: Computed) -> list[tuple[str, str]]:
    """TEI's, in whole milliseconds."""
    total = f"{1e3 * (time.monotonic() - request.began):.0f}"
    return [
        ("x-compute-type", about.computes_with),
        ("x-compute-time", total),
        ("x-compute-characters", str(done.encoded.characters)),
        ("x-compute-tokens", str(done.encoded.tokens)),
        ("x-total-time", total),
        ("x-tokenization-time", f"{1e3 * done.tokenization:.0f}"),
        ("x-queue-time", f"{1e3 * done.queue:.0f}"),
        ("x-inference-time", f"{1e3 * done.inference:.0f}"),
    ]


def answered(
    app: App, request: Request, about: Description, done: Computed, body: bytes | list[bytes], what: str
) -> Response:
    """200 with its headers, counted. body: see Response. what: "embed" or "predict"."""
    row, texts = app.row, len(done.encoded.offsets) - 1
    row.count("te_request_success", label=int(texts > 1))
    row.count(f"te_{what}_success", texts)
    row.observe("te_request_input_length", done.encoded.tokens / max(1, texts), texts)
    for kind in ("request", what):
        row.observe(f"te_{kind}_tokenization_duration", done.tokenization)
        row.observe(f"te_{kind}_queue_duration", max(0.0, done.queue))
        row.observe(f"te_{kind}_inference_duration", done.inference)
    row.observe(f"te_{what}_duration", time.monotonic() - request.began)
    return Response(body, headers=computed_headers(about, request, done))


def count_request(app: App, texts: int, what: str) -> None:
    """A request with so many texts, before it is worked on."""
    app.row.count("te_request_count", label=int(texts > 1))
    app.row.count(f"te_{what}_count", texts)
