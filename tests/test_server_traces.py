"""Traces of requests, as a collector gets them over HTTP."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="opentelemetry is not installed: ftbert[otlp]")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest  # noqa: E402
from served import as_command, in_thread  # noqa: E402

from ftbert.server import tracing  # noqa: E402

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STEPS = ["tokenization", "queue", "inference"]


@dataclass
class Collector:
    """bodies: what it was sent. silent: it answers only when told to."""

    port: int = 0
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Any]:
        messages = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [span for one in messages for own in one.resource_spans for some in own.scope_spans for span in some.spans]

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@contextmanager
def collector(silent: bool = False) -> Iterator[Collector]:
    found = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.paths.append(self.path)
            found.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            if silent:
                found.go.wait(20)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield found
    finally:
        found.go.set()
        server.shutdown()
        server.server_close()


def facts(span: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value or one.value.int_value for one in span.attributes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("traced"))


def test_a_request_is_a_span_with_a_child_for_each_step(folder: Path) -> None:
    with collector() as collected:
        began = time.time_ns()
        with in_thread(("m", folder), otlp_endpoint=collected.url, otlp_service_name="search", api_key="geheim") as server:
            parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert server.call("POST", "/embed?word7", {"inputs": ["word1 word2", "word3"]}, parent).status == 200
            server.post("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, traceparent="00-zz")
            server.post("/v1/embeddings", {"input": "a"}, traceparent=f"00-{TRACE}-{PARENT}-00")  # is not to be kept
            assert server.call("POST", "/rerank", {"query": "word4", "texts": ["word5"]}).status == 424
            assert server.call("GET", "/v1/models/word6").status == 404
            assert server.call("GET", "/word8").status == 404
            for path in ("/health", "/ping", "/live", "/metrics"):
                server.call("GET", path)
    assert set(collected.paths) == {"/v1/traces"}
    raw = b"".join(collected.bodies)
    assert b"search" in raw
    assert not any(word in raw for word in (b"word", b"geheim", b"127.0.0.1"))
    roots = {span.name: span for span in collected.spans if span.name not in STEPS}
    assert set(roots) == {"POST /embed", "POST /similarity", "POST /rerank", "GET /v1/models/{id}", "GET"}
    span = roots["POST /embed"]
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.kind) == (TRACE, PARENT, span.SPAN_KIND_SERVER)
    assert facts(span) == {
        "http.request.method": "POST", "http.response.status_code": 200, "http.route": "/embed",
        "gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 7,
    }  # fmt: skip
    children = [one for one in collected.spans if one.parent_span_id == span.span_id]
    assert [one.name for one in children] == STEPS
    assert all(one.trace_id == span.trace_id for one in children)
    times = [at for one in children for at in (one.start_time_unix_nano, one.end_time_unix_nano)]
    inside = [span.start_time_unix_nano, *times, span.end_time_unix_nano]
    assert inside == sorted(inside) and began <= inside[0] and inside[-1] <= time.time_ns()
    own = roots["POST /similarity"]
    assert own.trace_id.hex() != TRACE and not own.parent_span_id  # the header was none
    assert facts(roots["POST /rerank"])["http.response.status_code"] == 424
    assert "http.route" not in facts(roots["GET"])
    assert len(collected.spans) == len(roots) + 2 * len(STEPS)


def test_faults_of_the_server_are_errors_and_those_of_clients_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5xx are errors, 4xx are not: those are the client's."""
    from ftbert.server import embed_routes

    def fails(*_: Any) -> None:
        raise OSError("word9")

    with collector() as collected, in_thread(("m", folder), otlp_endpoint=collected.url + "/", api_key="k") as server:
        assert server.call("POST", "/embed", {"inputs": ["a"]}, {"authorization": "Bearer geheim"}).status == 401
        monkeypatch.setattr(embed_routes, "json_matrix", fails)
        assert server.call("POST", "/embed", {"inputs": ["a"]}).status == 500
        monkeypatch.undo()
        server.call("POST", "/embed", b"{", {})
    spans = {facts(span)["http.response.status_code"]: span for span in collected.spans if span.name == "POST /embed"}
    assert {status: (span.status.code, facts(span).get("error.type")) for status, span in spans.items()} == {
        401: (0, None), 400: (0, None), 500: (2, "500"),
    }  # fmt: skip
    assert not any(word in b"".join(collected.bodies) for word in (b"geheim", b"word9"))


def test_a_collector_that_does_not_answer_holds_nothing_up(folder: Path) -> None:
    with collector(silent=True) as collected:
        with in_thread(("m", folder), otlp_endpoint=collected.url) as server:
            for _ in range(20):
                server.post("/embed", {"inputs": ["a"]})
            began = time.monotonic()
        assert time.monotonic() - began < 5
        assert len(collected.bodies) == 1  # it has what it was sent, and no more


def test_generation_has_the_steps_of_a_stream_when_it_ends(tmp_path: Path) -> None:
    from language_models import random_llama

    folder = random_llama(tmp_path, max_position_embeddings=160)
    with collector() as collected:
        with in_thread(("m", folder), otlp_endpoint=collected.url) as server:
            body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            whole = server.post("/v1/completions", body)
            streamed = server.call("POST", "/v1/completions", body | {"stream": True})
        assert streamed.status == 200 and streamed.body.endswith(b"data: [DONE]\n\n")
    usage = whole["usage"]
    for root in (one for one in collected.spans if one.name == "POST /v1/completions"):
        children = [one for one in collected.spans if one.parent_span_id == root.span_id]
        assert [one.name for one in children] == ["prefill", "decode"]
        assert children[-1].end_time_unix_nano <= root.end_time_unix_nano
        found = facts(root)
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] == 3
        assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 4
    assert len(collected.spans) == 6


def test_workers_send_what_is_left_when_they_end(folder: Path, tmp_path: Path) -> None:
    with collector() as collected:
        arguments = [str(folder), "--workers", "1", "--batch-tokens", "64", "--otlp-endpoint", collected.url]
        with as_command(tmp_path, *arguments) as server:
            server.post("/embed", {"inputs": ["a"]})
        assert server.process is not None and server.process.returncode == 0
        assert [span.name for span in collected.spans] == [*STEPS, "POST /embed"]


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a:b", "", "/tmp/x"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="otlp-endpoint: expected a URL such as http://localhost:4318; got"):
        tracing.check_traces(endpoint)


def test_without_the_packages_the_words_say_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing.check_traces("http://localhost:4318")
    monkeypatch.setattr(tracing, "_PACKAGES", {"nothing.of.this.name": "opentelemetry-sdk"})
    with pytest.raises(RuntimeError, match=r"needs opentelemetry-sdk. Type: pip install opentelemetry-sdk, or .*\[otlp\]"):
        tracing.check_traces("https://collector/v1/traces")
