"""Texts that begin alike, as pairs of one query in a template do: their common tokens are computed once, into a cache
of keys and values, and each text goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftbert.checkpoint import CAUSAL_LM
from ftbert.text.batching import Batch
from ftbert.text.pooling import Upload

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Least part of a batch's tokens that is saved: copies of the prefix in the cache take time, too.
_LEAST_SAVED = 0.25
# Of a cache. Texts go through it in groups; a layer's products need no more rows than this holds of any model.
_CACHE_BYTES = 1 << 28


def shared_tokens(batch: Batch) -> int:
    """With how many tokens all texts of the batch begin, each with one more at least."""
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    most = int(lengths.min()) - 1 if len(starts) > 1 else 0
    if most <= 0:
        return 0
    rows: NDArray[np.int64] = batch.ids[starts[:, None] + np.arange(most)]
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else most


def worth_sharing(model: Any, batch: Batch, shared: int) -> bool:
    """Whether the model's attention reads a cache, and enough is saved. On the CPU alone: on a GPU, where other tokens
    cost less than the calls that copy a prefix, nobody has measured it."""
    if (len(batch.rows) - 1) * shared < _LEAST_SAVED * len(batch.ids) or model.device.type != "cpu":
        return False
    causal = all(one.attention.causal and one.attention.soft_cap == 0 for one in model.config.layers)
    speaks = any(head.task == CAUSAL_LM for head in model.checkpoint.config.heads)
    return causal and speaks and dict(model.encoder.info())["attention"] == "fused"


def logits_behind(model: Any, batch: Batch, upload: Upload, shared: int, ids: Sequence[int]) -> Tensor:
    """[texts, ids]: of the token behind each text's last the logits of `ids`. shared: of `shared_tokens`."""
    head = model.head(CAUSAL_LM)
    weight = model.encoder.weight("embeddings.word") if head.tied else head.out_weight
    rows, bias = weight[list(ids)], head.out_bias[list(ids)]
    bytes_a_token = sum(2 * one.attention.kv_width for one in model.config.layers) * rows.element_size()
    texts = len(batch.rows)
    slots = 1 + min(texts, max(1, _CACHE_BYTES // (bytes_a_token * batch.longest) - 1))
    decoder = torch.classes.ftbert.Decoder(model.encoder, rows, bias, slots, batch.longest)
    decoder.forward(upload(batch.ids[:shared]), _offsets([shared]), _int32([0]), False)
    found = []
    for first in range(0, texts, slots - 1):
        some = range(first, min(first + slots - 1, texts))
        own = [batch.ids[batch.cu_seqlens[i] + shared : batch.cu_seqlens[i + 1]] for i in some]
        places = list(range(1, len(some) + 1))
        decoder.copy_prefix(0, places, shared)
        offsets = _offsets([len(row) for row in own])
        found.append(decoder.forward(upload(np.concatenate(own)), offsets, _int32(places), False))
    return torch.cat(found)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
