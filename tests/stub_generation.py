"""A generation without a model, for what stands around it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from served import Served, in_thread
from server_models import described

from ftbert.server.batcher import Limits
from ftbert.server.description import GenerationFacts
from ftbert.server.engine import Engine
from ftbert.server.writer import Writer


class Token(NamedTuple):
    """As of ftbert.decoding."""

    place: int
    id: int
    end: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    cached: int = 0


class Steps:
    """A generation whose texts repeat their prompt's last id for ever; go: lets it step. It fails after `fails` steps."""

    def __init__(self, slots: int) -> None:
        self.slots, self.texts, self.queue = slots, dict[int, Any](), deque[Any]()
        self.go, self.lock, self.steps, self.fails = threading.Event(), threading.Lock(), 0, -1
        self.go.set()
        self.pause = 0.001

    def add(self, request: Any) -> int:
        with self.lock:
            place = request["place"] = self.steps = self.steps + 1
            self.queue.append(request)
        return int(place)

    def end(self, place: int) -> None:
        with self.lock:
            self.texts.pop(place, None)
            self.queue = deque(one for one in self.queue if one["place"] != place)

    def step(self) -> list[Token]:
        time.sleep(self.pause)
        assert self.go.wait(20)
        if self.fails == 0:
            raise RuntimeError("a secret text")
        self.fails -= 1
        with self.lock:
            while self.queue and len(self.texts) < self.slots:
                one = self.queue.popleft()
                self.texts[one["place"]] = one
            made = []
            for place, one in list(self.texts.items()):
                one["most"] -= 1
                made.append(Token(place, one["id"], "" if one["most"] else "length"))
                if not one["most"]:
                    del self.texts[place]
            return made

    def reset(self) -> None:
        self.texts.clear()
        self.queue.clear()


def request(ids: list[int], writing: Any) -> dict[str, int]:
    return {"id": ids[-1], "most": writing.max_new_tokens}


class Compute:
    def launch(self, batch: Any) -> Callable[[], Any]:
        return lambda: np.zeros((batch.texts, 4), np.float32)

    def free_memory(self) -> None:
        pass


@contextmanager
def steps_of(folder: Path, slots: int = 2, **settings: Any) -> Iterator[tuple[Served, Steps]]:
    """A server whose texts repeat the last id of their prompt. folder: of its tokenizer."""
    steps, about = Steps(slots), described(folder)
    facts = GenerationFacts(slots, 1 << 20, False, "{{ messages[-1].content }}", {}, {}, [])

    def load(settings: Any, which: int, device: str, threads: Any, row: Any, alone: Any) -> Any:
        writer = Writer(steps, request, slots, row)
        engine = Engine(Compute(), Limits(512), 1e6, row, writer)
        return engine, msgspec.structs.replace(about, generation=facts)

    with in_thread(("tiny", folder), load=load, **settings) as server:
        yield server, steps


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
