"""The tables of families with rotary positions: encoders, and decoders that serve as encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.family import KEYS, LAYER_NORMS, Config, Family, Keys, Names, entry, norm_keys
from ftbert.converters.gated_rows import two_halves, two_matrices
from ftbert.converters.layer_types import (
    Description,
    by_type,
    group_heads,
    layer_types,
    rms,
    rotary_of_type,
    slide,
    turn,
)
from ftbert.converters.rotary import rope_of

_BUFFERS = ("position_ids", "token_type_ids", "rotary_emb.inv_freq", "original_inv_freq")
_NO_TABLE = {"positions.kind": "none", "padding_id": 0}
_NO_TYPES = {"token_types": 0}
_LAYER = "layers.{i}."
_ATTENTION = _LAYER + "self_attn."
_QKV = tuple(_ATTENTION + name for name in ("q_proj", "k_proj", "v_proj"))
_GATED = two_matrices(_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj")
_NO_FFN_BIAS = {"layer.ffn.up_bias": False, "layer.ffn.down_bias": False}
_HEAD_DIM: Keys = {"layer.attention.head_size": ("head_dim", 0)}  # 0: hidden / heads
_NO_BIAS = _NO_FFN_BIAS | {"layer.attention.qkv_bias": False, "layer.attention.out_bias": False}
_ATTENTION_BIAS: Keys = {f"layer.attention.{name}_bias": ("attention_bias", False) for name in ("qkv", "out")}
_FFN_BIAS: Keys = {f"layer.ffn.{name}_bias": ("mlp_bias", False) for name in ("up", "down")}


# ---- encoders -------------------------------------------------------------------------------------------------------


def _modernbert(config: Config, description: Description) -> None:
    every = entry(config, "global_attn_every_n_layers", "int", 3)
    if every < 1:
        raise ValueError(f"global_attn_every_n_layers {every}: expected at least 1")
    for key in ("global_rope_theta", "local_rope_theta", "local_attention"):
        if config.get(key, 1) is None:
            raise ValueError(f"{key} null is not supported: expected a number")
    types = layer_types(config, lambda i: bool(i % every))
    side = entry(config, "local_attention", "int", 128) // 2
    thetas = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}
    parts: dict[str, Description] = {
        kind: {"rotary": rotary_of_type(config, description, kind, *thetas[kind])} for kind in set(types)
    }
    if "sliding_attention" in parts:
        causal = description["layer"]["attention"].get("causal", False)
        if causal and side < 1:
            raise ValueError(f"local_attention {config['local_attention']}: expected at least 2 where it is causal")
        parts["sliding_attention"]["window"] = [side - 1, None] if causal else [side, side]
    by_type(description, types, parts)
    if description["layers"]:
        description["layers"][0]["attention_norm"] = None


_MODERNBERT_NAMES: Names = {
    "embeddings.word": "embeddings.tok_embeddings.weight",
    "embeddings.norm": "embeddings.norm",
    "layers.{i}.attention.qkv": _LAYER + "attn.Wqkv",
    "layers.{i}.attention.out": _LAYER + "attn.Wo",
    "layers.{i}.attention.norm": _LAYER + "attn_norm",
    "layers.{i}.ffn.up": two_halves(_LAYER + "mlp.Wi", gate_first=True),
    "layers.{i}.ffn.down": _LAYER + "mlp.Wo",
    "layers.{i}.ffn.norm": _LAYER + "mlp_norm",
    "final_norm": "final_norm",
}
_MODERNBERT = Family(
    name="modernbert",
    base="model",
    names=_MODERNBERT_NAMES,
    keys=KEYS | norm_keys("embedding_norm", *LAYER_NORMS, "final_norm", key="norm_eps", default=1e-5)
    | _ATTENTION_BIAS | _FFN_BIAS | {
        "layer.ffn.activation": ("hidden_activation", "gelu"),
        **{f"{norm}.bias": ("norm_bias", False) for norm in ("embedding_norm", *LAYER_NORMS, "final_norm")},
    },
    fixed=_NO_TABLE | _NO_TYPES | {"layer.norm_place": "pre", "layer.ffn.gated": True},
    adjust=_modernbert,
    buffers=_BUFFERS,
)  # fmt: skip
_APART = tuple(_LAYER + f"attn.{name}_proj" for name in "qkv")
_MODERNBERT_DECODER = replace(
    _MODERNBERT,
    name="modernbert-decoder",
    names=_MODERNBERT_NAMES | {"layers.{i}.attention.qkv": _APART},
    lacks=("masked_lm", "token_classification", "question_answering", "multiple_choice"),
    decoder=True,
)

_POST_NORMS: Names = {
    "embeddings.word": "embeddings.word_embeddings.weight",
    "embeddings.token_type": "embeddings.token_type_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.attention.qkv": _QKV,
    "layers.{i}.attention.out": _ATTENTION + "o_proj",
    "layers.{i}.attention.norm": _LAYER + "post_attention_layernorm",
    "layers.{i}.ffn.norm": _LAYER + "post_mlp_layernorm",
    "pooler": "pooler.dense",
}
# As nomic-embed-text and jina-embeddings-v3 were published; transformers renames them while it loads.
_PUBLISHED = "encoder.layers.{i}."
_PUBLISHED_NAMES: Names = _POST_NORMS | {
    "embeddings.norm": "emb_ln",
    "layers.{i}.attention.norm": _PUBLISHED + "norm1",
    "layers.{i}.ffn.down": _PUBLISHED + "mlp.fc2",
    "layers.{i}.ffn.norm": _PUBLISHED + "norm2",
}


_NOMIC = Family(
    name="nomic_bert",
    base="nomic_bert",
    names=_POST_NORMS | {"layers.{i}.ffn.up": _GATED, "layers.{i}.ffn.down": _LAYER + "mlp.down_proj"},
    keys=KEYS | _HEAD_DIM | {"layer.ffn.activation": ("hidden_act", "silu")},
    fixed=_NO_TABLE | _NO_BIAS | {"layer.ffn.gated": True},
    adjust=turn(1000.0),
    buffers=_BUFFERS,
    lacks=("question_answering", "multiple_choice"),
    spellings=(_PUBLISHED_NAMES | {
        "layers.{i}.attention.qkv": _PUBLISHED + "attn.Wqkv",
        "layers.{i}.attention.out": _PUBLISHED + "attn.out_proj",
        "layers.{i}.ffn.up": two_matrices(_PUBLISHED + "mlp.fc12", _PUBLISHED + "mlp.fc11"),
    },),
)  # fmt: skip

_JINA = Family(
    name="jina_embeddings_v3",
    base="roberta",
    names=_POST_NORMS | {"layers.{i}.ffn.up": _LAYER + "mlp.fc1", "layers.{i}.ffn.down": _LAYER + "mlp.fc2"},
    keys=KEYS | _HEAD_DIM | norm_keys("embedding_norm", *LAYER_NORMS, default=1e-5) | {
        "token_types": ("type_vocab_size", 1),
    },
    fixed=_NO_TABLE,
    adjust=turn(20_000.0),
    buffers=_BUFFERS,
    lacks=("multiple_choice",),
    spellings=(_PUBLISHED_NAMES | {
        "layers.{i}.attention.qkv": _PUBLISHED + "mixer.Wqkv",
        "layers.{i}.attention.out": _PUBLISHED + "mixer.out_proj",
        "layers.{i}.ffn.up": _PUBLISHED + "mlp.fc1",
    },),
)  # fmt: skip


def _new(config: Config, description: Description) -> None:
    for key, only in (("pack_qkv", True), ("layer_norm_type", "layer_norm"), ("logn_attention_scale", False)):
        if (said := config.get(key, only)) != only:
            raise ValueError(f"{key} {shown(said)} is not supported: only {shown(only)}")
    turn(10_000.0, "ntk")(config, description)


_NEW_LAYER = "encoder.layer.{i}."
_NEW = Family(
    name="new",
    base="new",
    names={
        "embeddings.word": "embeddings.word_embeddings.weight",
        "embeddings.token_type": "embeddings.token_type_embeddings.weight",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.{i}.attention.qkv": _NEW_LAYER + "attention.qkv_proj",
        "layers.{i}.attention.out": _NEW_LAYER + "attention.o_proj",
        "layers.{i}.attention.norm": _NEW_LAYER + "attn_ln",
        "layers.{i}.ffn.up": two_halves(_NEW_LAYER + "mlp.up_gate_proj", gate_first=False),
        "layers.{i}.ffn.down": _NEW_LAYER + "mlp.down_proj",
        "layers.{i}.ffn.norm": _NEW_LAYER + "mlp_ln",
        "pooler": "pooler.dense",
    },
    keys=KEYS | {"token_types": ("type_vocab_size", 1)},
    fixed=_NO_TABLE | {"layer.ffn.gated": True, "layer.ffn.up_bias": False},
    adjust=_new,
    buffers=_BUFFERS,
    lacks=("question_answering", "masked_lm", "multiple_choice"),
    positions=("rope",),
)

# ---- Llama's layers -------------------------------------------------------------------------------------------------

_LLAMA_NAMES: Names = {
    "embeddings.word": "embed_tokens.weight",
    "layers.{i}.attention.qkv": _QKV,
    "layers.{i}.attention.q_norm": _ATTENTION + "q_norm",
    "layers.{i}.attention.k_norm": _ATTENTION + "k_norm",
    "layers.{i}.attention.out": _ATTENTION + "o_proj",
    "layers.{i}.attention.norm": _LAYER + "input_layernorm",
    "layers.{i}.ffn.up": _GATED,
    "layers.{i}.ffn.down": _LAYER + "mlp.down_proj",
    "layers.{i}.ffn.norm": _LAYER + "post_attention_layernorm",
    "final_norm": "norm",
}
_PHI3_NAMES: Names = {
    "layers.{i}.attention.qkv": _ATTENTION + "qkv_proj",
    "layers.{i}.ffn.up": two_halves(_LAYER + "mlp.gate_up_proj", gate_first=True),
}
_RMS_NORMS = (*LAYER_NORMS, "final_norm")
_QK_NORM = "layer.attention.qk_norm"
_GEMMA_NORMS = (*_RMS_NORMS, "layer.attention_result_norm", "layer.ffn_result_norm")
_GEMMA: Any = {
    "keys": _ATTENTION_BIAS | {
        "layer.ffn.activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "layer.attention.head_size": ("head_dim", 256),
    },
    "fixed": _NO_FFN_BIAS,
    "names": {
        "layers.{i}.attention.result_norm": _LAYER + "post_attention_layernorm",
        "layers.{i}.ffn.norm": _LAYER + "pre_feedforward_layernorm",
        "layers.{i}.ffn.result_norm": _LAYER + "post_feedforward_layernorm",
    },
    "norm": {"offset": 1.0},
}  # fmt: skip
_LLAMA_KEYS: Keys = {ours: key for ours, key in KEYS.items() if ours != "embedding_norm.eps"} | _HEAD_DIM
_LLAMA_KEYS |= {"layer.ffn.activation": ("hidden_act", "silu")}
_LLAMA_FIXED = _NO_TABLE | _NO_TYPES | {"layer.norm_place": "pre", "layer.ffn.gated": True}
_BEFORE_GAMMA = {"rounding": "before_gamma"}


def _llama(config: Config, description: Description) -> None:
    group_heads(config, description, None)
    turn(10_000.0)(config, description)


def _sliding_window(config: Config, default: int | None) -> int | None:
    """default: where the config says nothing. null: none."""
    if config.get("sliding_window", default) is None:
        return None
    return int(entry(config, "sliding_window", "int", default))


def _windowed(heads: int | None, window: int | None, listed: bool = False) -> Callable[[Config, Description], None]:
    """heads: of keys, as `window` where the config says nothing. listed: transformers' class reads layer_types; else
    all layers slide."""

    def adjust(config: Config, description: Description) -> None:
        group_heads(config, description, heads)
        turn(10_000.0)(config, description)
        if not listed and config.get("layer_types") is not None:
            said = f"layer_types of model type {config.get('model_type')!r}"
            raise ValueError(f"{said} is not supported: transformers' class does not read it")
        size = _sliding_window(config, window)
        slide(description, layer_types(config, lambda i: size is not None), size)

    return adjust


def _phi3(config: Config, description: Description) -> None:
    rope = rope_of(config)
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise ValueError(f"rope_scaling of type {shown(kind)} is not supported: Phi-3's own has no other than longrope")
    _windowed(None, None)(config, description)


def _smollm3(config: Config, description: Description) -> None:
    """Some layers have no rotary positions; unless layer_types says others, these are those that slide, if any do."""
    group_heads(config, description, 4)
    turn(2_000_000.0)(config, description)
    every, listed = entry(config, "no_rope_layer_interval", "int", 4), config.get("no_rope_layers")
    layers = entry(config, "num_hidden_layers", "int", None)
    if listed is None and every < 1:
        raise ValueError(f"no_rope_layer_interval {every}: expected at least 1")
    if listed is not None and not (
        isinstance(listed, list) and len(listed) >= layers and all(one in (0, 1) for one in listed)
    ):
        raise ValueError(f"no_rope_layers {shown(listed)}: expected 0 or 1 for each of {layers} layers")

    def turns(i: int) -> bool:
        return (i + 1) % every != 0 if listed is None else bool(listed[i])

    window = _sliding_window(config, None)
    slides = entry(config, "use_sliding_window", "bool", False) and window is not None
    slide(description, layer_types(config, lambda i: slides and not turns(i)), window)
    for i, layer in enumerate(description["layers"]):
        if not turns(i):
            layer["attention"] = {**layer["attention"], "rotary": None}


def _qwen(config: Config, description: Description) -> None:
    group_heads(config, description, 32)
    turn(10_000.0)(config, description)
    slides = entry(config, "use_sliding_window", "bool", False) and config.get("sliding_window", 0) is not None
    window = entry(config, "sliding_window", "int", 4096) if slides else None
    first = entry(config, "max_window_layers", "int", 28)
    slide(description, layer_types(config, lambda i: window is not None and i >= first), window)


def _gemma1(config: Config, description: Description) -> None:
    group_heads(config, description, 16)
    description["embedding_scale"] = description["hidden"] ** 0.5
    _stay_causal(config)
    turn(10_000.0)(config, description)


def _stay_causal(config: Config) -> None:
    if entry(config, "use_bidirectional_attention", "bool", False):
        raise ValueError("use_bidirectional_attention true is not supported: transformers' own masks stay causal")


def _gemma(config: Config, description: Description, soft_cap: float) -> Description:
    """What Gemma 2 and 3 share; the description of attention. soft_cap: where the config says nothing; 0: none."""
    group_heads(config, description, 4)
    description["embedding_scale"] = description["hidden"] ** 0.5
    attention: Description = description["layer"]["attention"]
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping"):
        if config.get(key) is not None and entry(config, key, "float", 1) <= 0:
            raise ValueError(f"{key} {config[key]}: expected a number above 0")
    attention["scale"] = entry(config, "query_pre_attn_scalar", "float", 256) ** -0.5
    if config.get("attn_logit_softcapping", soft_cap or None) is not None:
        attention["soft_cap"] = entry(config, "attn_logit_softcapping", "float", soft_cap)
    return attention


def _gemma2(config: Config, description: Description) -> None:
    _gemma(config, description, 50.0)
    _stay_causal(config)
    turn(10_000.0)(config, description)
    window = _sliding_window(config, 4096)
    slide(description, layer_types(config, lambda i: i % 2 == 0), window)


def _gemma3(config: Config, description: Description) -> None:
    attention = _gemma(config, description, 0.0)
    pattern = entry(config, "sliding_window_pattern", "int", 6)
    if pattern < 1:
        raise ValueError(f"sliding_window_pattern {pattern}: expected at least 1")
    types = layer_types(config, lambda i: bool((i + 1) % pattern))
    window, least = entry(config, "sliding_window", "int", 4096), 1
    if entry(config, "use_bidirectional_attention", "bool", False):
        # transformers' own window is then half of the config's and 1, and one more where is_causal says it, too.
        window, least = window // 2 + (0 if attention.pop("causal", False) else 1), 0
    slide(description, types, window, least)
    thetas = {"full_attention": ("rope_theta", 1_000_000.0), "sliding_attention": ("rope_local_base_freq", 10_000.0)}
    for layer, kind in zip(description["layers"], types, strict=True):
        scaled = config if kind == "full_attention" else config | {"rope_scaling": None}
        layer["attention"] = {"rotary": rotary_of_type(scaled, description, kind, *thetas[kind]), **layer["attention"]}


def _like_llama(
    name: str,
    adjust: Callable[[Config, Description], None],
    keys: Keys,
    fixed: dict[str, Any],
    *,
    names: Names | None = None,
    norms: tuple[str, ...] = _RMS_NORMS,
    norm: dict[str, Any] = _BEFORE_GAMMA,
    eps: float = 1e-6,
    lacks: tuple[str, ...] = ("masked_lm", "multiple_choice"),
    also: tuple[str, ...] = (),
    decoder: bool = True,
) -> Family:
    """names, keys, fixed: what is other than Llama's. norms: there; norm: what all of them have; eps: their default."""
    return Family(
        name=name,
        base="model",
        names=_LLAMA_NAMES | (names or {}),
        keys=_LLAMA_KEYS | norm_keys(*norms, key="rms_norm_eps", default=eps) | keys,
        fixed=_LLAMA_FIXED | rms(*norms, **norm) | fixed,
        adjust=adjust,
        buffers=_BUFFERS,
        lacks=lacks,
        also=also,
        decoder=decoder,
    )


