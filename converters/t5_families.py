"""The tables of T5's encoders: scores without a scale, a bias by distance, RMSNorm before each block and no other bias.

A checkpoint with the decoder too is read as its encoder.
"""

from __future__ import annotations

from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.family import LAYER_NORMS, Config, Family, Keys, Names, entry, norm_keys
from ftbert.converters.gated_rows import two_matrices
from ftbert.converters.layer_types import rms
from ftbert.converters.relative_bias import add_bias, bias_table

_NORMS = (*LAYER_NORMS, "final_norm")
_LONGEST = 1 << 17  # nothing depends on it: there is no table of positions
_KEYS: Keys = {
    "vocab": ("vocab_size", None), "hidden": ("d_model", None), "layers": ("num_layers", None),
    "layer.attention.heads": ("num_heads", None), "layer.attention.head_size": ("d_kv", 64),
    "layer.ffn.inter": ("d_ff", None), **norm_keys(*_NORMS, key="layer_norm_epsilon", default=1e-6),
}  # fmt: skip
_FIXED: dict[str, Any] = {
    "positions.kind": "none", "positions.rows": _LONGEST, "token_types": 0, "padding_id": 0,
    "layer.norm_place": "pre", "layer.attention.scale": 1.0,
    **{f"layer.attention.{part}_bias": False for part in ("qkv", "out")},
    **{f"layer.ffn.{part}_bias": False for part in ("up", "down")},
    **rms(*_NORMS, rounding="before_gamma"),
}  # fmt: skip


def _feed_forward(config: Config, usual: str) -> tuple[bool, str]:
    """Whether it is gated, and its activation."""
    said = entry(config, "feed_forward_proj", "str", usual)
    gate, _, activation = str(said).rpartition("-")
    if gate not in ("", "gated") or not activation:
        raise ValueError(f"feed_forward_proj {shown(said)} is not supported: expected an activation, or gated- and one")
    return bool(gate), "gelu_new" if said == "gated-gelu" else activation


def _names(stack: str, word: str, gated: bool, own_tables: bool) -> Names:
    """stack: what stands before the names of the encoder's blocks; word: the table's name."""
    block = stack + "block.{i}."
    attention, dense = block + "layer.0.", block + "layer.1.DenseReluDense."
    table = "SelfAttention.relative_attention_bias.weight"
    bias: Names = {"attention.relative_bias": bias_table(f"{stack}block.0.layer.0.{table}")}
    if own_tables:
        bias = {"layers.{i}.attention.relative_bias": bias_table(attention + table)}
    return bias | {
        "embeddings.word": word,
        "layers.{i}.attention.qkv": tuple(attention + f"SelfAttention.{name}" for name in "qkv"),
        "layers.{i}.attention.out": attention + "SelfAttention.o",
        "layers.{i}.attention.norm": attention + "layer_norm",
        "layers.{i}.ffn.up": two_matrices(dense + "wi_0", dense + "wi_1") if gated else dense + "wi",
        "layers.{i}.ffn.down": dense + "wo",
        "layers.{i}.ffn.norm": block + "layer.1.layer_norm",
        "final_norm": stack + "final_layer_norm",
    }


def _like_t5(name: str, usual: str, own_tables: bool = False) -> Family:
    """usual: feed_forward_proj where the config has none. own_tables: each layer has a table of biases."""

    def names(config: Config) -> tuple[Names, ...]:
        gated, _ = _feed_forward(config, usual)
        # transformers shares the word table with the decoder; files may hold it under either name. The last is a stack
        # alone, as in a model with a decoder.
        places = (("encoder.", "shared"), ("encoder.", "encoder.embed_tokens"), ("", "embed_tokens"))
        return tuple(_names(stack, f"{word}.weight", gated, own_tables) for stack, word in places)

    def adjust(config: Config, description: dict[str, Any]) -> None:
        ffn = description["layer"]["ffn"]
        ffn["gated"], ffn["activation"] = _feed_forward(config, usual)
        add_bias(config, description, of="layers" if own_tables else "model")

    first, *others = names({})
    return Family(
        name=name,
        base="transformer",
        encoder="EncoderModel",
        names=first,
        names_by=names,
        spellings=tuple(others),
        keys=_KEYS,
        fixed=_FIXED,
        adjust=adjust,
        buffers=("embed_tokens.weight",),
        beside=("decoder.",),
        lacks=("sequence_classification", "question_answering", "masked_lm", "multiple_choice"),
    )


T5 = (_like_t5("t5", "relu"), _like_t5("mt5", "gated-gelu"), _like_t5("umt5", "gated-gelu", own_tables=True))
