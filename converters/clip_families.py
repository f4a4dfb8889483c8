"""The tables of CLIP's and SigLIP's text models, and a checkpoint of both towers as its text model."""

from __future__ import annotations

from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.family import LAYER_NORMS, Config, Family, Keys, Names, norm_keys

_LAYER = "encoder.layers.{i}."
_NAMES: Names = {
    "embeddings.word": "embeddings.token_embedding.weight",
    "embeddings.position": "embeddings.position_embedding.weight",
    "layers.{i}.attention.qkv": tuple(f"{_LAYER}self_attn.{name}_proj" for name in "qkv"),
    "layers.{i}.attention.out": _LAYER + "self_attn.out_proj",
    "layers.{i}.attention.norm": _LAYER + "layer_norm1",
    "layers.{i}.ffn.up": _LAYER + "mlp.fc1",
    "layers.{i}.ffn.down": _LAYER + "mlp.fc2",
    "layers.{i}.ffn.norm": _LAYER + "layer_norm2",
    "final_norm": "final_layer_norm",
}


def _text_model(
    name: str, sizes: tuple[int, int, int, int, int, int], activation: str, eps: float, causal: bool
) -> Family:
    """sizes: transformers' defaults, of which the text_config of a checkpoint may say none: vocabulary, hidden, layers,
    heads, inner columns, positions."""
    vocab, hidden, layers, heads, inter, rows = sizes
    keys: Keys = {
        "vocab": ("vocab_size", vocab), "hidden": ("hidden_size", hidden), "layers": ("num_hidden_layers", layers),
        "layer.attention.heads": ("num_attention_heads", heads), "layer.ffn.inter": ("intermediate_size", inter),
        "positions.rows": ("max_position_embeddings", rows), "layer.ffn.activation": ("hidden_act", activation),
    }  # fmt: skip
    return Family(
        name=name,
        base="text_model",
        names=_NAMES,
        keys=keys | norm_keys(*LAYER_NORMS, "final_norm", default=eps),
        fixed={
            "token_types": 0, "padding_id": 0, "layer.norm_place": "pre", "layer.attention.causal": causal,
            "states_before_final_norm": True,
        },
        lacks=(
            "sequence_classification", "token_classification", "question_answering", "masked_lm", "multiple_choice",
        ),
    )  # fmt: skip


_SIGLIP = ((32000, 768, 12, 12, 3072, 64), "gelu_pytorch_tanh", 1e-6, False)
CLIP = (
    _text_model("clip_text_model", (49408, 512, 12, 8, 2048, 77), "quick_gelu", 1e-5, True),
    _text_model("siglip_text_model", *_SIGLIP),
    _text_model("siglip2_text_model", *_SIGLIP),
)

# Model types of two towers, and the class of their text half with what joins it to the images' vectors.
_TOWERS = {
    "clip": "CLIPTextModelWithProjection", "siglip": "SiglipTextModel", "siglip2": "Siglip2TextModel",
}  # fmt: skip


def text_part(document: Config) -> Config:
    """A config of two towers as that of its text model, any other as it is. ValueError for a class that reads images,
    or a config that transformers refuses."""
    kind = str(document.get("model_type"))
    if kind not in _TOWERS:
        return document
    named: Any = document.get("architectures") or [""]
    if isinstance(named, list) and any(word in str(named[:1]) for word in ("Vision", "Image")):
        raise ValueError(f"architectures names {shown(named[0])}, which reads images: ftbert computes text models")
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**{key: value for key, value in document.items() if key != "auto_map"})
    except Exception as error:  # of its own types
        raise ValueError(f"transformers' {kind} refuses this config ({error})") from error
    shared = {"projection_dim": config.projection_dim} if hasattr(config, "projection_dim") else {}
    return {**config.text_config.to_dict(), **shared, "architectures": [_TOWERS[kind]]}
