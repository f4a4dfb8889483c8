"""The policy of the queue: admission, order, budget, deadlines, cancelling, lack of memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec", reason="msgspec is not installed: the extra ftbert[serve]")

from ftbert.server.batcher import Batch, Batcher, Limits  # noqa: E402
from ftbert.server.job import Job, Kind  # noqa: E402

RATE = 1000.0


def job(one: int, lengths: list[int], deadline: float = 1e9, kind: Kind = Kind.EMBED) -> Job:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Job(one, kind, np.zeros(int(offsets[-1]), np.int32), offsets, deadline)


def batcher(budget: int = 100, **limits: float) -> Batcher:
    return Batcher(Limits(budget, **{"max_queue_seconds": 1e9, **limits}), RATE)  # type: ignore[arg-type]


def texts(batch: Batch | None) -> list[tuple[int, int]]:
    """(request, text) in the order of the batch."""
    return [(run.job.id, i) for run in batch.spans for i in range(run.start, run.stop)] if batch else []


def drain(queue: Batcher, now: float = 0.0) -> list[Batch]:
    found = []
    while (batch := queue.next_batch(now)) is not None:
        found.append(batch)
    return found


requests = st.lists(
    st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.sampled_from(list(Kind)), st.floats(0, 5)),
    min_size=1, max_size=20,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 120), st.integers(1, 20))
def test_every_text_is_computed_once_within_the_budget(wanted: list, budget: int, most: int) -> None:
    queue = batcher(budget, batch_texts=most)
    for one, (lengths, kind, at) in enumerate(sorted(wanted, key=lambda x: x[2])):
        assert queue.admit(job(one, lengths, kind=kind), at) is None
    assert queue.queued_tokens == sum(sum(lengths) for lengths, _, _ in wanted)
    seen: list[tuple[int, int]] = []
    for batch in drain(queue):
        assert batch.texts == len(texts(batch)) <= most
        assert batch.tokens == sum(run.tokens for run in batch.spans)
        assert batch.tokens <= budget or batch.texts == 1
        assert {run.job.kind for run in batch.spans} == {batch.kind}
        seen += texts(batch)
    assert len(seen) == len(set(seen)) == sum(len(lengths) for lengths, _, _ in wanted)
    for one in range(len(wanted)):  # within a request in order
        assert [i for of, i in seen if of == one] == sorted(i for of, i in seen if of == one)
    assert (queue.queued_tokens, len(queue)) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(requests, st.integers(1, 120))
def test_texts_come_in_the_order_of_their_keys(wanted: list, budget: int) -> None:
    """Spans take the texts that the formula would take one at a time, but for an eighth of a batch."""
    queue = batcher(budget)
    keys: dict[tuple[int, int], float] = {}
    for one, (lengths, _, at) in enumerate(sorted(wanted, key=lambda x: x[2])):
        made = job(one, lengths)
        queue.admit(made, at)
        keys |= {(one, i): at + float(made.offsets[i]) / RATE for i in range(len(lengths))}
    order = [keys[text] for batch in drain(queue) for text in texts(batch)]
    least = np.minimum.accumulate(order[::-1])[::-1]  # of what came later
    assert (order <= least + budget / 8 / RATE + 1e-9).all()


def test_requests_of_short_texts_stay_whole() -> None:
    queue = batcher(1600)
    for one in range(21):
        queue.admit(job(one, [5] * 16), 0.0)
    batches = drain(queue)
    assert sum(len(batch.spans) for batch in batches) <= 21 + len(batches)


def test_a_newcomer_goes_before_the_tail_of_a_bulk_request() -> None:
    queue = batcher(100)
    queue.admit(job(1, [50] * 100), 0.0)  # 5 s of work
    assert texts(queue.next_batch(0.0)) == [(1, 0), (1, 1)]
    queue.admit(job(2, [10]), 0.1)
    assert (2, 0) in texts(queue.next_batch(0.1))


def test_a_bulk_request_is_not_starved_by_newcomers() -> None:
    """Newcomers at the engine's full rate for ever: the bulk request still ends, at half speed or so."""
    queue, now, one = batcher(100), 0.0, 1
    queue.admit(job(0, [50] * 40), now)
    left = 40
    for _ in range(400):
        one += 1
        queue.admit(job(one, [50, 50]), now)
        batch = queue.next_batch(now)
        left -= sum(of == 0 for of, _ in texts(batch))
        now += 0.1
    assert left == 0


