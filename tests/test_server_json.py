"""A body before it is decoded: doubled keys however they are spelled, and more values than can be asked for."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Served, in_thread

from ftbert.server.errors import ApiError
from ftbert.server.json_bodies import BodyCheck, _has_each_key_once, _Scan

LONG = "a" * 70_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Served]:
    with in_thread(("tiny", tiny_bert(tmp_path_factory.mktemp("model")))) as one:
        yield one


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", '{"inputs":"a","inputs":"b"}'),
        ("/embed", '{"inputs":"a","in\\u0070uts":"b"}'),
        ("/embed", '{"\\u0069\\u006e\\u0070\\u0075\\u0074\\u0073":"a","inputs" \n: "b"}'),
        ("/similarity", '{"inputs":{"source_sentence":"a","sentences":["b"],"sentences":["c"]}}'),
        ("/similarity", '{"inputs":{"source_sentence":"a","source_\\u0073entence":"x","sentences":["b"]}}'),
        ("/similarity", '{"inputs":{"source_sentence":"a","sentences":["b"]},"parameters":{"truncate":true,"truncate":true}}'),
        ("/v1/rerank", '{"query":"a","documents":[{"text":"a"},{"text":"b","te\\u0078t":"c"}]}'),
        ("/", '{"inputs":"a","inputs":"b"}'),
        ("/tokenize", '{"prompt":"a","prompt":"b"}'),
    ],
)  # fmt: skip
def test_a_doubled_key_is_refused(server: Served, path: str, body: str, large: bool) -> None:
    if large:
        body = body.replace('"a"', json.dumps(LONG), 1)
    reply = server.call("POST", path, body.encode())
    assert reply.status == 422 and "duplicate field" in reply.body.decode()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", '{"inputs":["inputs","inputs\\":1,\\"inputs","\\\\"],"x":{"inputs":1,"x\\\\":1,"x\\"":2,"x":3}}'),
        ("/similarity", '{"model":"tiny","inputs":{"source_sentence":"a","sentences":["b"]},"parameters":{"model":"tiny"}}'),
        ("/embed", '{"inputs":[":",":",",",","],"y":[{"z":1},{"z":2}],"z":{"z":{"z":1}}}'),
    ],
)  # fmt: skip
def test_a_key_of_two_objects_is_not_doubled(server: Served, path: str, body: str, large: bool) -> None:
    if large:
        body = body[:-1] + ',"more":' + json.dumps(LONG) + "}"
    assert server.call("POST", path, body.encode()).status == 200


def random_json(chance: random.Random, depth: int = 0) -> str:
    """Values with few keys, many of them doubled, escaped or with quotes and backslashes."""
    kind = chance.random()
    space = chance.choice(["", " ", "\n"])
    if depth > 4 or kind < 0.4:
        return chance.choice(["1", "null", '""', '"a:b,{[\\"]}"', '"\\\\"', '"\\\\\\""', '"é\\u00e9"', '"\\n:"'])
    if kind < 0.6:
        return "[" + f"{space},".join(random_json(chance, depth + 1) for _ in range(chance.randint(0, 3))) + space + "]"
    keys = [chance.choice(["a", "\\u0061", "a\\\\", 'a\\"', "b", "\\u0062", "c", "é", "\\u00e9", ""]) for _ in range(chance.randint(0, 3))]
    return "{" + ",".join(f'{space}"{key}"{space}:{random_json(chance, depth + 1)}' for key in keys) + space + "}"


def has_doubled(text: str) -> bool:
    """As Python's parser tells."""
    found: list[bool] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        found.append(len({key for key, _ in pairs}) < len(pairs))

    json.loads(text, object_pairs_hook=look)
    return any(found)


def test_random_bodies_in_random_pieces() -> None:
    chance, doubled = random.Random(0), 0
    for _ in range(3000):
        text = random_json(chance)
        body, expected = text.encode(), has_doubled(text)
        doubled += expected
        for size in (1, 2, chance.randint(1, 40), len(body)):
            scan, refused = _Scan(10**6, 10**6), False
            try:
                for start in range(0, len(body), size):
                    scan.feed(body[start : start + size])
            except ApiError:
                refused = True
            assert refused == expected, (text, size)
    assert 300 < doubled < 2700


def test_the_usual_body_is_known_at_once() -> None:
    """One object, no backslash: as Python's parser tells. Of others it is not known, or each key is there once."""
    chance, usual = random.Random(0), 0
    for _ in range(6000):
        text = random_json(chance)
        if chance.random() < 0.7:  # strings alone, with all that stands between two
            values = [chance.choice(['"a"', '":"', '","', '[":",":"]', '["b", "b"]', "1", '""']) for _ in range(3)]
            text = "{" + ", ".join(f'"{chance.choice("abc:,")}"{chance.choice(["", " "])}: {value}' for value in values) + "}"
        known, doubled = _has_each_key_once(text.encode()), has_doubled(text)
        assert not (known and doubled), text
        if text.count("{") < 2 and "\\" not in text:
            usual += 1
            assert known != doubled, text
    assert usual > 3000
    assert not _has_each_key_once(b"{" + b"[" * 1000)


def steps(body: bytes) -> tuple[int, str]:
    """How often others of the event loop come in between; the words of the refusal."""
    coroutine, count = BodyCheck(2048).check(body), 0
    try:
        while True:
            coroutine.send(None)
            count += 1
    except StopIteration:
        return count, ""
    except ApiError as error:
        return count, error.words


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (b"[1]", "maximum allowed batch size"), (b"{}", "maximum allowed batch size"), (b'""', "maximum allowed batch size"),
        (b"[[[1],2],3]", "maximum allowed batch size"), (b"1", "numbers"), (b'{"a":1}', "maximum allowed batch size"),
        (b" " * 20, "in no text"), (b"1" * 100_000, "in no text"),
    ],
)  # fmt: skip
def test_more_values_than_can_be_asked_for_are_not_decoded(item: bytes, words: str) -> None:
    size = 31_000_000
    body = b'{"inputs":[' + b",".join([item] * (size // (len(item) + 1))) + b"]}"
    assert words in steps(body)[1]


def test_what_may_be_asked_for_passes_in_many_steps() -> None:
    texts = json.dumps({"inputs": ['a "text", {with} [all] of: it\\ '] * 2048, "x": "y" * 10_000_000}).encode()
    ids = json.dumps({"inputs": [[101] * 511] * 2048}).encode()
    documents = json.dumps({"documents": [{"text": "a", "id": "b", "meta": {"c": [1, 2]}}] * 2048}).encode()
    for body in (texts, ids, documents):
        count, words = steps(body)
        assert words == "" and count >= len(body) // 40_000


def test_a_body_that_is_refused_before_it_is_decoded(server: Served) -> None:
    body = b'{"inputs":[' + b",".join([b"[1]"] * 200_000) + b"]}"
    for path in ("/embed", "/predict", "/rerank", "/"):
        reply = server.call("POST", path, body)
        assert reply.status == 422 and "maximum allowed batch size" in reply.json()["error"]


def test_large_bodies_wait_for_each_other() -> None:
    """So that not all of them are decoded in the same turn of the event loop."""

    async def run() -> None:
        check, order = BodyCheck(2048), list[int]()

        async def one(i: int) -> None:
            await check.check(json.dumps({"inputs": "a" * 1_000_000}).encode())
            order.append(turn[0])

        turn = [0]
        tasks = [asyncio.create_task(one(i)) for i in range(5)]
        while not all(task.done() for task in tasks):
            turn[0] += 1
            await asyncio.sleep(0)
        assert len(set(order)) == 5

    asyncio.run(run())
