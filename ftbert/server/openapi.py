"""/openapi.json from the table of routes and the shapes of bodies and answers, and /docs, which shows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from ftbert import __version__
from ftbert.server.answers import html, json
from ftbert.server.app import App, Route, Routes
from ftbert.server.messages import Request, Response

_PAGE = Path(__file__).with_name("docs.html")
_REFERENCE = "#/components/schemas/{name}"


class TeiError(msgspec.Struct):
    error: str
    error_type: str


class OpenAIErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    error: OpenAIErrorObject
    message: str
    code: int
    type: str


# Statuses of an error that every route which computes may answer with.
_ERRORS = {
    "400": "no JSON, or nothing to do", "401": "the key is missing or wrong", "404": "no such model",
    "413": "body, answer or work is too large", "415": "the content-type is not JSON", "422": "a value is wrong",
    "424": "the model is of another kind, or a result is not finite", "429": "overloaded: see retry-after",
    "503": "loading, shutting down, or too late: see retry-after",
}  # fmt: skip


async def openapi(app: App, request: Request) -> Response:
    if app.openapi is None:
        app.openapi = json(document(app.routes))
    return Response(app.openapi)


async def docs(app: App, request: Request) -> Response:
    return html(_PAGE.read_bytes())


def document(routes: Routes) -> dict[str, Any]:
    """OpenAPI 3.1."""
    shapes = [shape for route in routes.values() for shape in (route.takes, route.gives) if shape is not None]
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
    if route.takes is None:
        return found
    found["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": described[repr(route.takes)]}},
    }
    error = {"$ref": _REFERENCE.format(name="OpenAIError" if route.openai else "TeiError")}
    for status, words in _ERRORS.items():
        found["responses"][status] = {"description": words, "content": {"application/json": {"schema": error}}}
    return found
