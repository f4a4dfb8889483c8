"""What each rank of several holds of a model: a share of every layer's heads and of its inner columns."""

from __future__ import annotations

from dataclasses import replace

import torch

from ftbert.checkpoint.eight_bits import fits_8_bits
from ftbert.checkpoint.model_config import LayerConfig, ModelConfig, ShardConfig

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
