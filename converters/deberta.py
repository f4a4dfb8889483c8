"""DeBERTa's tables: version 1, and versions 2 and 3, whose scores have products with a table of positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ftbert.checkpoint import shown
from ftbert.converters.family import KEYS, LAYER_NORMS, Config, Derived, Family, Keys, Names, entry, norm_keys
from ftbert.converters.head_rows import head_by_head

Description = dict[str, Any]

_LAYER = "encoder.layer.{i}."
_SELF = _LAYER + "attention.self."
_NAMES: Names = {
    "embeddings.word": "embeddings.word_embeddings.weight",
    "embeddings.position": "embeddings.position_embeddings.weight",
    "embeddings.token_type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
    "embeddings.projection": "embeddings.embed_proj",
    "embeddings.projection_norm": "embeddings.LayerNorm",
    "attention.positions": "encoder.rel_embeddings.weight",
    "attention.position_norm": "encoder.LayerNorm",
    "layers.{i}.attention.out": _LAYER + "attention.output.dense",
    "layers.{i}.attention.norm": _LAYER + "attention.output.LayerNorm",
    "layers.{i}.ffn.up": _LAYER + "intermediate.dense",
    "layers.{i}.ffn.down": _LAYER + "output.dense",
    "layers.{i}.ffn.norm": _LAYER + "output.LayerNorm",
}
_KEYS: Keys = KEYS | norm_keys("embedding_norm", *LAYER_NORMS, default=1e-7) | {"token_types": ("type_vocab_size", 0)}
_TYPES = ("c2p", "p2c")  # of the query's content with the key's position, and of its position with the key's content


def log_buckets(buckets: int, furthest: int) -> list[int]:
    """The bucket of each distance from 0 on, until the last one that a table of 2 * buckets rows has.

    As transformers' make_log_bucket_position: exact up to half the buckets, then logarithmic up to `furthest`. The
    float32 logarithms are theirs too, since they decide where a boundary falls.
    """
    middle = buckets // 2
    distances = torch.arange(middle, 2 * furthest + buckets)
    far = torch.log(distances / middle) / torch.log(torch.tensor((furthest - 1) / middle)) * (middle - 1)
    far = (torch.ceil(far) + middle).long().clamp(max=buckets)
    found = [*range(middle), middle, *far[1:].tolist()]
    last = found.index(buckets) if buckets in found else len(found) - 1
    return found[: last + 1]


def _position_types(config: Config) -> list[str]:
    said: Any = config.get("pos_att_type")
    types = [one.strip() for one in said.lower().split("|")] if isinstance(said, str) else said or []
    wrong = types if not isinstance(types, list) else next((one for one in types if one not in _TYPES), None)
    if wrong is not None or len(set(types)) < len(types):
        known = " and ".join(_TYPES)
        raise ValueError(f"pos_att_type {shown(wrong or said)} is not supported: {known}, each once at most")
    return types


def _positions(config: Config, description: Description, buckets: int, norm: bool) -> None:
    """The scores' scale, and what positions add to them. buckets: 0 where distances are in none."""
    attention, types = description["layer"]["attention"], _position_types(config)
    attention["scale"] = 1 / math.sqrt(attention["head_size"] * (1 + len(types)))
    description["positions"]["kind"] = "absolute" if entry(config, "position_biased_input", "bool", True) else "none"
    if not entry(config, "relative_attention", "bool", False):
        return
    if not types:
        raise ValueError(f"relative_attention is true, and pos_att_type {shown(config.get('pos_att_type'))} names none")
    furthest = entry(config, "max_relative_positions", "int", -1)
    if furthest < 1:
        furthest = entry(config, "max_position_embeddings", "int", 512)
    table: Description = {"span": buckets or furthest}
    if buckets:
        if buckets < 4 or furthest - 1 <= buckets // 2:
            raise ValueError(
                f"position_buckets {buckets} contradicts max_relative_positions {furthest}: expected at least 4, whose "
                "half is less than the furthest distance"
            )
        table["buckets"] = log_buckets(buckets, furthest)
    if norm:
        table["norm"] = {"eps": description["layer"]["attention_norm"]["eps"]}
    description["position_table"] = table
    attention["position_scores"] = {"keys": "c2p" in types, "queries": "p2c" in types}


