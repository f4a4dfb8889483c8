"""Loads a model for an engine and times it: how many tokens at once are worth it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import numpy as np

from ftbert.server.batch_size import batch_size
from ftbert.server.batcher import Batch, Limits, Run
from ftbert.server.description import Description
from ftbert.server.engine import Engine
from ftbert.server.metrics import Row
from ftbert.server.settings import Settings
from ftbert.server.work import Kind, Work

LOG = logging.getLogger("ftbert.serve")

# Threads that import parts of transformers at the same time find half of a module.
_IMPORTING = threading.Lock()

Alone = Callable[[str], AbstractContextManager[Any]]


def load_engine(
    settings: Settings,
    which: int,
    device: str,
    threads: int | None,
    row: Row,
    alone: Alone = lambda device: nullcontext(),
) -> tuple[Engine, Description]:
    """The engine of settings.models[which] on `device`. Raises what ftbert.load does, ValueError as `describe`.

    threads: of the CPU, None as torch has them. alone(device): a context in which no other engine is timed there;
    models are loaded at the same time.
    """
    with _IMPORTING:
        import torch
        from transformers import AutoConfig, AutoTokenizer, modeling_outputs  # noqa: F401 - what load comes to

        from ftbert.model import load
        from ftbert.server.compute import Compute
        from ftbert.server.describe import describe

    if threads is not None:
        torch.set_num_threads(threads)
    name, source = settings.models[which]
    LOG.info("%s is loaded on %s", name, device)
    began = time.monotonic()
    model = load(source, device, settings.dtype, revision=settings.revision)
    with _IMPORTING:
        about = describe(model, name, source, settings)
    compute = Compute(model, about.pooling)
    kind = {"embedding": Kind.EMBED, "token_classifier": Kind.TOKEN_LOGITS}.get(about.task, Kind.LOGITS)
    loaded = time.monotonic()
    with alone(device):
        waited = time.monotonic()
        budget, rate = timed(compute, kind, about, settings)
    LOG.info("%s is ready on %s: %d tokens at once, %.0f tokens/s (loaded in %.1f s, timed in %.1f s)", name, device,
             budget, rate, loaded - began, time.monotonic() - waited)  # fmt: skip
    about = msgspec.structs.replace(about, batch_tokens=budget, rate=rate)
    limits = Limits(
        budget, settings.max_batch_requests or 1 << 30, settings.max_queue_seconds, settings.max_queue_tokens
    )
    return Engine(compute, limits, rate, row), about


def timed(compute: Any, kind: Kind, about: Description, settings: Settings) -> tuple[int, float]:
    """Tokens of a batch, and tokens/s at that size."""
    batches: dict[int, Batch] = {}

    def run(size: int) -> None:
        if size not in batches:
            batches[size] = _batch(kind, size, about)
        compute.launch(batches[size])()

    return batch_size(run, settings.max_batch_tokens, settings.batch_tokens)


def _batch(kind: Kind, tokens: int, about: Description) -> Batch:
    length = min(128, about.max_length, tokens)
    offsets = np.append(np.arange(0, tokens, length), tokens).astype(np.int64)
    ids = np.random.default_rng(0).integers(0, about.vocab, tokens, dtype=np.int32)
    work = Work(0, kind, ids, offsets, float("inf"))
    return Batch(kind, [Run(work, 0, work.texts)], tokens, work.texts)
