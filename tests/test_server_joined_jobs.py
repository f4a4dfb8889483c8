"""Single texts that reach an engine as one request: each client has its own answer, refusal and end."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httptools", reason="the extra `serve` is not installed")
from ftbert.server import frames
from ftbert.server.batcher import Batcher, Limits
from ftbert.server.frames import Frame
from ftbert.server.job import Failure, Job, Kind, Part, Result
from ftbert.server.links import Failed, SocketLink, next_id

RATE = 1e6  # tokens/s: 2,000 tokens may be joined


def job(*ids: int, texts: int = 1, kind: Kind = Kind.EMBED, **more: Any) -> Job:
    size = len(ids) // texts
    offsets = np.arange(texts + 1, dtype=np.int64) * size
    return Job(next_id(), kind, np.array(ids, np.int32), offsets, more.pop("deadline", time.monotonic() + 60), **more)


class Wire:
    """An engine's end of a link, of whatever this process sends."""

    def __init__(self, rate: float = RATE) -> None:
        self.link = SocketLink("nowhere")
        self.jobs: list[Job] = []
        self.cancelled: list[int] = []
        self._reader = frames.Reader()
        self.link._transport, self.link.description = SimpleNamespace(write=self._read), object()  # type: ignore[assignment]
        self.link.data_received(frames.status(True, 0, rate))

    def _read(self, data: bytes) -> None:
        for kind, payload in self._reader.feed(data):
            if kind == Frame.SUBMIT:
                self.jobs.append(frames.read_submit(payload))
            else:
                self.cancelled += frames.read_cancel(payload)

    def taken(self) -> list[Job]:
        jobs, self.jobs = self.jobs, []
        return jobs

    def say(self, *results: Result) -> None:
        self.link.data_received(frames.results(list(results)))


def rows_of(one: Job, start: int = 0, stop: int = 1 << 30) -> Part:
    """Each text's row is its first id, so that nobody gets another's."""
    stop = min(stop, one.texts)
    rows = one.ids[one.offsets[start:stop]].astype(np.float32)[:, None].repeat(3, 1)
    return Part(one.id, start, stop, rows, 0.25, 0.5)


def run(body: Any) -> None:
    asyncio.run(body())


def test_each_gets_its_own_rows() -> None:
    async def body() -> None:
        wire = Wire()
        calls = [wire.link.submit(job(i, 7, 7)) for i in range(10)]
        await asyncio.sleep(0)
        first, joined = wire.taken()  # one at once: the engine had nothing
        assert (first.texts, joined.texts, joined.tokens) == (1, 9, 27)
        wire.say(rows_of(joined, 4), rows_of(joined, 0, 4), rows_of(first))
        answers = [await call.future for call in calls]
        assert [answer.rows.tolist() for answer in answers] == [[[i] * 3] for i in range(10)]
        assert all((answer.queue, answer.compute) == (0.25, 0.5) for answer in answers)
        assert not wire.link._joined._members and not wire.link._joined._joined_in

    run(body)


def test_what_has_more_than_ids_goes_by_itself() -> None:
    async def body() -> None:
        wire = Wire()
        wire.link.submit(job(1))
        others = [
            job(1, 2, texts=2), job(1, kind=Kind.TOKENS), job(1, types=np.zeros(1, np.uint8)), job(1, adapter=1),
            job(1, skip=np.ones(1, np.int32)), job(1, keys=np.ones(1, np.int32)), job(1, deadline=time.monotonic() + 5),
            job(*range(1999)), job(1, kind=Kind.LOGITS),
        ]  # fmt: skip
        for one in (job(1, 1), *others, job(2, 2)):
            wire.link.submit(one)
        await asyncio.sleep(0)
        assert [one.texts for one in wire.taken()] == [1, 2, *[2 if one is others[0] else 1 for one in others]]

    run(body)


@pytest.mark.parametrize("rate", [0.0, 2000.0])
def test_a_slow_engine_gets_each_by_itself(rate: float) -> None:
    """Else the last of sixteen texts would wait for all that comes while the others are computed."""

    async def body() -> None:
        wire = Wire(rate)
        for i in range(9):
            wire.link.submit(job(i, 7, 7))
        await asyncio.sleep(0)
        assert [one.texts for one in wire.taken()] == [1] * 9

    run(body)


def test_a_failure_of_one_is_not_the_others() -> None:
    async def body() -> None:
        wire = Wire()
        calls = [wire.link.submit(job(i, 7)) for i in range(5)]
        await asyncio.sleep(0)
        _, joined = wire.taken()
        wire.say(rows_of(joined, 0, 1))
        wire.say(Failure(joined.id, 424, "the model's result for this input is not finite"))
        alone = wire.taken()
        assert [one.texts for one in alone] == [1] * 3 and [one.id for one in alone] == [call.job.id for call in calls[2:]]
        wire.say(rows_of(alone[0]), Failure(alone[1].id, 424, "not finite"), rows_of(alone[2]))
        assert (await calls[2].future).rows[0, 0] == 2 and (await calls[4].future).rows[0, 0] == 4
        with pytest.raises(Failed, match="not finite"):
            await calls[3].future

    run(body)


