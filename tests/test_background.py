"""An iterator drawn from in another thread: order, bounds, errors, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from stub_model import threads_left

from ftbert.text.background import in_background


def test_keeps_the_order_and_ends() -> None:
    assert list(in_background(iter(range(100)), 3)) == list(range(100))
    assert threads_left() == 0


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise KeyError("broken")

    got = []
    with pytest.raises(KeyError, match="broken"):
        for item in in_background(source(), 2):
            got.append(item)  # noqa: PERF402 - the items before the error are the point
    assert got == [1]
    assert threads_left() == 0


def test_closing_stops_the_thread_and_closes_the_source() -> None:
    closed = threading.Event()
    drawn = []

    def source() -> Iterator[int]:
        try:
            for number in range(1_000_000):
                drawn.append(number)
                yield number
        finally:
            closed.set()

    items = in_background(source(), 2)
    assert next(items) == 0
    items.close()
    assert closed.is_set()
    assert threads_left() == 0
    assert len(drawn) <= 5  # bounded: two waiting, one in each hand
