"""A checkpoint's weights on a device: its encoder and its heads, read once, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ftbert.checkpoint import Checkpoint, CheckpointConfig, HeadConfig, cut, shard_of
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


class Ranks(NamedTuple):
    """Who shares a model: the first of these ranks is first, and there are `size`. group: the name of the process group
    that they are processes of; "": all are here, one on each device."""

    first: int = 0
    size: int = 1
    group: str = ""


ALONE = Ranks()


def build(
    checkpoint: Checkpoint,
    places: Sequence[torch.device],
    asked: torch.dtype | None,
    attention: str,
    heads: bool,
    live: torch.nn.Module | None = None,
    ranks: Ranks = ALONE,
) -> Built:
    """places: of each rank that is here; heads are the first one's. asked: None for "auto". live: the module that
    `checkpoint` was opened from. Raises what `ftbert.load` does."""
    place = places[0]
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
        note_fork()
        encoder = _encoder(stored, places, element, attention, ranks)
        loaded = _load_heads(checkpoint, place, stream_dtype(place, element)) if heads else []
        return Built(encoder, checkpoint, loaded, stored.config)


def _encoder(
    stored: Checkpoint, places: Sequence[torch.device], element: torch.dtype, attention: str, ranks: Ranks
) -> Any:
    """stored: what its weights are read from, the user's checkpoint or the same model with 8-bit matrices. element: of
    the matrices that are not."""
    whole = stored.config.encoder
    configs = [whole]
    if ranks.size > 1:
        configs = [shard_of(whole, ranks.first + i, ranks.size) for i in range(len(places))]
    shapes = [config.weight_shapes() for config in configs]

    def shares(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        tensor = stored.read(name, dtype)
        if ranks.size == 1:
            return [tensor]
        return [cut(name, tensor, whole, *one) for one in zip(shapes, configs, strict=True)]

    # One tensor at a time: cut, and repacked or moved before the next is read, so that memory peaks at its size.
    weights: list[dict[str, torch.Tensor]] = [{} for _ in places]
    specs = whole.weight_specs()
    in_blocks = {spec.name for spec in specs if spec.matrix and spec.stored == "q8_0"}
    for spec in specs:
        if spec.name.removesuffix(".scale") in in_blocks:
            if spec.matrix:
                scales = shares(f"{spec.name}.scale", torch.float16)
                for place, mine, *parts in zip(places, weights, shares(spec.name, torch.int8), scales, strict=True):
                    mine[spec.name] = torch.ops.ftbert.pack_q8_0(*(part.to(place) for part in parts))
            continue
        kept = STORED_DTYPES.get(spec.stored)
        stream = stream_dtype(places[0], element)
        for place, mine, part in zip(
            places, weights, shares(spec.name, kept or (element if spec.matrix else stream)), strict=True
        ):
            packable = place.type == "cpu" and spec.matrix and kept in (None, torch.int8)
            mine[spec.name] = torch.ops.ftbert.pack_weight(part) if packable else part.to(place)
    made = []
    for place, mine, config in zip(places, weights, configs, strict=True):
        gemm_table.install(place)
        made.append(torch.classes.ftbert.Encoder(mine, config.text(), attention))
    if ranks.group:
        made[0].join(ranks.group)
    return made[0] if len(made) == 1 else torch.classes.ftbert.Encoder.tensor_parallel(made)


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
