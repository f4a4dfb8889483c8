"""Health, /info, /metrics, /version, the page, and POST / which is for whatever the model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from ftbert import __version__
from ftbert.server import embed_routes, pipeline_routes, rank_routes
from ftbert.server.answers import html, json
from ftbert.server.app import App
from ftbert.server.errors import ApiError
from ftbert.server.exposition import CONTENT_TYPE, exposition
from ftbert.server.json_keys import fields_of
from ftbert.server.messages import Request, Response

_PAGE = Path(__file__).with_name("page.html")


async def health(app: App, request: Request) -> Response:
    """200 and nothing; 503 while a model loads, an engine is silent or the server shuts down."""
    if app.ready:
        return Response()
    raise ApiError("Unhealthy", "shutting down" if app.leaving else "loading", retry_after=1.0)


async def live(app: App, request: Request) -> Response:
    """200 as long as the process answers."""
    return Response()


async def version(app: App, request: Request) -> Response:
    return Response(json({"version": __version__}))


async def metrics(app: App, request: Request) -> Response:
    return Response(exposition(app.rows), content_type=CONTENT_TYPE)


async def info(app: App, request: Request) -> Response:
    """Of the first model, or of ?model=NAME."""
    names = parse_qs(request.query.decode("latin-1")).get("model")
    model, settings = app.model(names[-1] if names else None), app.settings
    about = model.about
    labels = {"id2label": dict(zip(map(str, range(len(about.labels))), about.labels, strict=True)),
              "label2id": {label: i for i, label in enumerate(about.labels)}}  # fmt: skip
    kind: dict[str, Any] = {"embedding": {"pooling": about.pooling}} if not about.labels else {about.task: labels}
    values = {
        "model_id": model.source, "model_sha": None, "model_dtype": about.dtype, "served_model_name": model.name,
        "model_type": kind, "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": about.max_length, "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": settings.max_batch_requests,
        "max_client_batch_size": settings.max_client_batch_size, "auto_truncate": settings.auto_truncate,
        "tokenization_workers": settings.tokenization_workers, "version": __version__, "sha": None,
        "docker_label": None, "batch_tokens": about.batch_tokens, "tokens_per_second": round(about.rate),
        "models": [one.name for one in app.models], "engines": sum(len(one.links) for one in app.models),
        "prompts": about.prompts, "mask_token": about.mask_token,
    }  # fmt: skip
    return Response(json(values))


async def page(app: App, request: Request) -> Response:
    if not _PAGE.exists():
        return Response(b"ftbert serve: see /info, /health, /metrics\n", content_type="text/plain; charset=utf-8")
    return html(_PAGE.read_bytes())


async def no_icon(app: App, request: Request) -> Response:
    """Browsers ask for /favicon.ico; the page carries its own."""
    return Response(status=204)


async def by_model(app: App, request: Request) -> Response:
    """POST / and /invocations: rerank, predict, token_classify or embed as the model is; similarity where the body
    asks for it."""
    fields = await fields_of(request.body)
    task = app.model(_named(fields)).about.task
    if task == "token_classifier":
        return await pipeline_routes.token_classify(app, request)
    if task == "embedding":
        similar = "source_sentence" in await fields_of(fields.get("inputs", msgspec.Raw()))
        return await (embed_routes.similarity if similar else embed_routes.embed)(app, request)
    return await (rank_routes.rerank if "query" in fields else rank_routes.predict)(app, request)


def _named(fields: dict[str, msgspec.Raw]) -> str | None:
    """The model that a body names; None for whatever the route will refuse."""
    try:
        return msgspec.json.decode(fields.get("model", b"null"), type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
