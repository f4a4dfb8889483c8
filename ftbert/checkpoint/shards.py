"""What each rank of several holds of a model: a share of every layer's heads and of its inner columns, or, as a stage,
some of the layers in a row."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from ftbert.checkpoint.eight_bits import fits_8_bits
from ftbert.checkpoint.model_config import LayerConfig, ModelConfig, ShardConfig, StageConfig
from ftbert.formats import formats

_QKV = ".attention.qkv."


def shard_of(whole: ModelConfig, rank: int, size: int) -> ModelConfig:
    """The config of rank `rank` of `size`, whose heads, key and value heads and `inter` are its own. Where there are
    fewer key and value heads than ranks, some share one. ValueError for heads or columns that do not divide."""
    layers = tuple(_layer(layer, size) for layer in whole.layers)
    bias = whole.relative_bias
    if bias is not None:
        bias = replace(bias, heads=_share("heads of the relative bias", bias.heads, size))
    shard = replace(whole, layers=layers, relative_bias=bias, shard=ShardConfig(rank, size))
    for spec in shard.weight_specs():
        if spec.matrix and spec.stored and (why := fits_8_bits(spec.stored, spec.shape)):
            raise ValueError(f"{spec.name} in {spec.stored}, shared by {size} ranks: {why}")
    return shard


def _layer(layer: LayerConfig, size: int) -> LayerConfig:
    attention = layer.attention
    shared = attention.kv_heads < size and size % attention.kv_heads == 0
    attention = replace(
        attention,
        heads=_share("heads", attention.heads, size),
        kv_heads=1 if shared else _share("key and value heads", attention.kv_heads, size),
    )
    inter = _share("inner columns (inter)", layer.ffn.inter, size)
    return replace(layer, attention=attention, ffn=replace(layer.ffn, inter=inter))


def _share(what: str, count: int, size: int) -> int:
    if count % size:
        raise ValueError(f'parallel="tensor": {count} {what} do not divide among {size} ranks')
    return count // size


def cut(
    name: str, tensor: torch.Tensor, whole: ModelConfig, shapes: dict[str, list[int]], shard: ModelConfig
) -> torch.Tensor:
    """The rank's part of a tensor of the whole model. shapes: of the shard's tensors, by name."""
    rank, size = shard.shard.rank, shard.shard.size  # type: ignore[union-attr]
    shape = shapes[name]
    if _QKV in name and list(tensor.shape) != shape:
        return torch.cat(_heads(name, tensor, whole, shard, rank, size))
    for dim, length in enumerate(shape):
        if tensor.shape[dim] != length:
            tensor = tensor.narrow(dim, rank * length, length)
    return tensor.contiguous()


def _heads(
    name: str, tensor: torch.Tensor, whole: ModelConfig, shard: ModelConfig, rank: int, size: int
) -> list[torch.Tensor]:
    """Rows of queries, keys and values of its heads."""
    parts = tensor.split(whole.stacked_rows(name))
    own = shard.stacked_rows(name)
    taken = []
    for part, rows in zip(parts, own, strict=True):
        shares = part.shape[0] // rows  # of keys and values fewer than ranks where several share a head
        taken.append(part.narrow(0, rank * shares // size * rows, rows))
    return taken


def stages_of(whole: ModelConfig, count: int) -> list[ModelConfig]:
    """The configs of so many stages, whose layers have about equally many bytes of weights. The first has the
    embeddings, the last the final norm and the pooler. A stage's weight_specs are some of the model's, by the same
    names; layers of several stages may share some. ValueError for more stages than layers."""
    if count > whole.depth:
        raise ValueError(f'parallel="pipeline": {count} stages for {whole.depth} layers; each needs at least one')
    ends = _ends(_bytes_of_layers(whole), count)
    return [_stage(whole, i, count, *bounds) for i, bounds in enumerate(itertools.pairwise([0, *ends]))]


def _stage(whole: ModelConfig, index: int, count: int, begin: int, end: int) -> ModelConfig:
    layers = whole.layers[begin:end]
    stage = replace(whole, layers=layers, stage=StageConfig(index, count, begin, whole.depth))
    if not any(layer.attention.relative_bias for layer in layers):
        stage = replace(stage, relative_bias=None)
    if not any(layer.attention.position_scores for layer in layers):
        stage = replace(stage, position_table=None)
    if index > 0:
        stage = replace(stage, embedding=whole.hidden, embedding_norm=None, embedding_projection=False)
        stage = replace(stage, projection_norm=None, convolution=None)
    if index + 1 < count:
        stage = replace(stage, final_norm=None, pooler=False)
    return stage


def _bytes_of_layers(whole: ModelConfig) -> list[int]:
    """Of each layer's own or shared weights, which each call reads. What has no type of its own counts as 16 bits."""
    by_set: dict[int, int] = {}
    for spec in whole.weight_specs():
        block, index, *_ = spec.name.split(".")
        if block == "layers":
            matrix = formats()[spec.stored or "fp16"]
            by_set[int(index)] = by_set.get(int(index), 0) + matrix.bits * math.prod(spec.shape) // 8
    return [by_set[layer.weights_of] for layer in whole.layers]


def _ends(sizes: list[int], count: int) -> list[int]:
    """Where each part ends of so many, whose sums are near to equal and none of which is empty."""
    sums = list(itertools.accumulate(sizes))
    ends = [0]
    for part in range(1, count):
        wanted = sums[-1] * part / count
        least, most = ends[-1] + 1, len(sizes) - (count - part)
        ends.append(min(range(least, most + 1), key=lambda end: abs(sums[end - 1] - wanted)))
    return [*ends[1:], len(sizes)]
