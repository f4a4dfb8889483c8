"""The frame of every route that computes: body, model, texts, counts, what the route does itself, headers, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ftbert.server.app import App
from ftbert.server.description import Description
from ftbert.server.json_bodies import decode
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.settings import Settings


class Named(Protocol):
    """A body that may name the model."""

    model: str | None


B = TypeVar("B", bound=Named)
Made = tuple[Computed, bytes | list[bytes]]  # what was computed, and the answer's body: see Response


@dataclass(slots=True)
class Asked(Generic[B]):
    """One request to a route that computes. body: decoded. texts: as the route lists them."""

    app: App
    request: Request
    body: B
    model: ServedModel
    texts: Any


@dataclass(frozen=True)
class Handler(Generic[B]):
    """takes: the type of the body. tasks: of models that it is for. counts: "embed" or "predict", in metrics. texts:
    what of a body is computed; ApiError where that is empty or too much. run: the route's own part."""

    takes: type[B]
    counts: str
    tasks: tuple[str, ...]
    texts: Callable[[B, Settings], Sequence[Any]]
    run: Callable[[Asked[B]], Awaitable[Made]]

    def __call__(self, app: App, request: Request) -> Coroutine[Any, Any, Response]:
        body = decode(request.body, self.takes)
        return self.answer(app, request, body, app.model(body.model, *self.tasks))

    async def answer(self, app: App, request: Request, body: B, model: ServedModel) -> Response:
        texts, row, counts = self.texts(body, app.settings), app.row, self.counts
        row.count("te_request_count", label=int(len(texts) > 1))
        row.count(f"te_{counts}_count", len(texts))
        model.expect(*self.tasks)
        done, found = await self.run(Asked(app, request, body, model, texts))
        row.count("te_request_success", label=int(len(texts) > 1))
        row.count(f"te_{counts}_success", len(texts))
        row.observe("te_request_input_length", done.encoded.tokens / max(1, len(texts)), len(texts))
        for kind in ("request", counts):
            row.observe(f"te_{kind}_tokenization_duration", done.tokenization)
            row.observe(f"te_{kind}_queue_duration", max(0.0, done.queue))
            row.observe(f"te_{kind}_inference_duration", done.inference)
        row.observe(f"te_{counts}_duration", time.monotonic() - request.began)
        return Response(found, headers=_headers(model.about, request, done))


def computes(
    takes: type[B], counts: str, *tasks: str, texts: Callable[[B, Settings], Sequence[Any]]
) -> Callable[[Callable[[Asked[B]], Awaitable[Made]]], Handler[B]]:
    """Makes a Handler of a route's own part."""
    return lambda run: Handler(takes, counts, tasks, texts, run)


def _headers(about: Description, request: Request, done: Computed) -> list[tuple[str, str]]:
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
