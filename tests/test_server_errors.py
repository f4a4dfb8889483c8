"""What a client gets wrong: a clear 4xx as JSON in milliseconds, and the next request is served."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, in_thread

LIMIT = 100_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Served]:
    folder = tiny_bert(tmp_path_factory.mktemp("model"))
    how: dict[str, Any] = {
        "payload_limit": LIMIT, "max_client_batch_size": 8, "api_key": "geheim", "header_timeout": 0.5,
        "body_timeout": 0.7, "cors_allow_origin": "https://a.example",
    }  # fmt: skip
    with in_thread(("tiny", folder), **how) as one:
        yield one


def error_of(reply: Any, path: str) -> Any:
    """The words; the body has the fields of its route."""
    body = reply.json()
    if path.startswith("/v1"):
        assert set(body) == {"error", "message", "code", "type", "detail"} and body["code"] == reply.status
        assert body["detail"] == body["message"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["message"]
    assert set(body) == {"error", "error_type"}
    return body["error"]


DEEP = b"[" * 100_000 + b"]" * 100_000
BAD = [
    ("no json", b"{", 400), ("empty", b"", 400), ("text", b"hello", 400), ("trailing", b'{"inputs":"a"} x', 400),
    ("nan", b'{"inputs":NaN}', 400), ("1e999", b'{"inputs":"a","dimensions":1e999}', 422),
    ("surrogate", b'{"inputs":"\\ud800"}', 400), ("utf-8", b'{"inputs":"\xff\xfe"}', 400),
    ("nul", b'{"inputs":"a\x00"}', 400), ("bom", b'\xef\xbb\xbf{"inputs":"a"}', 400),
    ("twice", b'{"inputs":"a","inputs":"b"}', 422), ("deep", b'{"inputs":' + DEEP[:90_000] + b"}", 400),
    ("deep, closed", b'{"q":' + b"[" * 40_000 + b"]" * 40_000 + b',"inputs":"a"}', 400),
    ("type", b'{"inputs":3}', 422), ("array", b"[]", 422), ("null", b'{"inputs":null}', 422), ("missing", b"{}", 422),
    ("float ids", b'{"inputs":[1.5]}', 422), ("bool", b'{"inputs":[true]}', 422), ("mixed", b'{"inputs":["a",1]}', 422),
    ("no inputs", b'{"inputs":[]}', 400), ("too many", b'{"inputs":["a","a","a","a","a","a","a","a","a"]}', 422),
    ("id", b'{"inputs":[100000]}', 422), ("huge id", b'{"inputs":[[99999999999999999999999]]}', 422),
    ("negative id", b'{"inputs":[-1]}', 422), ("no ids", b'{"inputs":[[]]}', 422),
    ("dimensions", b'{"inputs":"a","dimensions":0}', 422), ("more dimensions", b'{"inputs":"a","dimensions":65}', 422),
    ("side", b'{"inputs":"a","truncation_direction":"up"}', 422), ("prompt", b'{"inputs":"a","prompt_name":"no"}', 422),
    ("twice, long", b'{"truncate":true,"inputs":"' + b"a" * 70_000 + b'","truncate":true}', 422),
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score", "/classify", "/v1/rerank"])
def test_a_name_that_is_no_utf_8(server: Served, path: str) -> None:
    """Of a field that no route has: the decoder passes over it, what looks for fields that are refused reads it."""
    known = b'"input":"a","query":"a","documents":["b"],"text_1":"a","text_2":"b"'
    reply = server.call("POST", path, b"{" + known + b',"\xff":"\\u0061"}')
    assert reply.status == 400 and "the body is not valid UTF-8" in reply.body.decode()


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
@pytest.mark.parametrize(("body", "status"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_bodies(server: Served, path: str, body: bytes, status: int) -> None:
    if path == "/v1/embeddings":
        if b"truncation_direction" in body:
            pytest.skip("a field of TEI's")
        body = body.replace(b'"inputs"', b'"input"')
    before = time.process_time()
    reply = server.call("POST", path, body)
    assert time.process_time() - before < 0.5  # of this process, which is the server: 50 ms
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    assert error_of(reply, path)
    assert server.call("POST", "/embed", {"inputs": "a"}).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed_sparse", {"inputs": "a"}, 424, "Backend"),
        ("/predict", {"inputs": "a"}, 424, "Backend"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
        ("/rerank", {"query": "a", "documents": []}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": "b"}}, 422, "Validation"),
        ("/decode", {"ids": [10**30]}, 422, "Validation"),
        ("/tokenize", {"inputs": []}, 400, "Empty"),
    ],
)  # fmt: skip
def test_errors_of_other_routes(server: Served, path: str, body: Any, status: int, kind: str) -> None:
    reply = server.call("POST", path, body)
    assert (reply.status, reply.json()["error_type"]) == (status, kind)


def test_paths_methods_and_content_types(server: Served) -> None:
    assert server.call("POST", "/nothing", {}).status == 404
    reply = server.call("GET", "/embed")
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert server.call("POST", "/embed", {"inputs": "a"}, {"content-type": "text/plain"}).status == 415
    assert server.call("POST", "/embed", {"inputs": "a"}, {"content-type": "application/json; charset=utf-8"}).status == 200
    assert server.call("POST", "/embed", {"inputs": "a"}, {"x-request-timeout": "soon"}).status == 400
    assert server.call("POST", "/embed", {"inputs": "a"}, {"upgrade": "h2c", "connection": "upgrade"}).status == 200


def test_the_key(server: Served) -> None:
    for given in ("", "Bearer", "Bearer falsch", "geheim", "Basic geheim", "Bearer geheimer", "Bearer \xff"):
        for method, path in (("POST", "/embed"), ("POST", "/v1/embeddings"), ("GET", "/info"), ("GET", "/v1/models")):
            reply = server.call(method, path, {"inputs": "a", "input": "a"} if method == "POST" else None, {"authorization": given})
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
            assert b"geheim" not in reply.body
    for path in ("/health", "/ping", "/live", "/metrics", "/"):
        assert server.call("GET", path, headers={"authorization": ""}).status == 200
    assert b"geheim" not in server.call("GET", "/info").body


def test_cors(server: Served) -> None:
    reply = server.call("OPTIONS", "/embed", headers={"origin": "https://a.example", "authorization": ""})
    assert reply.status == 204 and "authorization" in reply.headers["access-control-allow-headers"]
    reply = server.call("POST", "/embed", {"inputs": "a"}, {"origin": "https://a.example"})
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    reply = server.call("POST", "/embed", {"inputs": "a"}, {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in reply.headers


def raw(server: Served, *parts: bytes, pause: float = 0.0, seconds: float = 5.0) -> bytes:
    """All that the server sends until it closes or falls silent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(pause)
        found = b""
        try:
            while data := client.recv(65536):
                found += data
        except TimeoutError:
            pass
        return found


