"""Several copies of a model, one a device, that take batches in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

Batch = TypeVar("Batch")
Result = TypeVar("Result")
Start = Callable[[Batch], Callable[[], Result]]  # starts a batch; how to get its result

# Batches that a copy has before it, so that it never waits for the next.
BATCHES_EACH = 2


@contextmanager
def taking_turns(
    models: Sequence[Any], launch: Callable[[Any, Batch], Callable[[], Result]]
) -> Iterator[Start[Batch, Result]]:
    """`launch(model, batch)` on whichever model has the fewest batches before it, in a thread of its own. Leaving waits
    for what is being computed."""
    waiting = [0] * len(models)
    lock = threading.Lock()
    # Copies on one CPU share its cores: a thread's number of OpenMP threads is its own.
    cores = max(1, torch.get_num_threads() // len(models))
    pools = [
        ThreadPoolExecutor(1, "ftbert-replica", *((torch.set_num_threads, (cores,)) if _on_cpu(model) else ()))
        for model in models
    ]

    def compute(number: int, batch: Batch) -> Result:
        try:
            return launch(models[number], batch)()
        finally:
            with lock:
                waiting[number] -= 1

    def start(batch: Batch) -> Callable[[], Result]:
        with lock:
            number = waiting.index(min(waiting))
            waiting[number] += 1
        return pools[number].submit(partial(compute, number, batch)).result

    try:
        yield start
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _on_cpu(model: Any) -> bool:
    return bool(model.device.type == "cpu")
