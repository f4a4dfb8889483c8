"""A checkpoint's weights on a device: its encoder and its heads, read once, one tensor at a time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ftbert.checkpoint import Checkpoint, CheckpointConfig, HeadConfig
from ftbert.devices import check_range, stream_dtype
from ftbert.dtypes import INT8, STORED_DTYPES
from ftbert.forked import note_fork
from ftbert.heads import Head
from ftbert.loaded_types import types_of
from ftbert.quantization import in_8_bits, live_in_8_bits
from ftbert.tuning import gemm_table


class Built(NamedTuple):
    """What `ftbert.Model` is made of. encoder: a torch.classes.ftbert.Encoder. stored: how its weights are stored."""

    encoder: Any
    checkpoint: Checkpoint
    heads: list[Head]
    stored: CheckpointConfig


def build(
    checkpoint: Checkpoint,
    place: torch.device,
    asked: torch.dtype | None,
    attention: str,
    heads: bool,
    live: torch.nn.Module | None = None,
) -> Built:
    """asked: None for "auto". live: the module that `checkpoint` was opened from. Raises what `ftbert.load` does."""
    element, quantizes_to = types_of(checkpoint, place, asked)
    check_range(checkpoint.config.encoder.embedding_scale, element, stacklevel=4)
    if quantizes_to is None:
        opened: Any = nullcontext(checkpoint)
    elif quantizes_to == INT8 and checkpoint.in_int8 is not None:
        opened = nullcontext(checkpoint.in_int8())
    elif live is None:
        opened = in_8_bits(checkpoint, quantizes_to, place)
    else:
        opened = live_in_8_bits(checkpoint, quantizes_to, place, live)
    with opened as stored:
        return _build(checkpoint, stored, place, element, attention, heads)


def _build(
    checkpoint: Checkpoint,
    stored: Checkpoint,
    place: torch.device,
    element: torch.dtype,
    attention: str,
    heads: bool,
) -> Built:
    """stored: what the encoder's weights are read from, `checkpoint` or the same model with 8-bit matrices. element: of
    the matrices that are not."""
    note_fork()
    config, stream = stored.config.encoder, stream_dtype(place, element)
    # One tensor at a time: repacked or moved before the next is read, so that memory peaks at the model's own size.
    weights = {}
    specs = config.weight_specs()
    in_blocks = {spec.name for spec in specs if spec.matrix and spec.stored == "q8_0"}
    for spec in specs:
        if spec.name.removesuffix(".scale") in in_blocks:
            if spec.matrix:
                parts = [stored.read(spec.name, torch.int8), stored.read(f"{spec.name}.scale", torch.float16)]
                weights[spec.name] = torch.ops.ftbert.pack_q8_0(*(part.to(place) for part in parts))
            continue
        kept = STORED_DTYPES.get(spec.stored)
        tensor = stored.read(spec.name, kept or (element if spec.matrix else stream))
        packable = place.type == "cpu" and spec.matrix and kept in (None, torch.int8)
        weights[spec.name] = torch.ops.ftbert.pack_weight(tensor) if packable else tensor.to(place)
    gemm_table.install(place)
    encoder = torch.classes.ftbert.Encoder(weights, config.text(), attention)
    return Built(encoder, checkpoint, _load_heads(checkpoint, place, stream) if heads else [], stored.config)


def _load_heads(checkpoint: Checkpoint, place: torch.device, element: torch.dtype) -> list[Head]:
    heads = [config for config in checkpoint.config.heads if not config.on_demand]
    return [load_head(checkpoint, config, place, element) for config in heads]


def load_head(checkpoint: Checkpoint, config: HeadConfig, place: torch.device, element: torch.dtype) -> Head:
    hidden = checkpoint.config.encoder.hidden
    whole, stored = replace(config, dense_bias=True, norm_bias=True, out_bias=True), config.shapes(hidden)
    weights = {}
    for name, shape in whole.shapes(hidden).items():
        there = name in stored
        tensor = checkpoint.read(f"heads.{config.task}.{name}", element) if there else torch.zeros(shape, dtype=element)
        weights[name] = tensor.to(place)
    return Head(config, weights)
