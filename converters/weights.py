"""The name tables: for each family, which of its tensors is which of ours, and how its config reads.

Our names are the list in csrc/weights.cpp; `{i}` is the layer. A tuple of names is stacked along the rows. Adding a
family is adding a table (CONTRIBUTING.md has the recipe).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ftbert.config import EncoderConfig

Names = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    prefixes: what may stand before every name ("" first). heads: prefixes of tensors that belong to task heads and
    are left out. buffers: endings of tensors that are no weights.
    """

    name: str
    config: Callable[[dict[str, Any]], EncoderConfig]
    names: Names
    prefixes: tuple[str, ...]
    heads: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ("position_ids", "token_type_ids")

    def source_names(self, ours: str) -> tuple[str, ...]:
        """Their names of one of our tensors, without prefix."""
        parts = ours.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        generic = ".".join(["layers", "{i}", *parts[2:]]) if layer else ours
        stem, _, kind = generic.rpartition(".")
        # A table row names a tensor, or the pair .weight and .bias of a Linear or LayerNorm at once.
        theirs = self.names.get(generic)
        if theirs is None:
            theirs = self.names[stem]
            theirs = tuple(f"{name}.{kind}" for name in ((theirs,) if isinstance(theirs, str) else theirs))
        names = (theirs,) if isinstance(theirs, str) else theirs
        return tuple(name.replace("{i}", layer) for name in names)


def need(config: dict[str, Any], keys: tuple[str, ...]) -> None:
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")


def _bert_config(config: dict[str, Any]) -> EncoderConfig:
    need(
        config,
        ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
         "max_position_embeddings"),
    )  # fmt: skip
    if config.get("position_embedding_type", "absolute") not in ("absolute", None):
        raise ValueError(f"position_embedding_type {config['position_embedding_type']!r} is not supported: only 'absolute'")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ValueError("this checkpoint is a decoder (is_decoder or add_cross_attention); ftbert runs encoders")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if heads <= 0 or hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return EncoderConfig(
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        head_size=hidden // heads,
        inter=int(config["intermediate_size"]),
        embedding=hidden,
        max_positions=int(config["max_position_embeddings"]),
        token_types=int(config.get("type_vocab_size", 2)),
        padding_id=int(config.get("pad_token_id") or 0),
        layer_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
    )


_LAYER = "encoder.layer.{i}."
_ATTENTION = _LAYER + "attention."
BERT = Family(
    name="bert",
    config=_bert_config,
    prefixes=("", "bert."),
    heads=("cls.", "classifier.", "qa_outputs.", "dropout."),
    names={
        "embeddings.word": "embeddings.word_embeddings.weight",
        "embeddings.position": "embeddings.position_embeddings.weight",
        "embeddings.token_type": "embeddings.token_type_embeddings.weight",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.{i}.attention.qkv": (
            _ATTENTION + "self.query", _ATTENTION + "self.key", _ATTENTION + "self.value",
        ),
        "layers.{i}.attention.out": _ATTENTION + "output.dense",
        "layers.{i}.attention.norm": _ATTENTION + "output.LayerNorm",
        "layers.{i}.ffn.up": _LAYER + "intermediate.dense",
        "layers.{i}.ffn.down": _LAYER + "output.dense",
        "layers.{i}.ffn.norm": _LAYER + "output.LayerNorm",
        "pooler": "pooler.dense",
    },
)  # fmt: skip

FAMILIES: dict[str, Family] = {family.name: family for family in (BERT,)}


def find_family(model_type: object) -> Family:
    """The table for transformers' `model_type`; ValueError lists the supported ones."""
    if model_type not in FAMILIES:
        raise ValueError(f"model type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[str(model_type)]


def to_huggingface(family: Family, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The table read backwards: our tensors as (their name without prefix, tensor)."""
    for ours, tensor in weights.items():
        names = family.source_names(ours)
        yield from zip(names, tensor.chunk(len(names)), strict=True)
