"""Streams of generated text: slow readers, clients that go, the server's end, errors in the middle, 64 at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from generation_servers import Both, both_of, events, joined, streamed
from language_models import random_llama
from served import Served
from stub_generation import steps_of, until

from ftbert.server import writing
from ftbert.server.http_stream import OutgoingStream
from ftbert.server.job import WrittenToken
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import ServedModel
from ftbert.text import ChatTemplate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=160)


def connected(server: Served, body: dict[str, Any], path: str = "/v1/completions", version: str = "1.1") -> socket.socket:
    data = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(20)
    client.sendall(f"POST {path} HTTP/{version}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return client


def read(client: socket.socket, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        piece = client.recv(65536)
        assert piece, found[-300:]
        found += piece
    return found


def failures(server: Served) -> dict[str, int]:
    """By the label of te_request_failure."""
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return {line.split('"')[1]: int(line.split()[-1]) for line in lines if line.startswith("te_request_failure{")}


def succeeded(server: Served) -> int:
    """Of all models and methods."""
    lines = server.call("GET", "/metrics").body.decode().splitlines()
    return sum(int(line.split()[-1]) for line in lines if line.startswith("te_request_success{"))


LONG = {"prompt": "a", "max_tokens": 1 << 19, "stream": True}
LAST = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def test_a_connection_lives_on_after_a_stream(folder: Path) -> None:
    with steps_of(folder) as (server, _), connected(server, {"prompt": "a", "max_tokens": 3, "stream": True}) as client:
        found = read(client, LAST)
        assert b"transfer-encoding: chunked\r\n" in found and b"connection: close" not in found
        client.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        assert read(client, b"\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_http_1_0_reads_to_the_end(folder: Path) -> None:
    with steps_of(folder) as (server, _):
        with connected(server, {"prompt": "a", "max_tokens": 3, "stream": True}, version="1.0") as client:
            found = b"".join(iter(lambda: client.recv(65536), b""))
        head, _, body = found.partition(b"\r\n\r\n")
        assert b"connection: close" in head and b"transfer-encoding" not in head
        assert joined(events(body)) == "aaa"


def test_requests_in_a_row_are_answered_in_turn(folder: Path) -> None:
    with steps_of(folder) as (server, _), connected(server, {"prompt": "a", "max_tokens": 9, "stream": True}) as client:
        client.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        found = read(client, b"content-length: 0\r\n\r\n")
        assert found.index(LAST) < found.index(b"HTTP/1.1 200 OK\r\ncontent-length: 0")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion", "/api/generate", "/api/chat"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_frees_its_slot(folder: Path, path: str, streams: bool) -> None:
    body = {"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1 << 19, "n_predict": 1 << 19, "stream": streams}
    with steps_of(folder, answer_limit=1 << 40) as (server, steps):
        with connected(server, body, path) as client:
            until(lambda: len(steps.texts) == 1)
            if streams:
                client.recv(100)
        until(lambda: not steps.texts, 2)
        until(lambda: failures(server)["dropped"] == 1)
        assert succeeded(server) == 0
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 3})["choices"][0]["text"] == "bbb"
        assert server.call("POST", "/v1/completions", {"prompt": "b", "max_tokens": 3, "stream": True}).status == 200
        until(lambda: succeeded(server) == 2)


def test_a_client_has_gone_before_its_connection_is_lost() -> None:
    """A write fails, and the event loop comes to the stream before it tells of that."""
    transport, request = MagicMock(), Request(0.0)
    transport.is_closing.side_effect = [False, False, True, True]

    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"a"

    asyncio.run(OutgoingStream(transport, request, Response(stream=pieces()), chunked=True).send(False))
    assert request.disconnected


def test_a_client_may_go_at_any_byte(folder: Path) -> None:
    """Of its request and of the answer; what is left has nothing of it."""
    body = json.dumps({**LONG, "max_tokens": 1 << 18}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with steps_of(folder) as (server, steps):
        for cut in range(1, len(head + body), 7):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall((head + body)[:cut])
        for size in range(1, 700, 37):
            with connected(server, json.loads(body)) as client:
                got = 0
                while got < size:
                    got += len(client.recv(size - got))
        until(lambda: not steps.texts and not steps.queue)
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 3})["choices"][0]["text"] == "bbb"


def test_who_sends_no_more_still_reads(folder: Path) -> None:
    """And no 100 Continue stands between the pieces; one that is gone is noticed."""
    with steps_of(folder) as (server, steps):
        steps.pause = 0.005
        with connected(server, {"prompt": "a", "max_tokens": 12, "stream": True}) as client:
            read(client, b"\n\n\r\n")
            client.shutdown(socket.SHUT_WR)
            rest = b"".join(iter(lambda: client.recv(65536), b""))
        assert rest.endswith(LAST) and b"100 Continue" not in rest


def test_a_slow_reader_holds_up_itself_alone(folder: Path) -> None:
    """Its text is made to the end and its slot is free; what it does not read in time ends its connection."""
    with steps_of(folder, body_timeout=0.7) as (server, steps):
        steps.pause = 0.0
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.settimeout(20)
        data = json.dumps({**LONG, "max_tokens": 20_000, "logprobs": 0}).encode()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))
        until(lambda: len(steps.texts) == 1)
        began = time.monotonic()
        assert joined(streamed(server, "/v1/completions", {"prompt": "b", "max_tokens": 3})) == "bbb"
        assert time.monotonic() - began < 1.5
        until(lambda: not steps.texts, 20)
        time.sleep(1)
        got = 0
        with pytest.raises((ConnectionResetError, EOFError)):
            while True:
                piece = slow.recv(1 << 20)
                got += len(piece)
                if not piece or b"[DONE]" in piece:
                    raise EOFError
        assert got < 8 << 20
        slow.close()


def test_what_fails_in_the_middle_is_told(folder: Path) -> None:
    with steps_of(folder) as (server, steps):
        for path, body in (("/v1/completions", LONG), ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 1 << 18}})):
            with connected(server, body, path) as client:
                found = client.recv(65536)
                steps.fails = 0
                found += read(client, b"\r\n0\r\n\r\n")
            steps.fails = -1
            assert b"a secret text" not in found
            told = found.rpartition(b"\r\n0\r\n\r\n")[0].rpartition(b"\r\n")[2]
            if path == "/v1/completions":
                kind, _, data = told.partition(b"\n")
                assert kind == b"event: error" and json.loads(data[6:])["error"]["message"] == "the computation failed (RuntimeError)"
            else:
                assert json.loads(told)["error"] == "the computation failed (RuntimeError)"
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 3})["choices"][0]["text"] == "bbb"
        assert failures(server)["inference"] == 2 and succeeded(server) == 1
        steps.fails = 0
        assert server.call("POST", "/v1/completions", {"prompt": "b", "max_tokens": 3, "stream": True}).status == 424


def test_what_has_no_slot_waits_or_is_refused(folder: Path) -> None:
    with steps_of(folder, slots=1, request_timeout=3.0) as (server, steps), ThreadPoolExecutor(8) as threads:
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 50})["usage"]["completion_tokens"] == 50
        waiting = [threads.submit(server.post, "/v1/completions", {"prompt": "c", "max_tokens": 40}) for _ in range(6)]
        assert all(one.result()["choices"][0]["text"] == "c" * 40 for one in waiting)
        steps.pause = 0.05
        assert server.post("/v1/completions", {"prompt": "b", "max_tokens": 60})  # 3 s: the next would take as long
        with connected(server, LONG) as client:
            client.recv(100)
            reply = server.call("POST", "/v1/completions", {"prompt": "b", "max_tokens": 3}, {"x-request-timeout": "0.3"})
            assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
        # One that is admitted, and has no slot in time.
        steps.pause = 0.001
        until(lambda: not steps.texts)
        for _ in range(20):
            server.post("/v1/completions", {"prompt": "b", "max_tokens": 1})
        with connected(server, LONG) as client:
            client.recv(100)
            reply = server.call("POST", "/v1/completions", {"prompt": "b", "max_tokens": 3}, {"x-request-timeout": "0.3"})
            assert reply.status == 503 and "deadline" in reply.json()["message"]
        until(lambda: not steps.texts and not steps.queue)


def test_all_texts_of_one_request_wait_for_one_slot(folder: Path) -> None:
    with steps_of(folder, slots=1) as (server, _):
        choices = server.post("/v1/completions", {"prompt": "b", "max_tokens": 2, "n": 128})["choices"]
        assert [one["text"] for one in choices] == ["bb"] * 128


def test_streams_end_in_order_when_the_server_ends(folder: Path) -> None:
    """A short one by itself, long ones with an error in time."""
    with ThreadPoolExecutor(4) as threads:
        with steps_of(folder, slots=2, shutdown_timeout=2.0) as (server, steps):
            steps.pause = 0.01
            long, short = connected(server, LONG), connected(server, {"prompt": "b", "max_tokens": 60, "stream": True})
            until(lambda: len(steps.texts) == 2)
            waits = connected(server, LONG)
            until(lambda: len(steps.queue) == 1)
            clients = (long, short, waits)
            readers = [threads.submit(lambda one=one: b"".join(iter(lambda: one.recv(65536), b""))) for one in clients]
            began = time.monotonic()
        assert time.monotonic() - began < 4
        found = [one.result() for one in readers]
    assert found[1].endswith(LAST) and b'"finish_reason":"length"' in found[1]
    for one in (found[0], found[2]):
        assert one.endswith(b"\r\n0\r\n\r\n") and b"event: error\ndata: " in one and b"the server is shutting down" in one
    for client in clients:
        client.close()


# ---- with a real model


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with both_of(tmp_path_factory.mktemp("both"), generation_slots=5) as found:
        yield found


def test_nothing_of_one_text_reaches_another(both: Both) -> None:
    """64 streams at a time through 5 slots, drawn and greedy, some cancelled: each is the library's own for its canary."""
    prompts = [f"canary {i}: {'hello world ' * (i % 4)}{i * 7919}" for i in range(64)]
    bodies = [{"prompt": one, "max_tokens": 20, "temperature": i % 2, "seed": i} for i, one in enumerate(prompts)]
    want = [both.text(one, max_new_tokens=20, temperature=float(i % 2), seed=i) for i, one in enumerate(prompts)]
    assert len(set(want)) == 64

    async def run(i: int) -> str:
        if i % 8 == 7:
            with connected(both.server, {**bodies[i], "stream": True, "max_tokens": 100}):
                await asyncio.sleep(0.01)
        return joined(await asyncio.to_thread(streamed, both.server, "/v1/completions", bodies[i]))

    async def all_of_them() -> list[str]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        return await asyncio.gather(*map(run, range(64)))

    assert asyncio.run(all_of_them()) == want


