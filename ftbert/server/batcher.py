"""Which texts are computed next: admission, order, budget, deadlines. Pure: no threads, no clock, no IO.

Order: the text that begins `a` tokens into a request which arrived at time t has the key t + a / rate, where rate is
the engine's tokens/s. The tail of a bulk request therefore yields to requests that arrive later, and nothing starves: a
key stays as it is while those of newcomers grow. Spans of texts of one request are taken at once, up to an eighth of a
batch past the next key, so that the cost is of spans, not of texts.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from ftbert.server.job import Failure, Job, Kind

# How fast the estimate of tokens/s follows, and batches without lack of memory after which the budget grows again.
_FOLLOW, _GROW_AFTER = 0.1, 256
# Of a batch: so far a request goes on past the key of whoever comes next. Else requests of a few short texts would be
# torn into single ones: to choose a batch of 21 requests of 16 texts took 1.4 ms, and takes 0.1.
_PAST = 1 / 8
# Seconds. A request that the engine reads so long after it was sent is refused, where the queue may not last longer.
_UNREAD = 1.0
# Seconds for which all requests are refused, at most.
_FULL = 0.125


@dataclass(frozen=True)
class Limits:
    """batch_tokens, batch_texts: of one batch. max_queue_seconds: of the tokens ahead of a newcomer."""

    batch_tokens: int
    batch_texts: int = 1 << 30
    max_queue_seconds: float = 2.0
    max_queue_tokens: int = 8_000_000


class Span:
    """Neighbouring texts of one request. key: its place in the queue, once the request has arrived."""

    __slots__ = ("job", "key", "start", "stop", "tokens")

    def __init__(self, job: Job, start: int, stop: int) -> None:
        self.job, self.start, self.stop = job, start, stop
        self.tokens, self.key = job.tokens, job.arrived
        if stop - start < job.texts:
            begin = int(job.offsets[start])
            self.tokens = int(job.offsets[stop]) - begin
            self.key += begin / job.rate


@dataclass
class Batch:
    """Of one kind, and one adapter."""

    kind: Kind
    spans: list[Span] = field(default_factory=list)
    tokens: int = 0
    texts: int = 0
    adapter: int = 0


class Batcher:
    """Callers hold a lock of their own. rate: tokens/s to begin with."""

    def __init__(self, limits: Limits, rate: float) -> None:
        self.limits = limits
        self.budget = limits.batch_tokens
        self.rate = max(rate, 1.0)
        self.queued_tokens = 0
        self.queued_texts = 0
        self.computing = 0  # tokens of batches that were taken and have not left
        self._computing_since = 0.0  # what they are at now
        self.draining = False
        self.dropped: list[tuple[Job, Failure]] = []  # what expired, for the caller to answer
        self._heap: list[tuple[float, int, Span]] = []
        self._pushed = 0
        self._abandoned = 0  # spans in the heap that belong to requests which are over
        self._large: set[Job] = set()  # jobs of more tokens than a batch
        self._good_batches = 0

    def __len__(self) -> int:
        """Texts that wait."""
        return self.queued_texts

    def admit(self, job: Job, now: float) -> Failure | None:
        """All texts of a request, or none: then why."""
        if self.draining:
            return Failure(job.id, 503, "the server is shutting down", 1.0)
        seconds = job.deadline - now
        if seconds <= 0:
            return _late(job)
        if job.tokens > seconds * self.rate:
            return _too_much(job, seconds, self.rate)
        most = self.limits.max_queue_seconds
        # What waits in the socket is in no queue, and many small requests can wait long there.
        unread = now - job.sent > max(most, _UNREAD)
        wait = self._seconds_until_room(job, now)
        if unread or wait > 0:
            everybody = unread or self.tokens_ahead(now) > most * self.rate
            retry_after = max(1.0, math.ceil(min(wait, 3600.0)))
            # For less time than the queue lasts: the engine must not run dry.
            full = min(_FULL, most / 8) if everybody else 0.0
            return Failure(job.id, 429, "Model is overloaded", retry_after, full)
        job.arrived, job.rate = now, self.rate
        if job.tokens > self.limits.batch_tokens:
            self._large.add(job)
        self._push(Span(job, 0, job.texts))
        return None

    def _seconds_until_room(self, job: Job, now: float) -> float:
        """Until `job` would be admitted; 0 or less: it is. Not the time until the queue is empty: those who were
        refused would come back to an idle engine."""
        behind = self._left_of_computing(now) + self.queued_tokens
        wait = now + (behind + job.tokens) / self.rate - job.deadline
        if self.queued_tokens:  # else the engine takes any request that it can finish
            wait = max(
                wait,
                self.tokens_ahead(now) / self.rate - self.limits.max_queue_seconds,
                (self.queued_tokens + job.tokens - self.limits.max_queue_tokens) / self.rate,
            )
        return min(wait, behind / self.rate)  # an idle engine would take it

    def tokens_ahead(self, now: float) -> int:
        """What is left of the batches that are computed, and queued tokens with a smaller key than a request that
        arrives now has."""
        later = 0
        for job in self._large:
            due = max(0.0, (now - job.arrived) * job.rate)
            later += min(job.queued_tokens, max(0, job.tokens - int(due)))
        return self._left_of_computing(now) + max(0, self.queued_tokens - later)

    def _left_of_computing(self, now: float) -> int:
        done = (now - self._computing_since) * self.rate
        return max(0, self.computing - int(done))

    def next_batch(self, now: float) -> Batch | None:
        """The most urgent texts of one kind that fit the budget, at least one; None where nothing waits. Requests past
        their deadline go to `dropped` instead."""
        batch: Batch | None = None
        while self._heap:
            span = self._heap[0][2]
            job = span.job
            if job.over:
                heapq.heappop(self._heap)
                self._abandoned -= 1
                continue
            if now > job.deadline:
                self.dropped.append((job, _late(job)))
                self.give_up(job)
                continue
            if batch is None:
                batch = Batch(job.kind, adapter=job.adapter)
            elif (job.kind, job.adapter) != (batch.kind, batch.adapter):
                break
            stop = self._fitting(span, batch)
            if stop == span.start:
                break
            heapq.heappop(self._heap)
            self._count(span, -1)
            if stop < span.stop:
                self._push(Span(job, stop, span.stop))
                span = Span(job, span.start, stop)
            batch.spans.append(span)
            batch.tokens += span.tokens
            batch.texts += span.stop - span.start
            self._settle(span)
        if batch is not None:
            if not self.computing:
                self._computing_since = now
            self.computing += batch.tokens
        return batch

    def leave(self, batch: Batch, now: float) -> None:
        """It is not computed any more: it is done, or has failed."""
        self.computing -= batch.tokens
        self._computing_since = now

    def _fitting(self, span: Span, batch: Batch) -> int:
        """Where the texts of `span` end that may join: by the budget, and by the key of whoever comes next."""
        room = self.budget - batch.tokens
        if span.stop - span.start == 1 and span.tokens <= room and batch.texts < self.limits.batch_texts:
            return span.stop
        offsets = span.job.offsets
        stop = int(offsets.searchsorted(offsets[span.start] + room, "right")) - 1
        stop = min(stop, span.stop, span.start + self.limits.batch_texts - batch.texts)
        if stop <= span.start:
            return span.start if batch.texts else span.start + 1
        other = min((entry[0] for entry in self._heap[1:3]), default=None)  # the second smallest key
        if other is not None and stop > span.start + 1:
            past = _PAST * self.budget
            yields = int(offsets.searchsorted((other - span.job.arrived) * span.job.rate + past, "right"))
            stop = min(stop, max(yields, span.start + 1))
        return stop

    def give_up(self, job: Job) -> None:
        """It is cancelled, late or failed: what waits of it is not computed, and counts no more."""
        if job.over:
            return
        job.over = True
        self.queued_tokens -= job.queued_tokens
        self.queued_texts -= job.left
        self._abandoned += job.queued_spans
        job.queued_tokens = job.left = job.queued_spans = 0
        self._large.discard(job)
        if 2 * self._abandoned > len(self._heap):  # else they hold their ids until their turn comes
            self._heap = [entry for entry in self._heap if not entry[2].job.over]
            heapq.heapify(self._heap)
            self._abandoned = 0

    def requeue(self, batch: Batch) -> bool:
        """After a lack of memory: half the budget, the texts back in their places. False for a single text."""
        if batch.texts == 1:
            return False
        self.budget = max(1, min(self.budget, batch.tokens) // 2)
        self._good_batches = 0
        for span in batch.spans:
            if not span.job.over:
                span.job.left += span.stop - span.start
                self._push(span)
        return True

    def computed(self, tokens: int, seconds: float) -> None:
        """After a batch: the estimate of tokens/s follows those that fill half a budget."""
        if 2 * tokens >= self.budget and seconds > 0:
            self.rate = max(1.0, self.rate + _FOLLOW * (tokens / seconds - self.rate))
        self._good_batches += 1
        if self._good_batches >= _GROW_AFTER and self.budget < self.limits.batch_tokens:
            self.budget, self._good_batches = min(2 * self.budget, self.limits.batch_tokens), 0

    def _push(self, span: Span) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (span.key, self._pushed, span))
        self._count(span, 1)

    def _count(self, span: Span, sign: int) -> None:
        self.queued_tokens += sign * span.tokens
        self.queued_texts += sign * (span.stop - span.start)
        span.job.queued_tokens += sign * span.tokens
        span.job.queued_spans += sign

    def _settle(self, span: Span) -> None:
        span.job.left -= span.stop - span.start
        if span.job.left == 0:
            self._large.discard(span.job)


def _late(job: Job) -> Failure:
    return Failure(job.id, 503, "the request was not computed before its deadline", 1.0)


def _too_much(job: Job, seconds: float, rate: float) -> Failure:
    """No engine finishes it, however often it comes."""
    fit = int(seconds * rate * job.texts / job.tokens)
    words = (
        f"the request has {job.tokens} tokens, of which about {int(seconds * rate)} are computed in the "
        f"{seconds:.3g} s until its deadline: send "
        + (f"at most {fit} texts of this length in a request" if fit else "shorter texts, or allow more time")
    )
    return Failure(job.id, 413, words)
