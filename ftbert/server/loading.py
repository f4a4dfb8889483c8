"""Loads a model for an engine and times it: how many tokens at once are worth it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from ftbert.server.batcher import Batch, Limits, Run
from ftbert.server.description import Description
from ftbert.server.engine import Engine
from ftbert.server.metrics import Row
from ftbert.server.settings import Settings
from ftbert.server.work import Kind, Work

# A budget is the smallest batch with this share of the best tokens/s; larger ones only add waiting: none takes
# longer than this, in seconds, since the most urgent newcomer waits for it.
_ENOUGH, _LONGEST = 0.95, 0.25
_SECONDS = 6.0  # for all timings
_SMALLEST = 256


def load_engine(
    settings: Settings, which: int, device: str, threads: int | None, row: Row
) -> tuple[Engine, Description]:
    """The engine of settings.models[which] on `device`. Raises what ftbert.load does, ValueError as `describe`.

    threads: of the CPU, None as torch has them.
    """
    import torch

    from ftbert.model import load
    from ftbert.server.compute import Compute
    from ftbert.server.describe import describe

    if threads is not None:
        torch.set_num_threads(threads)
    name, source = settings.models[which]
    model = load(source, device, settings.dtype)
    about = describe(model, name, source, settings)
    compute = Compute(model, about.pooling)
    kind = {"embedding": Kind.EMBED, "token_classifier": Kind.TOKEN_LOGITS}.get(about.task, Kind.LOGITS)
    budget, rate = timed(compute, kind, about, settings)
    about = msgspec.structs.replace(about, batch_tokens=budget, rate=rate)
    limits = Limits(
        budget, settings.max_batch_requests or 1 << 30, settings.max_queue_seconds, settings.max_queue_tokens
    )
    return Engine(compute, limits, rate, row), about


def timed(compute: Any, kind: Kind, about: Description, settings: Settings) -> tuple[int, float]:
    """Tokens of a batch, and tokens/s at that size."""
    most = settings.max_batch_tokens
    sizes = [size for size in (_SMALLEST << k for k in range(20)) if size < most] + [most]
    if settings.batch_tokens is not None:
        sizes = [min(settings.batch_tokens, most)]
    began = time.monotonic()
    rates: dict[int, float] = {}
    for size in sizes:
        batch = _batch(kind, size, about)
        compute.launch(batch)()  # the first call at a size is slow
        seconds = min(_seconds(compute, batch) for _ in range(3))
        if rates and seconds > _LONGEST:
            break
        rates[size] = size / seconds
        if time.monotonic() - began > _SECONDS:
            break
    best = max(rates.values())
    budget = next(size for size, rate in rates.items() if rate >= _ENOUGH * best)
    return budget, rates[budget]


def _seconds(compute: Any, batch: Batch) -> float:
    began = time.perf_counter()
    compute.launch(batch)()
    return max(time.perf_counter() - began, 1e-9)


def _batch(kind: Kind, tokens: int, about: Description) -> Batch:
    length = min(128, about.max_length, tokens)
    offsets = np.append(np.arange(0, tokens, length), tokens).astype(np.int64)
    ids = np.random.default_rng(0).integers(0, about.vocab, tokens, dtype=np.int32)
    work = Work(0, kind, ids, offsets, float("inf"))
    return Batch(kind, [Run(work, 0, work.texts)], tokens, work.texts)
