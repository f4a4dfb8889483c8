"""What comes over a connection, however it is cut: framing, bounds, interim answers, half-closed sides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_wire import CONTINUE, Echo, Wire, chunks, head, idle, talk
from served import Served, in_thread

from ftbert.server import Settings, http_protocol
from ftbert.server.http_protocol import Connections
from ftbert.server.messages import MOST_HEAD

UPGRADE = ("upgrade: h2c", "connection: Upgrade, HTTP2-Settings")
LENGTH = head("content-length: 5") + b"hello"
CHUNKED = head("transfer-encoding: chunked") + chunks(b"he", b"l", b"lo")
GET = head(method="GET")
REQUESTS = {
    "length": LENGTH,
    "chunked": CHUNKED,
    "extensions": head("transfer-encoding: chunked") + b'5;a=b;c="d"\r\nhello\r\n0;e\r\n\r\n',
    "trailers": head("transfer-encoding: chunked") + chunks(b"hello", trailers=b"x-request-timeout: 1\r\nb: c\r\n") + GET,
    "pipelined": LENGTH + GET + CHUNKED + head(path="/no") + LENGTH + head("content-length: 2", path="/no") + b"ab" + GET,
    "expect": head("content-length: 5", "expect: 100-continue") + b"hello" + GET,
    "expect, pipelined": LENGTH + head("transfer-encoding: chunked", "expect: 100-continue") + chunks(b"hello") + GET,
    "upgrade": head("content-length: 5", *UPGRADE) + b"hello" + GET,
    "upgrade, chunked": head("transfer-encoding: chunked", *UPGRADE) + chunks(b"hel", b"lo", trailers=b"a: b\r\n") + GET,
    "upgrade, no body": head(*UPGRADE, method="GET") + GET,
    "upgrade, no encoding": GET + head("transfer-encoding: x", *UPGRADE) + chunks(b"hello") + GET,
    "connect": b"CONNECT a:80 HTTP/1.1\r\n\r\n" + GET,
    "close": head("content-length: 5", "connection: close") + b"hello" + GET,
    "1.0": b"GET /a HTTP/1.0\r\n\r\n",
    "no HTTP": GET + b"hello\r\n\r\n",
    "no chunk": GET + head("transfer-encoding: chunked") + b"2\r\nab\r\nxyz\r\n",
    "error, no chunk": GET + head("transfer-encoding: chunked", path="/no") + b"2\r\nab\r\nxyz\r\n\r\n",
    "error, expect": head("content-length: 5", "expect: 100-continue", path="/no") + b"hello" + GET,
    "empty lines": b"\r\n\r\n" + GET + b"\r\n" + LENGTH,
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_cut_anywhere_is_the_same(name: str) -> None:
    sent = REQUESTS[name]
    whole, over = talk(sent)
    answers = whole.replace(CONTINUE, b"")
    assert answers.startswith(b"HTTP/1.1 ")
    for i in range(1, len(sent)):
        got, ended = talk(sent[:i], sent[i:])
        assert (got.replace(CONTINUE, b""), ended) == (answers, over), sent[:i]
    got, ended = talk(*(sent[i : i + 1] for i in range(len(sent))))
    assert (got.replace(CONTINUE, b""), ended) == (answers, over)


def bodies(sent: bytes) -> list[Any]:
    """Of the answers, in order."""
    found, rest = [], sent
    while rest:
        top, _, rest = rest.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(": ", 1) for line in top.decode().split("\r\n")[1:])
        size = int(lines.get("content-length", 0))
        found.append((int(top.split()[1]), rest[:size].decode()))
        rest = rest[size:]
    return found


def test_a_request_is_read_as_it_was_meant() -> None:
    for name in ("length", "chunked", "extensions", "trailers", "expect", "upgrade", "upgrade, chunked"):
        status, body = next(one for one in bodies(talk(REQUESTS[name])[0]) if one[0] != 100)
        method, path, headers, text = json.loads(body)
        assert (status, method, path, text) == (200, "POST", "/a", "hello"), name
        assert not {"x-request-timeout", "a", "b"} & set(headers), name  # trailers are no headers
    statuses = [status for status, _ in bodies(talk(REQUESTS["pipelined"])[0])]
    assert statuses == [200, 200, 200, 404, 200, 404, 200]
    assert [status for status, _ in bodies(talk(REQUESTS["no chunk"])[0])] == [200, 400]
    assert [status for status, _ in bodies(talk(REQUESTS["error, no chunk"])[0])] == [200, 404]


def test_a_thousand_bad_requests_behind_a_good_one() -> None:
    for bad, status in ((head(path="/no"), 404), (b"CONNECT a HTTP/1.1\r\n\r\n", 400)):
        got, over = talk(LENGTH + bad * 1000 + GET)
        assert [status for status, _ in bodies(got)] == [200] + [status] * 1000 + [200] and not over


def test_continue_comes_in_its_turn() -> None:
    async def run() -> None:
        shared = Connections(Echo(), Settings((("m", "m"),)))
        wire = Wire(shared)
        wire.feed(LENGTH + head("content-length: 5", "expect: 100-continue"))
        assert not wire.sent
        await idle(wire)
        assert [status for status, _ in bodies(wire.sent)] == [200, 100]
        wire.feed(b"hello")
        await idle(wire)
        assert [status for status, _ in bodies(wire.sent)] == [200, 100, 200]
        wire.feed(head("content-length: 0", "expect: 100-continue"))  # nothing is to be waited for
        await idle(wire)
        assert [status for status, _ in bodies(wire.sent)] == [200, 100, 200, 200]
        wire.close()

    asyncio.run(run())


FLOODS = {
    "chunks": head("transfer-encoding: chunked") + b"1\r\nx\r\n" * 10_000,
    "pipelined": GET * 1000,
    "refused": head(path="/no", method="GET") * 1000,
    "fields": (b"GET /a HTTP/1.1\r\n" + b"a:\r\n" * 12_000 + b"\r\n") * 5,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_does_not_hold_up_other_connections(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes at once is parsed in turns of the event loop, those of all connections that flood together."""
    monkeypatch.setattr(http_protocol, "_TURN", 0.0)

    async def run() -> None:
        shared = Connections(Echo(), Settings((("m", "m"),)))
        floods, other = [Wire(shared) for _ in range(3)], Wire(shared)
        for flood in floods:
            flood.feed(FLOODS[name])
            assert flood.paused and not flood.sent  # no more is read meanwhile
        left = len(FLOODS[name])
        other.feed(GET)
        for _ in range(4):
            await asyncio.sleep(0)
        assert other.sent.startswith(b"HTTP/1.1 200 ")
        assert sum(left - len(flood.protocol._unread) for flood in floods) <= 4 * http_protocol._FEED
        for flood in floods:  # nothing is lost
            while flood.paused:
                await asyncio.sleep(0)
            await idle(flood)
            assert not flood.protocol._unread
            assert flood.sent.count(b"HTTP/1.1 ") == {"chunks": 0, "pipelined": 1000, "refused": 1000, "fields": 5}[name]
            flood.close()
        other.close()
        await asyncio.sleep(0)
        assert shared.held == 0 and not shared.open

    asyncio.run(run())


