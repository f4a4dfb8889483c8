"""Answers that come in pieces: server-sent events, and lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from ftbert.server.app import App
from ftbert.server.errors import ApiError
from ftbert.server.json_bodies import to_json
from ftbert.server.links import Disconnected
from ftbert.server.logs import LOG
from ftbert.server.messages import Request, Response

EVENTS, LINES = "text/event-stream; charset=utf-8", "application/x-ndjson"
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error.body(openai=True) + b"\n\n"


def line(value: Any) -> bytes:
    return to_json(value) + b"\n"


def error_line(error: ApiError) -> bytes:
    return error.body(openai=False) + b"\n"


async def streamed(
    app: App, request: Request, pieces: AsyncGenerator[bytes, None], content_type: str,
    error: Callable[[ApiError], bytes],
) -> Response:  # fmt: skip
    """Once the first piece is there: what is wrong before it has a status of its own (ApiError). error: the piece that
    tells what goes wrong later, behind which nothing comes."""
    first = await anext(pieces)

    def failed(found: ApiError) -> bytes:
        app.log.failed(request, found)
        app.row(request).failed(found.counted)
        return error(found)

    async def rest() -> AsyncGenerator[bytes, None]:
        yield first
        try:
            async for piece in pieces:
                yield piece
            if not request.disconnected:
                app.row(request).count("te_request_success")
        except Disconnected:
            return
        except ApiError as found:
            yield failed(found)
        except Exception:  # noqa: BLE001 - a fault of ours is not told in full
            LOG.exception("a stream failed")
            yield failed(ApiError("Backend", "internal error", status=500))
        finally:
            await pieces.aclose()

    request.on_end(lambda: app.row(request).failed("dropped") if request.disconnected else None)
    return Response(content_type=content_type, stream=rest())