def head(body: bytes, *more: str, path: str = "/embed") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", "authorization: Bearer geheim"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", *more, "", ""]).encode()


def test_a_large_body_is_refused_before_it_is_read(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as client:
        client.sendall(head(b"x" * (LIMIT + 1)))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    body = json.dumps({"inputs": "a" * LIMIT}).encode()
    assert server.call("POST", "/embed", body).status == 413  # no reset while it is sent
    expecting = raw(server, head(b"x" * (LIMIT + 1), "expect: 100-continue"), seconds=1)
    assert expecting.startswith(b"HTTP/1.1 413 ")
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    chunked = head(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert raw(server, chunked, chunk * 4, seconds=1).startswith(b"HTTP/1.1 413 ")


def test_expect_chunks_and_pipelines(server: Served) -> None:
    body = b'{"inputs":"word1"}'
    got = raw(server, head(body, "expect: 100-continue"), body, pause=0.1, seconds=1)
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
    chunked = head(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    assert raw(server, chunked + b"5\r\n" + body[:5] + b"\r\n", b"d\r\n" + body[5:] + b"\r\n0\r\n\r\n", seconds=1).startswith(b"HTTP/1.1 200 ")
    got = raw(server, (head(body) + body) * 5 + head(b"{") + b"{", seconds=1.5)
    assert got.count(b"HTTP/1.1 200 OK") == 5 and got.count(b"HTTP/1.1 400 ") == 1
    assert got.index(b"HTTP/1.1 400 ") > got.rindex(b"HTTP/1.1 200 ")
    assert b"connection: close" in raw(server, head(body).replace(b"HTTP/1.1", b"HTTP/1.0") + body)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400), (b"GET / HTTP/9.9\r\n\r\n", 400), (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"POST /embed HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (b"POST /embed HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /embed HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
    ],
)  # fmt: skip
def test_what_is_no_http(server: Served, sent: bytes, status: int) -> None:
    got = raw(server, sent)
    assert got.startswith(b"HTTP/1.1 %d " % status), got[:200]
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]


def test_slow_senders_are_closed(server: Served) -> None:
    """At 0.5 s for the head and 0.7 s for the body."""
    whole = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"
    for sent in (b"POST /em", head(b"x" * 50) + b"{", b"", whole + b"POST /em", whole + head(b"x" * 50) + b"{"):
        began = time.monotonic()
        got = raw(server, sent, seconds=30)
        assert time.monotonic() - began < 30  # closed, not silent
        assert got.count(b"HTTP/1.1 408 ") == (sent != b"")
        assert got.startswith(b"HTTP/1.1 200 ") == sent.startswith(whole)


def test_a_deadline_that_passes_is_503(server: Served) -> None:
    reply = server.call("POST", "/embed", {"inputs": ["word1 " * 100] * 8}, {"x-request-timeout": "0.000001"})
    assert reply.status == 503 and reply.headers["retry-after"] == "1"