@pytest.mark.parametrize("field", [b"a: b\r\n", b"a: " + b"b" * 1000 + b"\r\n", b"a: " + b"b" * 10_000_000, b"a" * 10_000_000])
@pytest.mark.parametrize("where", ["head", "trailers", "extension"])
def test_lines_are_bounded(where: str, field: bytes) -> None:
    """All of a head, all trailers, the size of a chunk: each has at most MOST_HEAD bytes."""
    begin = {"head": b"GET /a HTTP/1.1\r\n", "trailers": head("transfer-encoding: chunked") + b"2\r\nab\r\n0\r\n",
             "extension": head("transfer-encoding: chunked") + b"2;"}[where]  # fmt: skip
    if where == "extension":
        field = field.replace(b"\r\n", b"")
    fields = field * (1 + (MOST_HEAD + 40_000) // len(field))

    async def run() -> None:
        shared = Connections(Echo(), Settings((("m", "m"),)))
        for size in (1, 1000, 200_000):
            wire, taken = Wire(shared), 0
            wire.feed(begin)
            for start in range(0, len(fields), size):
                if wire.ended or wire.closed:
                    break
                await wire.take(fields[start : start + size])
                taken += size
            if not wire.ended:  # as many complete lines as one feed holds
                await wire.take(b"\r\n" if where != "extension" else b"\r\nab\r\n0\r\n\r\n")
            assert wire.sent.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")) and wire.ended
            assert taken <= MOST_HEAD + 40_000 + size
            wire.close()
        await asyncio.sleep(0)
        assert shared.held == 0

    asyncio.run(run())


def test_bodies_are_counted_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all connections, whatever they announce; who passes the limit is refused and his bytes are free."""
    monkeypatch.setattr(http_protocol, "_MOST_HELD", 1_000_000)

    async def run() -> None:
        shared = Connections(Echo(), Settings((("m", "m"),)))
        wires = [Wire(shared) for _ in range(60)]
        for i, wire in enumerate(wires):
            wire.feed(head("content-length: 900000") if i % 2 else head("transfer-encoding: chunked"))
        assert shared.held == 0
        most = 0
        for _ in range(100):
            for i, wire in enumerate(wires):
                if not wire.ended:
                    wire.feed(b"x" * 1000 if i % 2 else b"3e8\r\n" + b"x" * 1000 + b"\r\n")
                most = max(most, shared.held)
        refused = [wire for wire in wires if wire.ended]
        assert most <= 1_000_000 and 0 < len(refused) < 60
        assert all(wire.sent.startswith(b"HTTP/1.1 429 ") for wire in refused)
        assert shared.held == sum(100_000 for wire in wires if not wire.ended)
        for wire in wires:
            wire.close()
        await asyncio.sleep(0)
        assert shared.held == 0

    asyncio.run(run())


def test_small_chunks_cost_what_they_weigh() -> None:
    async def run() -> int:
        wire = Wire(Connections(Echo(), Settings((("m", "m"),))))
        wire.feed(head("transfer-encoding: chunked"))
        part = b"2\r\nab\r\n" * 2000
        tracemalloc.start()
        for _ in range(250):
            await wire.take(part)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert wire.protocol._shared.held == 1_000_000
        wire.close()
        return peak

    assert asyncio.run(run()) < 4_000_000  # a list of them takes 42 MB


def test_empty_lines_begin_no_request() -> None:
    """Some clients send an empty line behind a body. The connection is idle then, and closed without a word."""

    async def run() -> None:
        wire = Wire(Connections(Echo(), Settings((("m", "m"),), header_timeout=0.05, keep_alive=0.1)))
        wire.feed(LENGTH + b"\r\n")
        await idle(wire)
        answered = wire.sent
        await asyncio.sleep(0.3)
        assert wire.closed and wire.sent == answered

    asyncio.run(run())


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]
) -> Iterator[Served]:
    import uvloop

    folder = tiny_bert(tmp_path_factory.mktemp("model"))
    before = asyncio.get_event_loop_policy()
    if request.param == "uvloop":
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        with in_thread(("tiny", folder), header_timeout=5.0, body_timeout=5.0) as one:
            yield one
    finally:
        asyncio.set_event_loop_policy(before)


def raw(server: Served, *parts: bytes, half_closed: bool) -> list[Any]:
    """The answers up to the end of the connection; without half_closed, to the first second of silence."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20 if half_closed else 1) as client:
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            for part in parts:
                client.sendall(part)
            if half_closed:
                client.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(TimeoutError):
            while data := client.recv(65536):
                found += data
                if not half_closed and b"close" in found:
                    client.settimeout(5)
        return bodies(found)


BODY = b'{"inputs":"word1"}'
COMBINATIONS = list(itertools.product([True, False], repeat=5))


@pytest.mark.parametrize("half_closed", [True, False])
def test_every_combination_is_answered(server: Served, half_closed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of refused or not, chunked or not, pipelined or not, Expect, Upgrade: each in one send and in two."""
    caplog.set_level(logging.WARNING)
    for refused, chunked, pipelined, expects, upgrade in COMBINATIONS if half_closed else COMBINATIONS[::5]:
        lines = ["content-type: application/json", "transfer-encoding: chunked" if chunked else f"content-length: {len(BODY)}"]
        lines += ["expect: 100-continue"] * expects + list(UPGRADE) * upgrade
        top = head(*lines, path="/nothing" if refused else "/embed")
        body = chunks(BODY[:4], BODY[4:]) if chunked else BODY
        before = head(path="/live", method="GET") if pipelined else b""
        for parts in ((before + top + body,), (before + top, body)):
            got = [status for status, _ in raw(server, *parts, half_closed=half_closed) if status != 100]
            assert got == [200] * pipelined + [404 if refused else 200], (parts, got)
    assert not caplog.records


def test_half_closed_clients(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A slow answer comes too, behind a 100; what is incomplete is said to be."""
    body = json.dumps({"inputs": ["word1 " * 120] * 300}).encode()
    top = head("content-type: application/json", f"content-length: {len(body)}", path="/embed")
    got = raw(server, top + body, half_closed=True)
    assert [status for status, _ in got if status != 100] == [200] and len(json.loads(got[-1][1])) == 300
    for sent in (top + body[:-1], b"POST /emb", head("transfer-encoding: chunked", "content-type: a/json", path="/live")):
        got = raw(server, sent, half_closed=True)
        assert len(got) == 1 and 400 <= got[0][0] < 500
    assert raw(server, b"", half_closed=True) == []
    assert server.call("POST", "/embed", {"inputs": "a"}).status == 200
    assert not caplog.records


def test_no_content_has_no_length(server: Served) -> None:
    reply = server.call("GET", "/favicon.ico")
    assert reply.status == 204 and "content-length" not in reply.headers


def test_a_client_that_has_gone_is_noticed(server: Served) -> None:
    """It looks like one that has closed its side only, until something is sent to it."""

    def dropped() -> float:
        lines = server.call("GET", "/metrics").body.decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith('te_request_failure{err="dropped",'))

    before = dropped()
    body = json.dumps({"inputs": ["word1 " * 120] * 2000}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head("content-type: application/json", f"content-length: {len(body)}", path="/embed") + body)
        time.sleep(0.3)
    until = time.monotonic() + 30
    while dropped() == before:
        assert time.monotonic() < until
        time.sleep(0.02)
