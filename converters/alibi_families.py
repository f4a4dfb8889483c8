"""BERT with ALiBi: no table of positions, -slope * |i - j| added to each head's scores, gated feed-forward layers.

Classes with code of their own under the type "bert" (ftbert/own_classes.py); transformers has none of the type.
"""

from __future__ import annotations

from typing import Any

import torch

from ftbert.checkpoint import ModelConfig, shown
from ftbert.converters.family import KEYS, Config, Derived, Family, Names
from ftbert.converters.gated_rows import two_halves

_LAYER = "encoder.layer.{i}."
_ATTENTION = _LAYER + "attention."
_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}


def alibi_slopes(heads: int) -> list[float]:
    """Of each head, as the paper's code has them: a geometric row for a power of two; for another count that of the
    power below, and every second slope of the power above."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes if power == heads else slopes + alibi_slopes(2 * power)[0::2][: heads - power]


def _biases(encoder: ModelConfig, sources: list[torch.Tensor]) -> torch.Tensor:
    """float32 [heads, 2*span-1]"""
    assert encoder.relative_bias is not None
    span, heads = encoder.relative_bias.span, encoder.relative_bias.heads
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
    return -torch.outer(slopes, torch.arange(1 - span, span).abs().double()).float()


# A row for each head, of as many distances as there are: of no tensor of theirs.
_TABLE = Derived((), lambda encoder, config, ours: [], _biases, lambda encoder, config, ours: [])


def _alibi(config: Config, description: dict[str, Any]) -> None:
    if (said := config.get("position_embedding_type")) != "alibi":
        raise ValueError(f"position_embedding_type {shown(said)} is not supported: only 'alibi'")
    said = config.get("feed_forward_type")
    if not isinstance(said, str) or said not in _ACTIVATIONS:
        raise ValueError(f"feed_forward_type {shown(said)} is not supported: {' or '.join(_ACTIVATIONS)}")
    description["layer"]["ffn"]["activation"] = _ACTIVATIONS[said]
    attention, rows = description["layer"]["attention"], description["positions"]["rows"]
    if attention["heads"] < 1 or rows < 1:
        raise ValueError(f"max_position_embeddings {rows}: expected at least 1")
    attention["relative_bias"] = True
    description["relative_bias"] = {"span": rows, "heads": attention["heads"]}


_NAMES: Names = {
    "embeddings.word": "embeddings.word_embeddings.weight",
    "embeddings.token_type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
    "attention.relative_bias": _TABLE,
    "layers.{i}.attention.qkv": tuple(_ATTENTION + f"self.{name}" for name in ("query", "key", "value")),
    "layers.{i}.attention.out": _ATTENTION + "output.dense",
    "layers.{i}.attention.norm": _ATTENTION + "output.LayerNorm",
    "layers.{i}.ffn.up": two_halves(_LAYER + "mlp.gated_layers", gate_first=True),
    "layers.{i}.ffn.down": _LAYER + "mlp.wo",
    "layers.{i}.ffn.norm": _LAYER + "mlp.layernorm",
    "pooler": "pooler.dense",
}
ALIBI = Family(
    name="alibi_bert",
    base="bert",
    names=_NAMES,
    keys={path: key for path, key in KEYS.items() if path != "layer.ffn.activation"},
    fixed={"positions.kind": "none", "layer.ffn.gated": True, "layer.ffn.up_bias": False},
    adjust=_alibi,
    buffers=("position_ids", "token_type_ids", "encoder.alibi"),
    spellings=(_NAMES | {"layers.{i}.attention.qkv": _ATTENTION + "self.Wqkv"},),  # MosaicBERT's
    positions=("alibi",),
)
