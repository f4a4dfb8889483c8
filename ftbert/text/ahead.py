"""Tokenising ahead of the computation: one thread reads, several tokenise, and what waits is bounded.

`tokenizers` lets other Python threads run while it works, and divides a call among the cores itself. What is left for
Python (lists of ids to arrays, freeing) takes a tenth of the time of short texts; with two calls under way it costs
nothing as long as a core is free.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

from ftbert.cores import cores
from ftbert.text.seats import Seats
from ftbert.text.tokens import Text, Tokens, joined

T = TypeVar("T")
Encode = Callable[[Sequence[Text]], Tokens]

# A call: long enough for the cores, short enough that Python holds its lock for less than a batch takes on a GPU.
_TEXTS, _CHARACTERS = 256, 1 << 16
_WINDOWS_AHEAD = 1  # read and handed to the tokenisers, beside the window that is being packed
_MOST_THREADS = 4
_THREADS = "ftbert-tokenise"  # what their names begin with


def in_turn(windows: Iterable[tuple[T, Sequence[Text]]], encode: Encode) -> Generator[tuple[T, Tokens], None, None]:
    """Tokenises each window where it is asked for, without a thread: what is best for a few texts."""
    for item, texts in windows:
        yield item, encode(texts)


def seats_here(others: bool = False) -> Seats:
    """For calls of the tokenizer in threads of this process. others: a seat for each core may be added."""
    most = cores().number
    return Seats(min(_MOST_THREADS, most), most if others else 0)


def ahead(
    windows: Iterable[tuple[T, Sequence[Text]]], encode: Encode, seats: Seats | None = None
) -> Generator[tuple[T, Tokens], None, None]:
    """As `in_turn`, with threads; order and errors are the same. Closing it ends them. encode: thread-safe. seats:
    where calls run, None: `seats_here()`; they are closed too."""
    seats = seats_here() if seats is None else seats
    with contextlib.closing(seats), ThreadPoolExecutor(seats.most, thread_name_prefix=_THREADS) as pool:

        def submitted() -> Generator[tuple[T, list[Future[Tokens]]], None, None]:
            for item, texts in windows:
                yield item, [pool.submit(seats.run, encode, texts[part]) for part in calls_of(texts)]

        try:
            with contextlib.closing(in_background(submitted(), _WINDOWS_AHEAD)) as arriving:
                for item, parts in arriving:
                    began = time.perf_counter()
                    found = [part.result() for part in parts]
                    seats.waited += time.perf_counter() - began
                    yield item, joined(found)
        finally:
            pool.shutdown(cancel_futures=True)


def in_background(source: Generator[T, None, None], most: int) -> Generator[T, None, None]:
    """Yields what `source` yields, drawn in another thread; `most` items wait, and one more is being made.

    An exception of `source` is raised here, after the items before it. Closing this iterator, or an exception where it
    is consumed, waits for the item being made and closes `source`: no thread is left behind.
    """
    end: Any = object()
    with contextlib.closing(source), ThreadPoolExecutor(1, thread_name_prefix=_THREADS) as pool:
        waiting = deque(pool.submit(next, source, end) for _ in range(most + 1))
        try:
            while (item := waiting.popleft().result()) is not end:
                waiting.append(pool.submit(next, source, end))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)


def is_small(texts: Sequence[Text]) -> bool:
    """Whether one call tokenises all of it, so that threads would only cost time."""
    return len(texts) <= _TEXTS and len(calls_of(texts)) <= 1


def calls_of(texts: Sequence[Text]) -> list[slice]:
    """Parts of `texts` that are tokenised in one call each."""
    parts, start, sizes = [], 0, [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
    totals = list(accumulate(sizes))
    before = 0
    for end in range(1, len(sizes) + 1):
        last = end == len(sizes)
        if last or end - start == _TEXTS or totals[end] - before > _CHARACTERS:
            parts.append(slice(start, end))
            start, before = end, totals[end - 1]
    return parts
