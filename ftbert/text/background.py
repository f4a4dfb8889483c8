"""An iterator drawn from in another thread, a bounded number of items ahead."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, TypeVar, cast

T = TypeVar("T")

THREADS = "ftbert-tokenise"  # what their names begin with


class _End:
    """The last thing in the queue: why the producer stopped, None when it had no more."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def in_background(source: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yields what `source` yields; at most `ahead` items wait.

    An exception of `source` is raised here, after the items before it. Closing this iterator, or an
    exception where it is consumed, stops the thread and waits for it: none is left behind.
    """
    items: queue.Queue[T | _End] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def put(item: T | _End) -> bool:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                items.put(item, timeout=0.05)  # wakes to see `stop`
                return True
        return False

    def produce() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                if not put(item):
                    break
        except BaseException as caught:  # noqa: BLE001 - a panic in the tokenizer is not an Exception
            error = caught
        finally:
            close: Any = getattr(source, "close", None)
            if close is not None:
                close()
            put(_End(error))

    thread = threading.Thread(target=produce, name=THREADS, daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop.set()
        thread.join()
        item = cast(Any, None)  # a raised error would otherwise hold its own frame
