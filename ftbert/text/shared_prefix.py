"""Texts that begin alike, as pairs of one query in a template do: their common tokens are computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftbert.packed_model import PackedModel
from ftbert.text.batching import Batch


class Least(NamedTuple):
    """From where on sharing is faster: what it saves of a batch's tokens, in all and as a part of them."""

    tokens: int
    part: float


# By kind of device. "cuda" is an estimate, to be measured by benchmarks/bench_shared_prefix.py. It counts a kernel more
# in each layer, and in a batch of fewer tokens launches without a CUDA graph (about 1 ms; an H100 computes 500 tokens
# of a model of 0.6e9 weights meanwhile).
LEAST = {"cpu": Least(0, 0.2), "cuda": Least(1024, 0.1)}


def shared_tokens(batch: Batch) -> int:
    """With how many tokens all texts of the batch begin, each with one more at least."""
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    most = int(lengths.min()) - 1 if len(starts) > 1 else 0
    if most <= 0:
        return 0
    rows: NDArray[np.int64] = batch.ids[starts[:, None] + np.arange(most)]
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else most


def sharing(model: PackedModel, batch: Batch) -> tuple[Batch, int]:
    """What to compute of the batch, and how many tokens its first sequence then has that is no text of it: as `apart`
    where that is faster, else the batch and 0."""
    shared = shared_tokens(batch)
    return (apart(batch, shared), shared) if worth_sharing(model, batch, shared) else (batch, 0)


def worth_sharing(model: PackedModel, batch: Batch, shared: int) -> bool:
    """Whether the model computes such a batch, and faster."""
    saved, least = (len(batch.rows) - 1) * shared, LEAST[model.device.type]
    if saved <= 0 or saved < max(least.tokens, least.part * len(batch.ids)) or batch.types is not None:
        return False
    causal = all(one.attention.causal and one.attention.soft_cap is None for one in model.config.layers)
    return causal and dict(model.encoder.info())["attention"] == "fused"


def apart(batch: Batch, shared: int) -> Batch:
    """The first `shared` tokens of all as a text of its own, before what each goes on with. longest: with them."""
    texts = len(batch.rows)
    places = np.arange(len(batch.ids)) - np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
    kept = places >= shared
    kept[:shared] = True  # of the first text
    ends = batch.cu_seqlens - shared * (np.arange(texts + 1) - 1)
    cu_seqlens = np.concatenate([[0], ends]).astype(np.int32)
    return replace(batch, ids=batch.ids[kept], cu_seqlens=cu_seqlens)
