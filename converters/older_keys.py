"""config.json of models that were published before transformers had them, in the words that transformers uses today."""

from __future__ import annotations

from ftbert.checkpoint import shown
from ftbert.converters.family import Config

# nomic-embed-text: the words of its own code.
_NOMIC = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}  # fmt: skip
_NOMIC_ONLY = {
    "activation_function": "swiglu", "causal": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "parallel_block": False, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "use_rms_norm": False, "num_experts": 0,
}  # fmt: skip


def todays_words(document: Config) -> Config:
    """The same config; ValueError says what it asks for that transformers does not compute."""
    if document.get("model_type") != "nomic_bert" or "n_embd" not in document:
        return document
    for key, only in _NOMIC_ONLY.items():
        if (said := document.get(key)) not in (None, only):
            raise ValueError(f"{key} {shown(said)} is not supported: only {shown(only)}")
    made = {today: document[key] for today, key in _NOMIC.items() if key in document}
    if document.get("rotary_scaling_factor") is not None:  # changes positions past the trained length alone
        made["max_position_embeddings"] = document.get("max_trained_positions")
    rest = {key: value for key, value in document.items() if key not in _NOMIC.values()}
    return {**rest, "hidden_act": "silu", **made}