def test_a_refusal_of_everybody() -> None:
    async def body() -> None:
        wire = Wire()
        calls = [wire.link.submit(job(i)) for i in range(4)]
        await asyncio.sleep(0)
        wire.say(Failure(wire.taken()[1].id, 429, "Model is overloaded", 3.0, 9.0))
        for call in calls[1:]:
            with pytest.raises(Failed) as error:
                await call.future
            assert (error.value.failure.id, error.value.failure.retry_after) == (call.job.id, 3.0)
        assert wire.link.full and not wire.taken() and not calls[0].future.done()

    run(body)


def test_who_goes_leaves_the_others() -> None:
    """Also before anything was sent."""

    async def body() -> None:
        wire = Wire()
        calls = [wire.link.submit(job(i)) for i in range(6)]
        wire.link.cancel(calls[1], RuntimeError("gone"))
        await asyncio.sleep(0)
        first, joined = wire.taken()
        assert joined.texts == 4 and not wire.cancelled
        for gone in calls[2:4]:
            wire.link.cancel(gone, RuntimeError("gone"))
        await asyncio.sleep(0)
        assert not wire.taken() and not wire.cancelled  # the others keep their place
        wire.say(rows_of(joined), rows_of(first))
        assert [(await calls[i].future).rows[0, 0] for i in (0, 4, 5)] == [0, 4, 5]
        for gone in calls[1:4]:
            with pytest.raises(RuntimeError, match="gone"):
                await gone.future

    run(body)


def test_what_all_have_left_is_cancelled() -> None:
    async def body() -> None:
        wire = Wire()
        calls = [wire.link.submit(job(i)) for i in range(4)]
        await asyncio.sleep(0)
        _, joined = wire.taken()
        wire.say(rows_of(joined, 0, 1))
        for gone in calls[2:]:
            assert not wire.cancelled
            wire.link.cancel(gone, RuntimeError("gone"))
            assert gone.future.exception()
        assert wire.cancelled == [joined.id] and (await calls[1].future).rows[0, 0] == 1
        assert not wire.link._joined._members and not wire.link._joined._joined_in

    run(body)


def test_a_member_that_asks_for_less_time_is_refused_alone() -> None:
    """A joined request has the earliest deadline of all."""

    async def body() -> None:
        wire, queue = Wire(), Batcher(Limits(65536), RATE)
        now = time.monotonic()
        assert queue.admit(job(*[1] * 500_000), now) is None  # half a second
        calls = [wire.link.submit(job(i, deadline=now + seconds)) for i, seconds in enumerate((9, 1.1, 0.3))]
        await asyncio.sleep(0)
        sent = wire.taken()
        assert [one.texts for one in sent] == [1, 2]
        for one in sent:
            failure = queue.admit(one, now)
            wire.say(failure if failure is not None else rows_of(one))
        for one in wire.taken():
            failure = queue.admit(one, now)
            wire.say(failure if failure is not None else rows_of(one))
        assert [call.future.exception() is None for call in calls] == [True, True, False] and not wire.link.full

    run(body)


def test_an_engine_that_is_lost_fails_all() -> None:
    async def body() -> None:
        wire = Wire()
        calls = [wire.link.submit(job(i)) for i in range(4)]
        await asyncio.sleep(0)
        wire.link.connection_lost(None)
        for call in calls:
            with pytest.raises(Failed, match="stopped"):
                await call.future
        assert not wire.link._joined._members and not wire.link._joined._joined_in

    run(body)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_answers_everybody_once(seed: int) -> None:
    async def body() -> None:
        draw, wire = random.Random(seed), Wire()
        calls, engine, gone = [], [], set()
        for _ in range(300):
            event = draw.random()
            if event < 0.5:
                calls.append(wire.link.submit(job(len(calls), *[7] * draw.randrange(40))))
            elif event < 0.6 and calls:
                which = draw.randrange(len(calls))
                if not calls[which].future.done():
                    gone.add(which)
                    wire.link.cancel(calls[which], RuntimeError("gone"))
            elif event < 0.7:
                await asyncio.sleep(0)
            engine += wire.taken()
            engine = [one for one in engine if one.id not in wire.cancelled]
            if event > 0.8 and engine:
                one = engine.pop(draw.randrange(len(engine)))
                middle = draw.randrange(one.texts + 1)
                parts = [rows_of(one, *span) for span in ((0, middle), (middle, one.texts)) if span[0] < span[1]]
                failed = one.texts > 1 and draw.random() < 0.3
                wire.say(*(parts[:1] + [Failure(one.id, 424, "one of them")] if failed else draw.sample(parts, len(parts))))
        while any(not call.future.done() for call in calls):
            await asyncio.sleep(0)
            for one in wire.taken() + engine:
                if one.id not in wire.cancelled:
                    wire.say(rows_of(one))
            engine = []
        for i, call in enumerate(calls):
            assert (i in gone) == (call.future.exception() is not None)
            assert i in gone or call.future.result().rows.tolist() == [[i] * 3]
        assert not wire.link._pending and not wire.link._joined._members and not wire.link._joined._joined_in

    run(body)
