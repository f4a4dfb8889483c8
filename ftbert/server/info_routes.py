"""What the server tells of itself: health, /info, /v1/models, /metrics, /version, the page, /openapi.json and /docs."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from ftbert import __version__
from ftbert.server.app import App, Route, Routes
from ftbert.server.errors import ApiError
from ftbert.server.json_bodies import to_json
from ftbert.server.messages import Request, Response
from ftbert.server.metrics import CONTENT_TYPE
from ftbert.server.schemas import OpenAIError, TeiError
from ftbert.server.served_model import ServedModel

_PAGE, _DOCS = (Path(__file__).with_name(name) for name in ("page.html", "docs.html"))
_STARTED = int(time.time())
_REFERENCE = "#/components/schemas/{name}"
# Statuses of an error that every route which computes may answer with.
_ERRORS = {
    "400": "no JSON, or nothing to do", "401": "the key is missing or wrong", "404": "no such model",
    "413": "body, answer or work is too large", "415": "the content-type is not JSON", "422": "a value is wrong",
    "424": "the model is of another kind, or a result is not finite", "429": "overloaded: see retry-after",
    "503": "loading, shutting down, or too late: see retry-after",
}  # fmt: skip


async def health(app: App, request: Request) -> Response:
    """200 and nothing; 503 while a model loads, an engine is silent or the server shuts down. ?model=NAME: of that
    model alone, 404 for another name."""
    name = _asked_model(request)
    model = None if name is None else next((one for one in app.models if one.name == name), None)
    if name is not None and model is None:  # without the names that there are: it is asked without a key
        raise ApiError("Validation", "there is no such model", status=404)
    if app.ready if model is None else model.ready and not app.leaving:
        return Response()
    state = "loading" if model is None else model.state
    raise ApiError("Unhealthy", "shutting down" if app.leaving else state, retry_after=1.0)


def _asked_model(request: Request) -> str | None:
    names = parse_qs(request.query.decode("latin-1")).get("model")
    return names[-1] if names else None


async def live(app: App, request: Request) -> Response:
    """200 as long as the process answers."""
    return Response()


async def version(app: App, request: Request) -> Response:
    return Response(to_json({"version": __version__}))


async def metrics(app: App, request: Request) -> Response:
    return Response(app.metrics.exposition(), content_type=CONTENT_TYPE)


async def info(app: App, request: Request) -> Response:
    """Of the first model, or of ?model=NAME."""
    model, settings = app.model(_asked_model(request)), app.settings
    about = model.about
    names = about.scores.labels
    labels = {"id2label": {str(i): label for i, label in enumerate(names)},
              "label2id": {label: i for i, label in enumerate(names)}}  # fmt: skip
    kind: dict[str, Any] = {about.task: labels} if names else {"embedding": {"pooling": about.vectors.pooling}}
    values = {
        "model_id": model.source, "model_sha": None, "model_dtype": about.model.dtype, "served_model_name": model.name,
        "model_type": kind, "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": about.text.max_length, "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": settings.max_batch_requests,
        "max_client_batch_size": settings.max_client_batch_size, "auto_truncate": settings.auto_truncate,
        "tokenization_workers": settings.tokenization_workers, "version": __version__, "sha": None,
        "docker_label": None, "batch_tokens": about.batch_tokens, "tokens_per_second": round(about.rate),
        "models": [one.name for one in app.models], "engines": sum(len(one.links) for one in app.models),
        "prompts": about.text.prompts, "mask_token": about.text.mask_token, "capabilities": capabilities(model),
    }  # fmt: skip
    if (facts := about.generation) is not None:
        values |= {"generation_slots": facts.slots, "max_model_len": facts.positions}
    return Response(to_json(values))


async def models(app: App, request: Request) -> Response:
    return Response(to_json({"object": "list", "data": [_card(app, model) for model in app.models]}))


async def one_model(app: App, request: Request) -> Response:
    """By its name, or by its folder or hub id."""
    name = unquote(request.path.removeprefix("/v1/models/"))
    return Response(to_json(_card(app, app.named(name))))


def _card(app: App, model: ServedModel) -> dict[str, Any]:
    status = {"value": model.state} if app.on_demand is None else app.on_demand.status(model)
    card = {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "ftbert", "root": model.source,
            "status": status}  # fmt: skip
    if model.task is None or not model.wanted:  # it still loads, or is not to be there
        return card
    facts = model.about.generation
    length = model.about.text.max_length if facts is None else facts.positions
    return {**card, "max_model_len": length, "capabilities": capabilities(model)}


def capabilities(model: ServedModel) -> list[str]:
    """What it is for, then what it can do beside."""
    facts = model.about.generation
    beside = ["fill_mask"] * model.does("fill_mask") + ["sparse"] * (model.does("sparse") and model.task != "sparse")
    written = [] if facts is None else ["completion"] + ["chat"] * (facts.template is not None)
    return [str(model.task), *beside, *written]


async def page(app: App, request: Request) -> Response:
    if not _PAGE.exists():
        return Response(b"ftbert serve: see /info, /health, /metrics\n", content_type="text/plain; charset=utf-8")
    return _html(_PAGE.read_bytes())


async def no_icon(app: App, request: Request) -> Response:
    """Browsers ask for /favicon.ico; the page carries its own."""
    return Response(status=204)


async def openapi(app: App, request: Request) -> Response:
    if app.openapi is None:
        app.openapi = to_json(document(app.routes))
    return Response(app.openapi)


async def docs(app: App, request: Request) -> Response:
    return _html(_DOCS.read_bytes())


def _html(page: bytes) -> Response:
    """A page that may call this server, and load nothing from elsewhere."""
    policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    headers = [("content-security-policy", policy), ("x-content-type-options", "nosniff")]
    return Response(page, content_type="text/html; charset=utf-8", headers=headers)


def document(routes: Routes) -> dict[str, Any]:
    """OpenAPI 3.1."""
    shapes = [shape for route in routes.values() for shape in (route.body, route.gives) if shape is not None]
    schemas, components = msgspec.json.schema_components([*shapes, TeiError, OpenAIError], ref_template=_REFERENCE)
    described = dict(zip(map(repr, shapes), schemas, strict=False))
    paths: dict[str, Any] = {}
    for (method, path), route in routes.items():
        if route.words:
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, route, described)
    scheme = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ftbert serve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": scheme}},
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, route: Route, described: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "the result"}
    if route.gives is not None:
        answer["content"] = {"application/json": {"schema": described[repr(route.gives)]}}
    found: dict[str, Any] = {
        "operationId": method.lower() + re.sub(r"\W+", "_", path.rstrip("/}") or "/any"),
        "summary": route.words,
        "responses": {"200": answer},
    }
    if names := re.findall(r"\{(\w+)\}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.body is None:
        return found
    found["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": described[repr(route.body)]}},
    }
    error = {"$ref": _REFERENCE.format(name="OpenAIError" if route.openai else "TeiError")}
    for status, words in _ERRORS.items():
        found["responses"][status] = {"description": words, "content": {"application/json": {"schema": error}}}
    return found
