"""The frame of every route that generates text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ftbert.server.app import App, Named
from ftbert.server.json_bodies import decode
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import ServedModel

B = TypeVar("B", bound=Named)
Run = Callable[[App, Request, B, ServedModel], Awaitable[Response]]


@dataclass(frozen=True)
class Generating(Generic[B]):
    """takes: the type of the body. run: the route's own part."""

    takes: type[B]
    run: Run[B]

    def __call__(self, app: App, request: Request) -> Coroutine[Any, Any, Response]:
        body = decode(request.body, self.takes)
        return self.answer(app, request, body, app.model(body.model, "generation"))

    async def answer(self, app: App, request: Request, body: B, model: ServedModel) -> Response:
        request.model = model.name
        row = app.row(request)
        row.count("te_request_count")
        model.expect("generation")
        found = await self.run(app, request, body, model)
        if found.stream is None:  # a stream counts itself, once it has ended
            row.count("te_request_success")
        return found


def generates(takes: type[B]) -> Callable[[Run[B]], Generating[B]]:
    """Makes a Generating of a route's own part."""
    return lambda run: Generating(takes, run)