def test_admission() -> None:
    queue = batcher(100, max_queue_seconds=2.0, max_queue_tokens=10_000)
    assert queue.admit(job(1, [60_000]), 0.0) is None  # an idle engine takes any request that it can finish
    assert queue.admit(job(2, [10]), 0.0).status == 429  # type: ignore[union-attr]
    queue = batcher(1000, max_queue_seconds=2.0, max_queue_tokens=10_000)
    for one in range(3):
        assert queue.admit(job(one, [900]), 0.0) is None
    refused = queue.admit(job(9, [900]), 0.0)  # 2.7 s are ahead: in 0.7 s there is room, before the queue is empty
    assert refused is not None and (refused.status, refused.retry_after) == (429, 1.0)
    assert queue.queued_tokens == 2700  # nothing of it was taken
    late = queue.admit(job(10, [900], deadline=1.5), 0.5)
    assert late is not None and (late.status, late.retry_after) == (429, 3.0)  # never in time, but for an idle engine
    large = queue.admit(job(12, [20_000]), 0.0)
    assert large is not None and (large.status, large.retry_after) == (429, 3.0)
    assert refused.full == 0.125
    queue = batcher(1000, max_queue_seconds=2.0, max_queue_tokens=10_000)
    assert queue.admit(job(1, [900]), 0.0) is None
    for greedy in (job(2, [900], deadline=1.0), job(3, [9200])):  # a small request with time would be taken
        refused = queue.admit(greedy, 0.0)
        assert refused is not None and (refused.status, refused.full) == (429, 0.0)
    queue.draining = True
    assert queue.admit(job(11, [1]), 0.0).status == 503  # type: ignore[union-attr]


def test_what_no_engine_can_finish_is_refused_with_what_would_fit() -> None:
    """By an idle engine and by a busy one, with words that hold: so many texts are taken."""
    for ahead in ([], [500]):
        queue = batcher(1000)
        if ahead:
            assert queue.admit(job(1, ahead), 0.0) is None
        refused = queue.admit(job(2, [200] * 2048, deadline=30.0), 0.0)
        assert refused is not None and (refused.status, refused.retry_after, refused.full) == (413, 0.0, 0.0)
        fit = int(re.search(r"at most (\d+) texts", refused.words)[1])  # type: ignore[index]
        assert fit == 150 and queue.queued_tokens == sum(ahead)
        assert (queue.admit(job(3, [200] * fit, deadline=30.0), 0.0) is None) == (not ahead)
    short = batcher().admit(job(1, [900], deadline=0.5), 0.0)
    assert short is not None and short.status == 413 and "shorter texts" in short.words
    late = batcher().admit(job(1, [1], deadline=0.5), 0.5)
    assert late is not None and late.status == 503


def test_an_engine_that_only_computes_knows_deadlines_too() -> None:
    queue = batcher(1000)
    assert queue.admit(job(1, [1000]), 0.0) is None and queue.next_batch(0.0) is not None
    assert queue.admit(job(2, [900], deadline=1.5), 0.0).status == 429  # type: ignore[union-attr]
    assert queue.admit(job(2, [900], deadline=2.0), 0.0) is None


def test_what_is_computed_is_ahead_too() -> None:
    queue = batcher(1000, max_queue_seconds=2.0)
    for one in range(2):
        assert queue.admit(job(one, [1000]), 5.0) is None
    first, second = queue.next_batch(5.0), queue.next_batch(5.0)
    assert first is not None and second is not None and queue.tokens_ahead(5.0) == 2000
    assert queue.admit(job(2, [500]), 5.0) is None  # nothing waits
    refused = queue.admit(job(3, [10]), 5.0)
    assert refused is not None and (refused.status, refused.full) == (429, 0.125)
    assert queue.admit(job(4, [100], deadline=7.4), 5.5).status == 429  # type: ignore[union-attr]
    assert queue.admit(job(5, [10]), 5.5) is None  # half a second of the two is over
    queue.leave(first, 6.25)  # late: the second has begun now
    assert queue.tokens_ahead(6.25) == 1000 + 510
    queue.leave(second, 7.0)
    assert queue.tokens_ahead(7.0) == 510


