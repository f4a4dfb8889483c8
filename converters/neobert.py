"""NeoBERT's table, after its published code: RMSNorm before each block, rotary positions, gated layers, no biases."""

from __future__ import annotations

from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.family import LAYER_NORMS, Config, Family, entry, norm_keys
from ftbert.converters.gated_rows import two_halves
from ftbert.converters.head_rows import head_by_head
from ftbert.converters.layer_types import rms

_NORMS = (*LAYER_NORMS, "final_norm")
_LAYER = "transformer_encoder.{i}."
# Of models that the same authors' training code makes under the same names.
_ONLY = (("hidden_act", "swiglu"), ("rope", True), ("rms_norm", True), ("ngpt", False))


def _neobert(config: Config, description: dict[str, Any]) -> None:
    for key, only in _ONLY:
        said = config.get(key)
        if (said.lower() if isinstance(said, str) else said) not in (None, only):
            raise ValueError(f"{key} {shown(said)} is not supported: only {shown(only)}")
    attention, ffn = description["layer"]["attention"], description["layer"]["ffn"]
    size = attention["head_size"]
    if entry(config, "dim_head", "int", size) != size:
        raise ValueError(f"dim_head {config['dim_head']} is not hidden_size / num_attention_heads, {size}")
    # Two thirds of what the config says, in whole eights: then three matrices have the weights of two.
    ffn["inter"] = -(-int(2 * ffn["inter"] / 3) // 8) * 8
    attention["rotary"] = {"theta": 10_000.0, "interleaved": True}


NEOBERT = Family(
    name="neobert",
    base="model",
    encoder="",
    names={
        "embeddings.word": "encoder.weight",
        "layers.{i}.attention.qkv.weight": head_by_head(_LAYER + "qkv.weight"),
        "layers.{i}.attention.out": _LAYER + "wo",
        "layers.{i}.attention.norm": _LAYER + "attention_norm",
        "layers.{i}.ffn.up": two_halves(_LAYER + "ffn.w12", gate_first=True),
        "layers.{i}.ffn.down": _LAYER + "ffn.w3",
        "layers.{i}.ffn.norm": _LAYER + "ffn_norm",
        "final_norm": "layer_norm",
    },
    keys={
        "vocab": ("vocab_size", 30522), "hidden": ("hidden_size", 768), "layers": ("num_hidden_layers", 28),
        "layer.attention.heads": ("num_attention_heads", 12), "layer.ffn.inter": ("intermediate_size", 3072),
        "positions.rows": ("max_length", 1024), **norm_keys(*_NORMS, key="norm_eps", default=1e-6),
    },
    fixed={
        "positions.kind": "none", "padding_id": 0, "token_types": 0, "layer.norm_place": "pre", **rms(*_NORMS),
        **{f"layer.attention.{part}_bias": False for part in ("qkv", "out")},
        **{f"layer.ffn.{part}_bias": False for part in ("up", "down")},
        "layer.ffn.gated": True, "layer.ffn.activation": "silu",
    },
    adjust=_neobert,
    buffers=("freqs_cis",),
    lacks=("token_classification", "question_answering", "multiple_choice"),
)  # fmt: skip
