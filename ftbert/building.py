"""A checkpoint's weights on a device: its encoder and its heads, read once, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ftbert.checkpoint import (
    WORD_TABLE,
    Checkpoint,
    CheckpointConfig,
    ModelConfig,
    cut,
    digest_of,
    shard_of,
    stages_of,
)
from ftbert.devices import check_range, stream_dtype
from ftbert.dtypes import INT8, Dtype
from ftbert.forked import note_fork
from ftbert.formats import formats, numbers_of
from ftbert.heads import Head, load_head
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
    that they are processes of; "": all are here, one on each device. stages: each has layers, not a share of all.
    comparisons: the name of the group through which processes compare their calls, "" where they do not; contents: of
    tensors on a GPU too. model: which one it is, for people."""

    first: int = 0
    size: int = 1
    group: str = ""
    stages: bool = False
    comparisons: str = ""
    contents: bool = False
    model: str = ""


ALONE = Ranks()


def build(
    checkpoint: Checkpoint,
    places: Sequence[torch.device],
    asked: Dtype | None,
    attention: str,
    heads: bool,
    live: torch.nn.Module | None = None,
    ranks: Ranks = ALONE,
    verify: bool = True,
    digests: dict[str, str] | None = None,
) -> Built:
    """places: of each rank that is here; heads are on the first, where ids come and results go. asked: None for "auto".
    live: the module that `checkpoint` was opened from. verify: of 8-bit weights in the user's cache too. digests:
    gets that of each of the encoder's tensors, by name, where all ranks read all. Raises what `ftbert.load` does."""
    place = places[0]
    element, quantizes_to = types_of(checkpoint, place, asked)
    check_range(checkpoint.config.encoder.outgrows_fp16, element)
    if quantizes_to is None:
        opened: Any = nullcontext(checkpoint)
    elif quantizes_to == INT8 and checkpoint.in_int8 is not None:
        opened = nullcontext(checkpoint.in_int8())
    elif live is None:
        opened = in_8_bits(checkpoint, quantizes_to, place, verify)
    else:
        opened = live_in_8_bits(checkpoint, quantizes_to, place, live)
    with opened as stored:
        note_fork()
        encoder = _encoder(stored, places, element, attention, ranks, None if ranks.stages else digests)
        wanted = [config for config in checkpoint.config.heads if heads and not config.on_demand]
        loaded = [load_head(checkpoint, config, place, stream_dtype(place, element)) for config in wanted]
        return Built(encoder, checkpoint, loaded, stored.config)


class _Part(NamedTuple):
    """What one device holds. shapes: of its tensors."""

    place: torch.device
    config: ModelConfig
    shapes: dict[str, list[int]]
    weights: dict[str, torch.Tensor]


def _encoder(
    stored: Checkpoint,
    places: Sequence[torch.device],
    element: torch.dtype,
    attention: str,
    ranks: Ranks,
    digests: dict[str, str] | None,
) -> Any:
    """stored: what its weights are read from, the user's checkpoint or the same model with 8-bit matrices. element: of
    the matrices that are not."""
    whole = stored.config.encoder
    configs = _configs(whole, ranks)
    parts = [
        _Part(place, config, config.weight_shapes(), {})
        for place, config in zip(places, configs[ranks.first :], strict=False)
    ]

    def shares(name: str, dtype: torch.dtype) -> list[tuple[_Part, torch.Tensor]]:
        tensor = stored.read(name, dtype)
        if digests is not None:
            digests[name] = digest_of(tensor)
        return [
            (part, tensor if part.config.shard is None else cut(name, tensor, whole, part.shapes, part.config))
            for part in parts
            if name in part.shapes
        ]

    # One tensor at a time: cut, and repacked or moved before the next is read, so that memory peaks at its size.
    here = {name for part in parts for name in part.shapes}
    specs = [spec for spec in whole.weight_specs() if spec.name in here]
    in_blocks = {spec.name for spec in specs if spec.matrix and spec.stored and formats()[spec.stored].block > 0}
    for spec in specs:
        if spec.name.removesuffix(".scale") in in_blocks:
            if spec.matrix:
                stored_as = formats()[spec.stored]
                scales = shares(f"{spec.name}.scale", stored_as.scales)
                for (part, values), (_, scale) in zip(shares(spec.name, stored_as.numbers), scales, strict=True):
                    pair = (values.to(part.place), scale.to(part.place))
                    part.weights[spec.name] = torch.ops.ftbert.pack_q8_0(*pair)
            continue
        kept = numbers_of(spec.stored)
        stream = stream_dtype(places[0], element)
        for part, tensor in shares(spec.name, kept or (element if spec.matrix else stream)):
            moved = tensor.to(part.place)
            packable = spec.matrix and (kept == torch.int8 or (kept is None and part.place.type == "cpu"))
            part.weights[spec.name] = torch.ops.ftbert.pack_weight(moved) if packable else moved
    made = []
    for part in parts:
        gemm_table.install(part.place)
        made.append(torch.classes.ftbert.Encoder(part.weights, part.config.text(), attention))
    if ranks.stages:
        shared = {WORD_TABLE: _word_table(stored, parts[0], stream_dtype(places[0], element))}
        firsts = [config.stage.first_layer for config in configs if config.stage is not None]
        return torch.classes.ftbert.Encoder.pipeline_parallel(made, whole.text(), firsts, shared, *_processes(ranks))
    if ranks.group:
        made[0].join(*_processes(ranks))
    return made[0] if len(made) == 1 else torch.classes.ftbert.Encoder.tensor_parallel(made)


def _processes(ranks: Ranks) -> tuple[str, str, bool, str]:
    return ranks.group, ranks.comparisons, ranks.contents, ranks.model


def _configs(whole: ModelConfig, ranks: Ranks) -> list[ModelConfig]:
    """Of all ranks, also where they are other processes."""
    if ranks.stages:
        return stages_of(whole, ranks.size)
    return [shard_of(whole, rank, ranks.size) for rank in range(ranks.size)] if ranks.size > 1 else [whole]


def _word_table(stored: Checkpoint, first: _Part, dtype: torch.dtype) -> torch.Tensor:
    """What tied heads read, on the first device here, also where another process has the embeddings."""
    if WORD_TABLE in first.weights:
        return first.weights[WORD_TABLE]
    tied = any(head.tied for head in stored.config.heads)
    return (stored.read(WORD_TABLE, dtype) if tied else torch.empty(0, dtype=dtype)).to(first.place)
