"""The model as torch.classes.ftbert.Decoder."""

from __future__ import annotations

from typing import Any

import torch

from ftbert.checkpoint import CAUSAL_LM, WORD_TABLE, fits_8_bits
from ftbert.dtypes import DTYPES
from ftbert.packed_model import PackedModel, kept
from ftbert.quantization import read_q8_0


def decoder_of(model: PackedModel, slots: int, positions: int) -> Any:
    """A decoder with an empty cache of its own, of `slots` texts of up to `positions` tokens. The head's weight is read
    once a model, laid out anew on the CPU and in q8_0, in which the head of a model in q8_0 is. ValueError for a model
    without a head for the next token."""
    return kept(model, "decoder", lambda: _least(model)).with_cache(slots, positions)


def cache_bytes(model: PackedModel, slots: int, positions: int) -> int:
    """Of the cache of such a decoder, on all its devices together."""
    a_token = sum(2 * one.attention.kv_width for one in model.config.layers) * DTYPES[model.encoder.dtype()].itemsize
    return slots * positions * a_token


def _least(model: PackedModel) -> Any:
    """With the least of caches."""
    tasks = [head.task for head in model.checkpoint.config.heads]
    if CAUSAL_LM not in tasks:
        raise ValueError(
            "this model generates no text: it has no head for the next token, as a decoder's ...ForCausalLM has; "
            f"its heads: {', '.join(tasks) or 'none'}"
        )
    head = model.head(CAUSAL_LM)
    if head.has_dense or head.norm_eps > 0:
        raise ValueError(
            "this model generates no text: its head has a layer before the one over the vocabulary, which generation "
            "does not compute; transformers' generate does"
        )
    bias = head.out_bias if bool(head.out_bias.any()) else None
    table = WORD_TABLE if head.tied else f"heads.{CAUSAL_LM}.out.weight"
    if model.config.eight_bits == "q8_0" and not fits_8_bits("q8_0", [model.config.vocab, model.config.hidden]):
        weight, scale = (part.to(model.device) for part in read_q8_0(model.checkpoint, table))
    else:
        weight, scale = model.encoder.weight(WORD_TABLE) if head.tied else head.out_weight, None
    return torch.classes.ftbert.Decoder(model.encoder, weight, bias, 1, 1, scale)