ROTARY = (
    _MODERNBERT,
    _MODERNBERT_DECODER,
    _NOMIC,
    _JINA,
    _NEW,
    _like_llama("eurobert", _llama, _ATTENTION_BIAS | _FFN_BIAS, {}, eps=1e-5, decoder=False,
                lacks=("question_answering", "multiple_choice")),
    _like_llama("llama", _llama, _ATTENTION_BIAS | _FFN_BIAS, {}, also=("transformer",)),
    _like_llama("mistral", _windowed(8, 4096), {}, _NO_BIAS),
    _like_llama("ministral", _windowed(8, 4096, listed=True), {}, _NO_BIAS, also=("transformer",)),
    _like_llama("phi3", _phi3, {}, _NO_BIAS, eps=1e-5, names=_PHI3_NAMES,
                lacks=("masked_lm", "multiple_choice", "question_answering")),
    _like_llama("smollm3", _smollm3, _ATTENTION_BIAS | _FFN_BIAS, {}, also=("transformer",)),
    _like_llama("qwen2", _qwen, {}, _NO_FFN_BIAS | {"layer.attention.out_bias": False}, also=("transformer",)),
    _like_llama("qwen3", _qwen, _ATTENTION_BIAS | {"layer.attention.head_size": ("head_dim", 128)}, _NO_FFN_BIAS,
                norms=(*_RMS_NORMS, _QK_NORM), also=("transformer",)),
    _like_llama("gemma", _gemma1, _GEMMA["keys"] | {"layer.ffn.activation": ("hidden_act", "gelu_pytorch_tanh")},
                _NO_FFN_BIAS, norm=_GEMMA["norm"], lacks=("masked_lm", "multiple_choice", "question_answering")),
    _like_llama("gemma2", _gemma2, norms=_GEMMA_NORMS, lacks=("masked_lm", "multiple_choice", "question_answering"),
                **_GEMMA),
    _like_llama("gemma3_text", _gemma3, norms=(*_GEMMA_NORMS, _QK_NORM),
                lacks=("masked_lm", "multiple_choice", "token_classification", "question_answering"), **_GEMMA),
)  # fmt: skip
