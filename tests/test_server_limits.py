"""What an answer may take: larger ones are refused before they are made, with what would fit; nothing stays counted."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import Served, in_thread, with_head
from transformers import AutoTokenizer

from ftbert.server.errors import ApiError
from ftbert.server.memory import Memory, decoded, tokenised
from ftbert.server.messages import Request

LIMIT = 1_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Served]:
    labels = with_head(tmp_path_factory.mktemp("labels"), 300, tiny_bert)
    with in_thread(("embed", folder), ("labels", labels), answer_limit=LIMIT, batch_tokens=4096) as one:
        yield one


def tokens(count: int) -> list[list[int]]:
    """Texts of so many tokens together."""
    return [[5] * min(100, count - at) for at in range(0, count, 100)]


LARGE: list[tuple[str, Callable[[int], dict[str, Any]], int]] = [  # path, body of a size, a size that is too large
    ("/embed_all", lambda n: {"inputs": tokens(n)}, 2000),
    ("/pooling", lambda n: {"input": tokens(n), "task": "token_embed"}, 2000),
    ("/tokenize", lambda n: {"inputs": "a b " * (n // 4)}, 20_000),
    ("/tokenize", lambda n: {"inputs": ["a b " * 100] * (n // 400)}, 100_000),
    ("/tokenize", lambda n: {"prompt": "ü " * (n // 2), "return_token_strs": True}, 20_000),
    ("/decode", lambda n: {"ids": [5] * n}, 20_000),
    ("/decode", lambda n: {"ids": [[30, 31] * 100] * (n // 200)}, 200_000),
    ("/predict", lambda n: {"inputs": [["word1"]] * n}, 200),
    ("/classify", lambda n: {"input": ["word1"] * n, "model": "labels"}, 200),
    ("/embed", lambda n: {"inputs": ["a"] * n}, 2000),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "size"), LARGE)
def test_what_is_too_large_is_refused_with_what_would_fit(
    server: Served, path: str, body: Callable[[int], Any], size: int
) -> None:
    before = time.process_time()
    reply = server.call("POST", path, body(size))
    assert reply.status == 413 and "answer-limit" in reply.json()["message" if "message" in reply.json() else "error"]
    assert time.process_time() - before < 2  # the answer was not made
    fit = int(re.search(rb"about (\d+) would fit", reply.body)[1])  # type: ignore[index]
    assert 0 < fit < size
    for _ in range(5):  # nothing of the one before is counted
        answer = server.call("POST", path, body(fit * 8 // 10))
        assert answer.status == 200 and len(answer.body) <= LIMIT


def test_tokens_of_a_long_text_are_those_of_the_tokenizer(server: Served, folder: Path) -> None:
    """Written in pieces: with the places of all tokens, and every text on its own."""
    texts = ["[MASK] word1, ünknown é word2 " * 30, "", "the cat [SEP]"] * 2 + ["a b c " * 250]
    whole = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    whole.no_truncation()
    for special in (True, False):
        got = server.post("/tokenize", {"inputs": texts, "add_special_tokens": special})
        for text, row, want in zip(texts, got, whole.encode_batch(texts, add_special_tokens=special), strict=True):
            assert [one["id"] for one in row] == want.ids
            for one, added, place in zip(row, want.special_tokens_mask, want.offsets, strict=True):
                assert (one["start"], one["stop"]) == ((None, None) if added else place)
                assert added or one["text"] == text[slice(*place)]


def test_more_pieces_than_one(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, ids = ["word1 word2 a"] * 9 + [""], [[5, 6, 7], [], [8]] * 5
    want = server.post("/tokenize", {"inputs": texts}), server.post("/decode", {"ids": ids})
    monkeypatch.setattr("ftbert.server.token_routes._AT_ONCE", 4)
    monkeypatch.setattr("ftbert.server.token_routes._TOKENS_AT_ONCE", 2)
    monkeypatch.setattr("ftbert.server.json_bodies._BYTES_AT_ONCE", 100)
    assert (server.post("/tokenize", {"inputs": texts}), server.post("/decode", {"ids": ids})) == want
    found = server.post("/predict", {"inputs": [["word1"], ["word2"]]})
    alone = [server.post("/predict", {"inputs": word}) for word in ("word1", "word2")]
    assert [[one["label"] for one in row] for row in found] == [[one["label"] for one in row] for row in alone]
    assert len(found[0]) == 300


def test_clients_that_go_away_leave_nothing(server: Served) -> None:
    """Before their answer is made, and while it is sent."""
    data = json.dumps({"inputs": tokens(500)}).encode()
    head = b"POST /embed_all HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    for turn in range(12):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(head + data)
            if turn % 2:
                assert client.recv(10)
    until = time.monotonic() + 20
    while (reply := server.call("POST", "/embed_all", {"inputs": tokens(700)})).status != 200:
        assert reply.status == 429 and time.monotonic() < until
        time.sleep(0.02)


def test_a_request_past_its_deadline_is_not_tokenised_to_its_end(server: Served) -> None:
    reply = server.call("POST", "/tokenize", {"inputs": ["a b " * 200] * 9}, {"x-request-timeout": "0.0001"})
    assert reply.status == 503 and "deadline" in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": [30, 31] * 400_000}), ("/decode", {"ids": [30, 31] * 400_000}),
        ("/tokenize", {"prompt": "word1 a " * 100_000}), ("/tokenize", {"inputs": "word1 a " * 100_000}),
    ],
)  # fmt: skip
def test_others_are_answered_meanwhile(folder: Path, path: str, body: dict[str, Any]) -> None:
    """`tokenizers` lets no other thread run in its calls for a single text."""
    data = json.dumps(body).encode()
    with in_thread(("m", folder)) as server, ThreadPoolExecutor(1) as pool:
        running, waits = pool.submit(server.call, "POST", path, data), [0.0]
        began = time.monotonic()
        while not running.done():
            asked = time.monotonic()
            assert server.call("GET", "/live").status == 200
            waits.append(time.monotonic() - asked)
        assert running.result().status == 200
    assert max(waits) < (time.monotonic() - began) / 2


def test_several_at_once() -> None:
    memory, requests = Memory(LIMIT), [Request(0.0) for _ in range(4)]
    for request in requests[:2]:
        memory.take(request, LIMIT, 10, "texts")
    with pytest.raises(ApiError) as refused:
        memory.take(requests[2], LIMIT // 2, 10, "texts")
    assert refused.value.status == 429 and refused.value.retry_after
    memory.take(requests[3], 1000, 1, "texts")  # a single text is not refused behind them
    for request in (*requests, *requests):
        request.end()
    assert memory.held == 0


def test_estimates_are_of_bytes() -> None:
    assert tokenised(["ab", "ü€"]) > tokenised(["ab", "ab"]) > tokenised(["ab"]) > tokenised([]) == 0
    assert decoded([[1] * 10] * 10) < decoded([[1] * 100])
