"""From a request to its answer: route, key, limits, metrics, errors, and the frame of every route that computes. What
each route does itself is in ..._routes.py."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ftbert.server.description import Description
from ftbert.server.errors import ApiError, too_large
from ftbert.server.http_protocol import Connections
from ftbert.server.json_bodies import BodyCheck, decode
from ftbert.server.links import Disconnected, Link
from ftbert.server.logs import LOG, AccessLog
from ftbert.server.memory import Memory
from ftbert.server.messages import Request, Response
from ftbert.server.metrics import Metrics, Row
from ftbert.server.on_demand import OnDemand
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.settings import Settings
from ftbert.server.tracing import Tracer
from ftbert.text import panics_as_errors

_SETTLE_SECONDS = 1.0
# Names of models that are not here, and were logged; more are answered without a line.
_NAMES_LOGGED = 64
# What a browser asks leave for: names of headers, at most 64 of them in a kilobyte.
_HEADERS = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+){0,63}")
_LONGEST_HEADERS = 1024
# Paths with a name in them, as routes have them.
_NAMED_PATHS = (
    ("/v1/models/{id}", re.compile("/v1/models/.*")),
    ("/openai/deployments/{deployment}/embeddings", re.compile("/openai/deployments/[^/]+/embeddings")),
)  # fmt: skip
_USUAL_HEADERS = "authorization, content-type, x-request-timeout"


@dataclass(frozen=True)
class Route:
    """public: without the key. probe: asked for again and again by what watches the server, and no access. openai:
    errors have OpenAI's body. counted: in the request metrics, and refused where all engines are full.

    For /docs: words say in a line what it is for, "" leaves it out; takes, gives: types of the body, where no Handler
    says it, and of the answer.
    """

    run: Callable[[App, Request], Awaitable[Response]]
    public: bool = False
    probe: bool = False
    openai: bool = False
    counted: bool = True
    words: str = ""
    takes: Any = None
    gives: Any = None

    @property
    def body(self) -> Any:
        """The type of its body; None where it has none."""
        return self.takes or getattr(self.run, "takes", None)


Routes = dict[tuple[str, str], Route]


class App:
    """What one worker serves."""

    def __init__(self, settings: Settings, links: Sequence[Sequence[Link]], metrics: Metrics, routes: Routes) -> None:
        self.settings, self.metrics, self.routes = settings, metrics, routes
        self._rows = {name: metrics.requests(name) for name in ("", *(name for name, _ in settings.models))}
        self.threads = ThreadPoolExecutor(settings.tokenization_workers, thread_name_prefix="ftbert-tokenise")
        self.log = AccessLog(settings.access_log)
        collector = settings.otlp_endpoint
        self.tracer = None if collector is None else Tracer(collector, settings.otlp_service_name)
        self.memory = Memory(settings.answer_limit)
        self.models = [
            ServedModel(name, source, own, settings, self.threads, self.memory)
            for (name, source), own in zip(settings.models, links, strict=True)
        ]
        self.on_demand: OnDemand | None = None  # of --models-dir
        self.connections = Connections(self, settings)
        self.openapi: bytes | None = None  # made when first asked for
        self.leaving = False  # SIGTERM came: /health says 503
        self._bodies = BodyCheck(settings.max_client_batch_size)
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._others: set[str] = set()  # names in requests that are not this server's
        self._methods: dict[str, list[str]] = {}
        for method, path in routes:
            self._methods.setdefault(path, []).append(method)

    async def close(self) -> None:
        """After the last answer."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    @property
    def ready(self) -> bool:
        return not self.leaving and self._loaded

    @property
    def _loaded(self) -> bool:
        for model in self.models:  # noqa: SIM110 - a generator costs three times as much, which each request pays
            if model.resident and not model.ready:
                return False
        return True

    def model(self, name: str | None, *tasks: str) -> ServedModel:
        """By the name in a request; without one the first that is for the first of `tasks` that any is for, one that
        still loads if none is, else the first. A single model answers to any name, as in TEI and llama.cpp. ApiError
        404; 503 for one that is loaded now because of it."""
        if name is None and len(self.models) == 1 and self.on_demand is None:
            return self.models[0]
        if name is None:
            if not (here := [model for model in self.models if model.wanted]):
                raise ApiError("Validation", "no model is loaded: POST /models/load loads one", status=404)
            fitting = [model for task in (*tasks, None) for model in here if model.does(task)]
            return fitting[0] if fitting and tasks else here[0]
        if len(self.models) > 1 or self.on_demand is not None:
            found = self.named(name)
            if not found.wanted and self.on_demand is not None:
                raise self.on_demand.absent(found)
            return found
        only, shown = self.models[0], name[:80]
        if name not in (only.name, only.source) and shown not in self._others and len(self._others) < _NAMES_LOGGED:
            self._others.add(shown)
            LOG.info("a request names the model %s; %s answers", ascii(shown), only.name)
        return only

    def named(self, name: str) -> ServedModel:
        """Also by Ollama's name, NAME:latest. ApiError 404."""
        for model in self.models:
            if name in (model.name, model.source, f"{model.name}:latest"):
                return model
        known = ", ".join(model.name for model in self.models)
        raise ApiError("Validation", f"the model {name[:200]!r} does not exist; this server has: {known}", status=404,
                       param="model", code="model_not_found")  # fmt: skip

    def end_streams(self, words: str) -> None:
        """Of all texts that are written: they end with this error."""
        for link in (link for model in self.models for link in model.links):
            link.end_streams(words)

    def row(self, request: Request) -> Row:
        """Where it is counted: by its model, "" before that is known."""
        return self._rows[request.model]

    def gate(self, request: Request) -> ApiError | None:
        """What is wrong with a request as far as its head says; called before its body is read."""
        method = "GET" if request.method == "HEAD" else request.method
        path = request.path
        if path not in self._methods:
            path = next((name for name, pattern in _NAMED_PATHS if pattern.fullmatch(path)), path)
        route = request.route = self.routes.get((method, path))
        request.template = "" if route is None else path
        if method == "OPTIONS" and self.settings.cors_allow_origin:
            return None
        if route is None:
            if known := self._methods.get(path):
                words = f"the method must be {' or '.join(known)}"
                return ApiError("Validation", words, status=405, allow=", ".join(known))
            return ApiError("Validation", "there is no such path", status=404)
        if self._key is not None and not route.public and not self._has_key(request):
            return ApiError("Validation", "the API key is missing or wrong", status=401, code="invalid_api_key")
        if method != "POST":
            return None
        content_type = request.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if content_type != b"application/json" and not content_type.endswith(b"+json"):
            return ApiError("Validation", "the content-type must be application/json", status=415)
        try:
            length = int(request.headers.get(b"content-length", b"0"))
        except ValueError:
            return ApiError("Validation", "content-length is no number", status=400)
        if length > self.settings.payload_limit:
            return too_large(self.settings.payload_limit)
        shared = self.connections
        crowded = shared.running >= self.settings.max_concurrent_requests or shared.full(length)
        # Without a look at the body: what a refusal costs is taken from those who are served.
        waits = [model.retry_after() for model in self.models if model.wanted] if route.counted else []
        full = min(waits, default=0.0)
        if crowded or full:
            return ApiError("Overloaded", "Model is overloaded", retry_after=full or 1.0)
        return None

    async def handle(self, request: Request) -> Response:
        """Never raises but for a cancelled task."""
        response = await self._handled(request)
        if response.stream is None:
            self._answered(request, response)
        else:
            request.on_end(lambda: self._answered(request, response))
        return response

    def _answered(self, request: Request, response: Response) -> None:
        self.log.answered(request, response)
        if self.tracer is not None and not (request.route is not None and request.route.probe):
            self.tracer.answered(request, response.status)

    async def _handled(self, request: Request) -> Response:
        route: Route | None = request.route
        if route is None:  # a browser asks before it calls
            return Response(status=204, headers=cors_headers(self.settings, request, preflight=True))
        try:
            if route.counted and not self._loaded:
                await self._settle()
            if request.body:
                await self._bodies.check(request.body)
            if request.disconnected:
                raise Disconnected
            with panics_as_errors():
                response = await route.run(self, request)
        except ApiError as error:
            return self._refused(request, error)
        except Disconnected:
            self.row(request).failed("dropped")
            return Response(status=503)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end the connection, nor be told in full
            LOG.exception("%s failed", request.path) if type(error) is not RecursionError else None
            return self._refused(request, ApiError("Backend", "internal error", status=500))
        if self.settings.cors_allow_origin:
            response.headers += cors_headers(self.settings, request)
        if route.counted:
            took = self._observe_duration(request)
            request.on_end(took) if response.stream is not None else took()
        return response

    def _observe_duration(self, request: Request) -> Callable[[], None]:
        return lambda: self.row(request).observe("te_request_duration", time.monotonic() - request.began)

    async def _settle(self) -> None:
        """Waits a moment for the models: this worker may be the last to hear that an engine is there, and a client saw
        another's 200 on /health."""
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until and not self._loaded:
            await asyncio.sleep(0.01)

    def refusal(self, request: Request) -> Response:
        """The answer to a request that gate() refused."""
        assert request.error is not None
        response = self._refused(request, request.error)
        self._answered(request, response)
        return response

    def _refused(self, request: Request, error: ApiError) -> Response:
        route: Route | None = request.route
        self.log.failed(request, error)
        if route is not None and route.counted:
            self.row(request).failed(error.counted)
        openai = route.openai if route is not None else request.path.startswith(("/v1/", "/v2/", "/openai/"))
        headers = error.headers() + cors_headers(self.settings, request)
        return Response(error.body(openai), error.status, headers=headers)

    def _has_key(self, request: Request) -> bool:
        assert self._key is not None
        kind, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer":  # Azure's clients have a header for it
            given = request.headers.get(b"api-key", b"")
        return hmac.compare_digest(given.strip(), self._key)


