"""The table of ESM's protein models: ESM-2 with rotary positions, ESM-1b with a table of them."""

from __future__ import annotations

from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.family import KEYS, LAYER_NORMS, Config, Family, Names, entry, norm_keys
from ftbert.converters.rotary import rotary

_LAYER = "encoder.layer.{i}."
_ATTENTION = _LAYER + "attention."
_KEPT = 1 - 0.15 * 0.8  # what the training of all ESM models kept of the tokens, a constant of transformers' code
_NAMES: Names = {
    "embeddings.word": "embeddings.word_embeddings.weight",
    "embeddings.position": "embeddings.position_embeddings.weight",
    "embeddings.norm": "embeddings.layer_norm",
    "layers.{i}.attention.qkv": tuple(_ATTENTION + f"self.{name}" for name in ("query", "key", "value")),
    "layers.{i}.attention.out": _ATTENTION + "output.dense",
    "layers.{i}.attention.norm": _ATTENTION + "LayerNorm",
    "layers.{i}.ffn.up": _LAYER + "intermediate.dense",
    "layers.{i}.ffn.down": _LAYER + "output.dense",
    "layers.{i}.ffn.norm": _LAYER + "LayerNorm",
    "final_norm": "encoder.emb_layer_norm_after",
    "pooler": "pooler.dense",
}


def _esm(config: Config, description: dict[str, Any]) -> None:
    if entry(config, "is_folding_model", "bool", False):
        raise ValueError("is_folding_model true is not supported: ftbert computes the language model of ESMFold alone")
    kind = config.get("position_embedding_type") or "absolute"
    attention = description["layer"]["attention"]
    if kind == "rotary":
        description["positions"]["kind"] = "none"
        attention["rotary"] = rotary(config, {}, 10_000.0, attention["head_size"])
    else:
        description["positions"]["kind"] = "from_padding"
        if config.get("pad_token_id") is None:
            raise ValueError("pad_token_id null: positions of a table count from it")
    if not entry(config, "emb_layer_norm_before", "bool", False):
        del description["embedding_norm"]
    if entry(config, "token_dropout", "bool", False):
        mask = config.get("mask_token_id")
        if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < description["vocab"]:
            raise ValueError(f"mask_token_id {shown(mask)}: token_dropout needs the id of masked tokens")
        description["token_dropout"] = {"mask_id": mask, "kept": _KEPT}


ESM = Family(
    name="esm",
    base="esm",
    names=_NAMES,
    keys=KEYS | norm_keys("embedding_norm", *LAYER_NORMS, "final_norm"),
    fixed={"token_types": 0, "layer.ffn.activation": "gelu", "layer.norm_place": "pre"},
    adjust=_esm,
    # Files of ESM-2 may hold a table of positions that nothing reads. The contacts' head reads attention's weights, of
    # which ftbert has none.
    buffers=(
        "position_ids", "position_embeddings.weight", "rotary_embeddings.inv_freq", "contact_head.regression.weight",
        "contact_head.regression.bias",
    ),
    lacks=("question_answering", "multiple_choice"),
    positions=("absolute", "rotary"),
    frequencies=("rotary_embeddings.inv_freq", "encoder.layer.*.attention.self.rotary_embeddings.inv_freq"),
)  # fmt: skip
