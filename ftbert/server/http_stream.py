"""An answer that is sent while it is made, no faster than its client reads: nothing is gathered on the way."""

from __future__ import annotations

import asyncio
import select
from typing import Any

from ftbert.server.logs import LOG
from ftbert.server.messages import Request, Response


class OutgoingStream:
    """response: one with a stream. chunked: of HTTP/1.1, else the end of the connection ends it."""

    def __init__(self, transport: Any, request: Request, response: Response, chunked: bool) -> None:
        self._transport, self._request, self._response, self._chunked = transport, request, response, chunked
        self._paused = False
        self._resumed: asyncio.Future[None] | None = None

    async def send(self, last: bool) -> None:
        """All of it, or as much as the client takes. last: the connection ends behind it."""
        stream, response, chunked = self._response.stream, self._response, self._chunked
        assert stream is not None
        try:
            if not self._gone:
                self._transport.write(response.stream_head(last, chunked))
                async for piece in stream:
                    if self._gone:
                        break
                    response.sent += len(piece)
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                    while self._paused and not self._gone:
                        self._resumed = asyncio.get_running_loop().create_future()
                        await self._resumed
                if self._gone:  # the event loop may tell of it later
                    self._request.disconnect()
                elif chunked:
                    self._transport.write(b"0\r\n\r\n")
        except Exception:  # noqa: BLE001 - a fault of ours: what was sent stays without its end
            LOG.exception("%s: a stream failed", self._request.path)
            self._transport.abort()
        finally:
            await stream.aclose()

    @property
    def _gone(self) -> bool:
        return self._request.disconnected or bool(self._transport.is_closing())

    def pause(self) -> None:
        """The client does not read what was sent."""
        self._paused = True

    def resume(self) -> None:
        """It does again, or is gone."""
        self._paused = False
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)


def is_reset(transport: Any) -> bool:
    """The other side has gone, as far as the system knows."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