class Named(Protocol):
    """A body that may name the model."""

    model: str | None


B = TypeVar("B", bound=Named)
# What was computed, and the answer's body (see Response), or where that is no JSON the answer.
Made = tuple[Computed, bytes | list[bytes] | Response]


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
        request.model = model.name
        texts, row, counts = self.texts(body, app.settings), app.row(request), self.counts
        row.count("te_request_count", label=int(len(texts) > 1))
        row.count(f"te_{counts}_count", len(texts))
        model.expect(*self.tasks)
        done, found = await self.run(Asked(app, request, body, model, texts))
        if app.tracer is not None:
            request.computed = done
        row.count("te_request_success", label=int(len(texts) > 1))
        row.count(f"te_{counts}_success", len(texts))
        row.observe("te_request_input_length", done.encoded.tokens / max(1, len(texts)), len(texts))
        for kind in ("request", counts):
            row.observe(f"te_{kind}_tokenization_duration", done.tokenization)
            row.observe(f"te_{kind}_queue_duration", max(0.0, done.queue))
            row.observe(f"te_{kind}_inference_duration", done.inference)
        row.observe(f"te_{counts}_duration", time.monotonic() - request.began)
        response = found if isinstance(found, Response) else Response(found)
        response.headers += _times(model.about, request, done)
        return response