def _widths(config: Config, description: Description) -> None:
    hidden = description["hidden"]
    if (size := entry(config, "pooler_hidden_size", "int", hidden)) != hidden:
        raise ValueError(f"pooler_hidden_size {size} is not supported: only hidden_size, {hidden}")
    description["embedding"] = entry(config, "embedding_size", "int", hidden)
    if description["embedding"] != hidden:  # the norm is over what the projection gives
        norm = description.pop("embedding_norm")
        description |= {"embedding_projection": True, "projection_bias": False, "projection_norm": norm}


def _version_2(config: Config, description: Description) -> None:
    _widths(config, description)
    attention = description["layer"]["attention"]
    if (size := entry(config, "attention_head_size", "int", attention["head_size"])) != attention["head_size"]:
        raise ValueError(f"attention_head_size {size} is not supported: only hidden_size / num_attention_heads")
    if (size := entry(config, "conv_kernel_size", "int", 0)) > 0:
        if (groups := entry(config, "conv_groups", "int", 1)) != 1:
            raise ValueError(f"conv_groups {groups} is not supported: only 1")
        activation = entry(config, "conv_act", "str", "tanh")
        norm = {"eps": description["layer"]["attention_norm"]["eps"]}
        description["convolution"] = {"kernel": size, "activation": activation, "norm": norm}
    said = config.get("norm_rel_ebd", "none")
    words = [one.strip() for one in said.lower().split("|")] if isinstance(said, str) else [said]
    if any(one not in ("none", "layer_norm") for one in words):
        raise ValueError(f"norm_rel_ebd {shown(said)} is not supported: none or layer_norm")
    _positions(config, description, max(0, entry(config, "position_buckets", "int", -1)), "layer_norm" in words)
    if "position_scores" in attention:
        attention["position_scores"]["shared"] = entry(config, "share_att_key", "bool", False)


def _version_1(config: Config, description: Description) -> None:
    _widths(config, description)
    if entry(config, "talking_head", "bool", False):
        raise ValueError("talking_head is not supported: a projection over heads stands around the softmax")
    _positions(config, description, 0, norm=False)
    if scores := description["layer"]["attention"].get("position_scores"):
        scores |= {"shared": False, "keys_bias": False}


# Version 1's fused projection; it has no bias of keys.
_BIASES = Derived(
    (_SELF + "q_bias", _SELF + "v_bias"),
    lambda encoder, config, ours: 2 * [[ours[0] // 3]],
    lambda encoder, sources: torch.cat([sources[0], torch.zeros_like(sources[0]), sources[1]]),
    lambda encoder, config, ours: [ours.chunk(3)[0], ours.chunk(3)[2]],
)

# [out, in, kernel] <-> ours, [out, kernel * in]
_CONVOLUTION = Derived(
    ("encoder.conv.conv.weight",),
    lambda encoder, config, ours: [[ours[0], encoder.hidden, ours[1] // encoder.hidden]],
    lambda encoder, sources: sources[0].transpose(1, 2).flatten(1).contiguous(),
    lambda encoder, config, ours: [ours.view(len(ours), -1, encoder.hidden).transpose(1, 2).contiguous()],
)

_V2 = Family(
    name="deberta-v2",
    base="deberta",
    names=_NAMES | {
        "layers.{i}.attention.qkv": tuple(_SELF + f"{name}_proj" for name in ("query", "key", "value")),
        "layers.{i}.attention.position_keys": _SELF + "pos_key_proj",
        "layers.{i}.attention.position_queries": _SELF + "pos_query_proj",
        "convolution.weight": _CONVOLUTION,
        "convolution.bias": "encoder.conv.conv.bias",
        "convolution_norm": "encoder.conv.LayerNorm",
    },
    keys=_KEYS,
    adjust=_version_2,
    # Published files of version 3 keep a table that nothing reads; transformers leaves it out as well.
    buffers=("position_ids", "embeddings.position_embeddings.weight"),
)  # fmt: skip
_V1 = replace(
    _V2,
    name="deberta",
    names=_NAMES | {
        "layers.{i}.attention.qkv.weight": head_by_head(_SELF + "in_proj.weight"),
        "layers.{i}.attention.qkv.bias": _BIASES,
        "layers.{i}.attention.position_keys": _SELF + "pos_proj",
        "layers.{i}.attention.position_queries": _SELF + "pos_q_proj",
    },
    adjust=_version_1,
    lacks=("multiple_choice",),
)  # fmt: skip
DEBERTA = (_V1, _V2)