# ---- what one request makes the event loop do


def test_a_template_has_a_thread_whatever_the_messages_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def render(*given: Any, **how: Any) -> str:
        threads.append(threading.current_thread().name)
        return "a"

    monkeypatch.setattr(ChatTemplate, "render", render)
    with steps_of(folder) as (server, _):
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "max_tokens": 1})
    assert threads[-1].startswith("ftbert-tokenise")


def test_a_long_prompt_holds_nobody_up() -> None:
    """Its characters are counted in the event loop: one by one that took two seconds."""
    began = time.monotonic()
    assert writing._characters("x" * 30_000_000) == 30_000_000
    assert time.monotonic() - began < 0.5


def test_prompts_behind_one_that_is_too_long_are_not_tokenised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    whole = writing._encoded
    monkeypatch.setattr(writing, "_encoded", lambda *given: encoded.append(given) or whole(*given))
    with both_of(folder) as both:
        reply = both.server.call("POST", "/v1/completions", {"prompt": ["a", "hello " * 500, "b"]})
    assert (reply.status, len(encoded)) == (422, 2)


def test_many_alternatives_are_written_in_a_thread() -> None:
    async def where(count: int) -> threading.Thread:
        tokens = [WrittenToken(1, -1.0, ((1, -1.0), (2, -2.0)))] * count
        return await writing.Texts.made(MagicMock(), [writing.Piece(0, "", tokens, "", "")], threading.current_thread)

    assert asyncio.run(where(10)) is threading.main_thread()
    assert asyncio.run(where(1000)) is not threading.main_thread()


def test_a_stream_outlives_its_unloaded_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[ServedModel] = []
    link = ServedModel.link
    monkeypatch.setattr(ServedModel, "link", lambda model: models.append(model) or link(model))
    with steps_of(folder) as (server, _), connected(server, {**LONG, "max_tokens": 200, "logprobs": 0}) as client:
        found = client.recv(100)
        monkeypatch.setattr(models[0], "_encoder", None)  # as behind /models/unload
        assert b"event: error" not in found + read(client, LAST)


def test_texts_of_a_request_wait_for_each_other(folder: Path) -> None:
    """All wait longer than a first token may, and are more than may wait of other requests."""
    with steps_of(folder, slots=1, request_timeout=0.2) as (server, steps):
        steps.pause = 0.005
        body = {"prompt": "a", "max_tokens": 2, "n": 70}
        for _ in range(2):  # what a text takes is known then
            assert {one["text"] for one in server.post("/v1/completions", body)["choices"]} == {"aa"}