def computes(
    takes: type[B], counts: str, *tasks: str, texts: Callable[[B, Settings], Sequence[Any]]
) -> Callable[[Callable[[Asked[B]], Awaitable[Made]]], Handler[B]]:
    """Makes a Handler of a route's own part."""
    return lambda run: Handler(takes, counts, tasks, texts, run)


def _times(about: Description, request: Request, done: Computed) -> list[tuple[str, str]]:
    """TEI's, in whole milliseconds."""
    total = f"{1e3 * (time.monotonic() - request.began):.0f}"
    return [
        ("x-compute-type", about.model.computes_with),
        ("x-compute-time", total),
        ("x-compute-characters", str(done.encoded.characters)),
        ("x-compute-tokens", str(done.encoded.tokens)),
        ("x-total-time", total),
        ("x-tokenization-time", f"{1e3 * done.tokenization:.0f}"),
        ("x-queue-time", f"{1e3 * done.queue:.0f}"),
        ("x-inference-time", f"{1e3 * done.inference:.0f}"),
    ]


def cors_headers(settings: Settings, request: Request, preflight: bool = False) -> list[tuple[str, str]]:
    """Headers that let a page from elsewhere call the server: none without the setting, or for an origin that it does
    not name."""
    if settings.cors_allow_origin is None:
        return []
    allowed = [one.strip() for one in settings.cors_allow_origin.split(",")]
    origin = request.header(b"origin")
    if "*" not in allowed and origin not in allowed:
        return [("vary", "origin")]
    vary = ("vary", "origin, access-control-request-headers" if preflight else "origin")
    found = [("access-control-allow-origin", "*" if "*" in allowed else origin), vary]
    exposed = "x-compute-time, x-compute-tokens, x-queue-time, x-inference-time, x-tokenization-time, retry-after"
    if not preflight:
        return [*found, ("access-control-expose-headers", exposed)]
    asked = request.header(b"access-control-request-headers")
    usable = len(asked) <= _LONGEST_HEADERS and _HEADERS.fullmatch(asked)
    return [
        *found,
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        # Clients add some of their own, as openai's x-stainless-...; the key is checked, whatever they are.
        ("access-control-allow-headers", asked if usable else _USUAL_HEADERS),
        ("access-control-max-age", "86400"),
    ]
