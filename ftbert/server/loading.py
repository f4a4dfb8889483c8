"""Loads a model for an engine and times it: a batch has the least tokens with nearly all of the best tokens/s.

Others disturb timings, which only adds time: of several timings of one size the shortest is the truth, once it was seen
twice. Sizes take turns, so that a slow second is one of all of them. A timing of a short batch is of several in a row,
so that it does not fall between two turns of another process on the same core, which a long one cannot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np

from ftbert import cores
from ftbert.server.batcher import Batch, Limits, Span
from ftbert.server.description import TASKS, Description
from ftbert.server.engine import Engine
from ftbert.server.job import Job, Kind
from ftbert.server.logs import LOG
from ftbert.server.metrics import Row
from ftbert.server.settings import Settings
from ftbert.server.text_encoder import TextEncoder
from ftbert.text import panics_as_errors

# A batch is the smallest with this share of the best tokens/s; larger ones only add waiting: none takes longer than
# this, in seconds, since the most urgent newcomer waits for it.
ENOUGH, LONGEST = 0.95, 0.25
_SMALLEST = 256
# The least seconds of a timing; the seconds after which no other round begins, where sizes are chosen from; the same
# where the size is given and tokens/s alone are wanted.
_SPAN, _SECONDS, _SECONDS_OF_ONE = 0.04, 5.0, 1.0
# Two timings are the same within this share. Rounds at least.
_SAME, _ROUNDS = 0.02, 3
# So often is a size timed again that took too long, before larger ones are given up.
_TRIES = 3

# Threads that import parts of transformers at the same time find half of a module.
_IMPORTING = threading.Lock()

Alone = Callable[[str], AbstractContextManager[Any]]


@panics_as_errors()
def load_engine(
    settings: Settings,
    which: int,
    device: str,
    threads: int | None,
    row: Row,
    alone: Alone = lambda device: nullcontext(),
) -> tuple[Engine, Description]:
    """The engine of settings.models[which] on `device`, one of settings.engines. Raises what ftbert.load does,
    ValueError as `describe` and `check_weights`, RuntimeError where a package that reads the tokenizer panics.

    threads: of the CPU, None as torch has them. alone(device): a context in which no other engine is timed there;
    models are loaded at the same time.
    """
    with _IMPORTING:
        import torch
        from transformers import activations, modeling_outputs  # noqa: F401

        from ftbert.converters import open_checkpoint
        from ftbert.load_arguments import checked_source
        from ftbert.loaded_types import has_own_dtype
        from ftbert.model import load
        from ftbert.server.compute import Compute
        from ftbert.server.describe import describe
        from ftbert.server.generating import writing_of
        from ftbert.server.weight_memory import check_weights
        from ftbert.text import tokenizer_of

    if threads is not None:
        cores.share(threads)
    name, source = settings.models[which]
    LOG.info("%s is loaded on %s", name, device)
    began = time.monotonic()
    places = device.split(",") if settings.parallel is not None else device
    checkpoint = open_checkpoint(checked_source(source), revision=settings.revision)
    if settings.task is not None and (checkpoint.tasks or len(settings.models) == 1):
        checkpoint = checkpoint.at(settings.task)
    usual = None if has_own_dtype(checkpoint) or device.startswith("cpu") else "fp16"
    dtype = settings.dtype or usual
    if settings.model_memory_limit is not None:
        kind = torch.device(device.partition(",")[0])
        check_weights(checkpoint, kind, dtype, settings.model_memory_limit)
    model = load(checkpoint, places, dtype, parallel=settings.parallel)
    with _IMPORTING:
        about = describe(model, name, source, settings)
    TextEncoder(about)  # what each worker makes of it: raises here what it would raise there
    text = tokenizer_of(model, scores=bool(about.scores.labels)).settings
    compute = Compute(model, about.vectors.pooling, about.scores.score_ids, text)
    loaded = time.monotonic()
    if model.device.type == "cpu":
        LOG.info("%s has %s", name, cores.sentence())
    with alone(device):
        waited = time.monotonic()
        budget, rate = timed(compute, TASKS[about.task].kind, about, settings)
    LOG.info("%s is ready on %s: %d tokens at once, %.0f tokens/s (loaded in %.1f s, timed in %.1f s)", name, device,
             budget, rate, loaded - began, time.monotonic() - waited)  # fmt: skip
    written = writing_of(model, about, settings, row)
    writer, facts = written or (None, None)
    about = msgspec.structs.replace(about, batch_tokens=budget, rate=rate, generation=facts)
    limits = Limits(
        budget, settings.max_batch_requests or 1 << 30, settings.max_queue_seconds, settings.max_queue_tokens
    )
    return Engine(compute, limits, rate, row, writer), about


def timed(compute: Any, kind: Kind, about: Description, settings: Settings) -> tuple[int, float]:
    """Tokens of a batch, and tokens/s at that size."""
    batches: dict[int, Batch] = {}

    def run(size: int) -> None:
        if size not in batches:
            batches[size] = _batch(kind, size, about)
        compute.launch(batches[size])()

    return batch_size(run, settings.max_batch_tokens, settings.batch_tokens)


def _batch(kind: Kind, tokens: int, about: Description) -> Batch:
    length = min(128, about.text.max_length, tokens)
    offsets = np.append(np.arange(0, tokens, length), tokens).astype(np.int64)
    ids = np.random.default_rng(0).integers(0, about.model.vocab, tokens, dtype=np.int32)
    job = Job(0, kind, ids, offsets, float("inf"))
    return Batch(kind, [Span(job, 0, job.texts)], tokens, job.texts)


def batch_size(
    run: Callable[[int], None], most: int, given: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """(tokens, tokens/s at that size). run: computes a batch of so many tokens. given: the size, where it is chosen."""
    sizes = [min(given, most)] if given else [*(_SMALLEST << k for k in range(20) if _SMALLEST << k < most), most]
    until = clock() + (_SECONDS if len(sizes) > 1 else _SECONDS_OF_ONE)
    timings = _first(run, sizes, clock, until)
    while clock() < until and not all(map(_settled, timings.values())):
        for size, found in timings.items():
            found.append(_timed(run, size, clock, max(1, round(_SPAN / min(found)))))
    seconds = {size: min(found) for size, found in timings.items()}
    rates = {size: size / one for size, one in seconds.items() if one <= LONGEST or size == sizes[0]}
    size = next(size for size, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
    return size, rates[size]


def _first(
    run: Callable[[int], None], sizes: list[int], clock: Callable[[], float], until: float
) -> dict[int, list[float]]:
    """A timing of each size that comes into question, after a call that is slow. The last may take too long, which
    others find out."""
    timings: dict[int, list[float]] = {}
    for size in sizes:
        run(size)
        best = _timed(run, size, clock)
        for _ in range(_TRIES):
            if LONGEST < best < 4 * LONGEST:
                best = min(best, _timed(run, size, clock))
        if timings and best > 2 * LONGEST:
            break
        timings[size] = [best]
        if best > LONGEST or clock() > until:
            break
    return timings


def _settled(timings: list[float]) -> bool:
    first, second = sorted(timings)[:2] if len(timings) > _ROUNDS else (0.0, 1.0)
    return second <= (1 + _SAME) * first


def _timed(run: Callable[[int], None], size: int, clock: Callable[[], float], times: int = 1) -> float:
    """Seconds of a batch, of several in a row."""
    began = clock()
    for _ in range(times):
        run(size)
    return max((clock() - began) / times, 1e-9)