def test_requests_that_wait_to_be_read_fill_the_queue_too() -> None:
    """Many small ones keep the engine from reading: the tokens that it knows of are few."""
    queue, early, late = batcher(max_queue_seconds=2.0), job(1, [5]), job(2, [5])
    early.sent, late.sent = 10.0, 7.9
    assert queue.admit(early, 11.0) is None
    refused = queue.admit(late, 10.0)
    assert refused is not None and (refused.status, refused.retry_after, refused.full) == (429, 1.0, 0.125)
    impatient = batcher(max_queue_seconds=0.001)  # a hop between processes is no overload
    assert impatient.admit(late, 8.0) is None


def test_a_bulk_request_does_not_make_others_429() -> None:
    """Its tail is not ahead of them."""
    queue = batcher(100, max_queue_seconds=0.5)
    assert queue.admit(job(1, [5] * 2000), 0.0) is None  # 10 s
    assert queue.tokens_ahead(0.0) == 0
    for step in range(20):
        assert queue.admit(job(10 + step, [10]), 0.1 * step) is None
        queue.leave(queue.next_batch(0.1 * step), 0.1 * step)  # type: ignore[arg-type]


def test_past_the_deadline_nothing_is_computed() -> None:
    queue = batcher(100)
    queue.admit(job(1, [50] * 4, deadline=1.0), 0.0)
    assert (1, 0) in texts(queue.next_batch(0.5))
    queue.admit(job(2, [10]), 0.8)
    assert texts(queue.next_batch(1.5)) == [(2, 0)]
    assert [(w.id, f.status) for w, f in queue.dropped] == [(1, 503)]
    assert (queue.next_batch(2.0), queue.queued_tokens) == (None, 0)


@settings(max_examples=100, deadline=None)
@given(requests, st.sets(st.integers(0, 19)))
def test_cancelled_requests_leave_uncomputed(wanted: list, gone: set[int]) -> None:
    queue = batcher(100)
    jobs = [job(one, lengths, kind=kind) for one, (lengths, kind, _) in enumerate(wanted)]
    for made in jobs:
        queue.admit(made, 0.0)
    for made in jobs:
        if made.id in gone:
            queue.give_up(made)
            queue.give_up(made)  # its deadline comes, and its client goes
    left = [made for made in jobs if made.id not in gone]
    assert queue.queued_tokens == sum(made.tokens for made in left) == queue.tokens_ahead(1e6)
    assert len(queue) == sum(made.texts for made in left)
    assert len(queue._heap) <= 2 * len(left)  # what is over is not kept
    seen = {one for batch in drain(queue) for one, _ in texts(batch)}
    assert seen == set(range(len(wanted))) - gone
    assert (queue.queued_tokens, len(queue), queue._large) == (0, 0, set())


def test_given_up_in_the_middle_it_counts_no_more() -> None:
    """A batch of it is computed, spans of it have come back after a lack of memory, more of it waits."""
    queue = batcher(100, max_queue_seconds=1.0)
    bulk, other = job(1, [50] * 100), job(2, [10])
    assert queue.admit(bulk, 0.0) is None
    failed, computed = queue.next_batch(0.0), queue.next_batch(0.0)
    assert failed is not None and computed is not None and queue.requeue(failed)
    queue.leave(failed, 0.0)
    queue.give_up(bulk)
    assert (queue.queued_tokens, len(queue), queue.tokens_ahead(0.0)) == (0, 0, computed.tokens)
    assert queue.requeue(computed)  # nothing of it comes back
    queue.leave(computed, 0.0)
    assert queue.admit(other, 0.0) is None
    assert [texts(batch) for batch in drain(queue)] == [[(2, 0)]]


def test_lack_of_memory_halves_the_budget_and_loses_nothing() -> None:
    queue = batcher(100)
    queue.admit(job(1, [25] * 8), 0.0)
    batch = queue.next_batch(0.0)
    assert batch is not None and batch.texts == 4 and queue.requeue(batch)
    assert queue.budget == 50
    again = drain(queue)
    assert [text for one in again for text in texts(one)] == [(1, i) for i in range(8)]
    assert max(one.tokens for one in again) == 50
    alone = job(2, [80])
    queue.admit(alone, 0.0)
    assert queue.requeue(queue.next_batch(0.0)) is False  # type: ignore[arg-type]
    for _ in range(300):
        queue.computed(50, 0.05)
    assert queue.budget == 100  # it grows again


def test_the_rate_follows_full_batches_only() -> None:
    queue = batcher(100)
    queue.computed(4, 1.0)
    assert queue.rate == RATE
    queue.computed(100, 0.05)
    assert RATE < queue.rate < 2000
