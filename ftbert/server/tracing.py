"""Traces of requests for a collector of OpenTelemetry, by its own packages: the extra ftbert[otlp].

Each request is a span, by the semantic conventions for HTTP servers, with a child for each step. Spans hold no text, no
id, no key, no query string, and of a path the route alone.
"""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ftbert import __version__

if TYPE_CHECKING:
    from ftbert.server.messages import Request

_PACKAGES = {
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}
_PATH = "/v1/traces"  # of a collector, where an endpoint has none
# Seconds that a collector may take to answer; that the end of a worker waits for its last spans.
_ANSWER, _LAST = 5.0, 1.5
_GONE = 499  # nobody read the answer


class Steps(NamedTuple):
    """Of the computation of a request. began: by time.monotonic(). seconds: of each step by its name, in turn. tokens:
    of all its texts or prompts; written: that followed these."""

    began: float
    seconds: dict[str, float]
    tokens: int
    written: int | None = None


def check_traces(endpoint: str) -> None:
    """ValueError for what is no URL of http; RuntimeError that names missing packages and what to type."""
    try:
        url = urlsplit(endpoint)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"otlp-endpoint: expected a URL such as http://localhost:4318; got {endpoint!r}")
    if missing := [package for module, package in _PACKAGES.items() if not _is_there(module)]:
        names = " ".join(missing)
        raise RuntimeError(f"--otlp-endpoint needs {names}. Type: pip install {names}, or install ftbert[otlp]")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of what the module is in
        return False


class Tracer:
    """endpoint: of the collector, with http; without a path its traces go to /v1/traces. Only the event loop's thread
    calls it; a thread of the package sends, and drops spans where the collector does not come to reading them."""

    def __init__(self, endpoint: str, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        whole = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=whole, timeout=_ANSWER)))
        self._tracer = self._provider.get_tracer("ftbert", __version__)
        self._extract, self._within = TraceContextTextMapPropagator().extract, set_span_in_context
        self._server, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    def answered(self, request: Request, status: int) -> None:
        """A request is done, `computed` of it has its steps. Its client's `traceparent` names the trace that it belongs
        to, and whether that is kept."""
        now, clock = time.monotonic(), time.time_ns()
        steps: Steps | None = None if request.computed is None else request.computed.steps
        status = _GONE if request.disconnected else status
        method, path = request.method or "HTTP", request.template
        facts: dict[str, Any] = {"http.request.method": method, "http.response.status_code": status}
        facts |= {"http.route": path} if path else {}
        facts |= {"gen_ai.request.model": request.model} if request.model else {}
        if steps is not None:
            facts["gen_ai.usage.input_tokens"] = steps.tokens
            facts |= {} if steps.written is None else {"gen_ai.usage.output_tokens": steps.written}
        facts |= {"error.type": str(status)} if status >= 500 else {}
        span = self._tracer.start_span(
            f"{method} {path}".strip(), self._parent(request), self._server, facts,
            start_time=clock - int(1e9 * (now - request.began)),
        )  # fmt: skip
        if status >= 500:
            span.set_status(self._failed)
        if steps is not None and span.is_recording():
            inside, at = self._within(span), clock - int(1e9 * (now - steps.began))
            for name, seconds in steps.seconds.items():
                child = self._tracer.start_span(name, inside, start_time=at)
                at += int(1e9 * max(0.0, seconds))
                child.end(at)
        span.end(clock)

    def _parent(self, request: Request) -> Any:
        names = ("traceparent", "tracestate")
        return self._extract({name: request.header(name.encode()) for name in names})

    def close(self) -> None:
        """Sends what is left; blocks for as long as the end of a worker may take."""
        last = threading.Thread(target=self._provider.shutdown, name="ftbert-traces", daemon=True)
        last.start()
        last.join(_LAST)
