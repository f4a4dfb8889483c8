"""A served language model beside the library's, and what its streams say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from language_models import random_llama
from served import Served, in_thread

import ftbert

MOST = 24
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@dataclass
class Both:
    """The library's model, and the same one served."""

    model: ftbert.Model
    server: Served

    def text(self, prompt: Any, **how: Any) -> str:
        (found,) = self.model.generate([prompt], **{"max_new_tokens": MOST, **how})
        return found

    def tokens(self, prompt: str) -> int:
        return len(self.model.tokenizer(prompt)["input_ids"])


@contextmanager
def both_of(folder: Path, kind: str = "bytes", **settings: Any) -> Iterator[Both]:
    random_llama(folder, kind, max_position_embeddings=160)
    with in_thread(("tiny", folder), **{"generation_slots": 3, **settings}) as server:
        yield Both(ftbert.load(folder), server)


def events(body: bytes, done: bool = True) -> list[Any]:
    """Of server-sent events; done: the last is [DONE]."""
    found = body.decode().split("\n\n")
    assert found.pop() == "" and (not done or found.pop() == "data: [DONE]")
    assert all(one.startswith("data: ") for one in found)
    return [json.loads(one[6:]) for one in found]


def streamed(server: Served, path: str, body: dict[str, Any], done: bool = True) -> list[Any]:
    reply = server.call("POST", path, {**body, "stream": True})
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
    return events(reply.body, done)


def joined(found: list[Any], choice: int = 0) -> str:
    picked = [one for event in found for one in event["choices"] if one["index"] == choice]
    return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in picked)
