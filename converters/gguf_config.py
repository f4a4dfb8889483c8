"""transformers' config.json of a GGUF file, from its metadata and tensors; what neither says is llama.cpp's rule.

Keys are those of llama.cpp's gguf-py/gguf/constants.py, the rules for what they leave out those of its src/models.
"""

from __future__ import annotations

from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.gguf_metadata import Metadata
from ftbert.converters.gguf_rope import rope, rope_by_type

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_POST_NORM_EPS, _RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
# llama.cpp's names of activations, by transformers'. A gate's name means the gate's activation.
_ACTIVATIONS = {"gelu": "gelu", "geglu": "gelu", "silu": "silu", "swish": "silu", "swiglu": "silu"}


def _sizes(said: Metadata, model_type: str, architecture: str) -> dict[str, Any]:
    if said.count("expert_count", 0):
        raise ValueError("its feed-forward layers choose among experts, which no table here says")
    found: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
    found |= {theirs: said.count(key) for theirs, key in _SIZES.items()}
    found |= {"vocab_size": said.rows("token_embd"), "pad_token_id": said.token("padding")}
    return found


def _expect_causal(said: Metadata, causal: bool) -> None:
    if said.flag("attention.causal", causal) is not causal:
        raise ValueError(f"{said.arch}.attention.causal {shown(not causal)} is not supported")


def _activation(said: Metadata, usual: str, *others: str) -> str:
    """transformers' word. usual: where the file says nothing. others: that llama.cpp computes for this architecture."""
    word = said.text("hidden_activation", usual)
    found = _ACTIVATIONS.get(word, word)
    if found not in (usual, *others):
        raise ValueError(f"{said.arch}.hidden_activation {shown(word)} is not supported: only {usual}")
    return found


def _expect_no_window(said: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    """`found`, where no text of the model is longer than a window that the file names."""
    said.raw("attention.sliding_window_pattern")
    if 0 < (window := said.count("attention.sliding_window", 0)) < found["max_position_embeddings"]:
        raise ValueError(f"{said.arch}.attention.sliding_window {window} is not supported: llama.cpp computes none")
    return found


def _encoder(said: Metadata, model_type: str, architecture: str) -> dict[str, Any]:
    _expect_causal(said, False)
    found = _sizes(said, model_type, architecture)
    if (size := _head_size(said, found)) * found["num_attention_heads"] != found["hidden_size"]:
        raise ValueError(f"{said.arch}.attention.key_length {size} is not supported: heads share the hidden size here")
    return found


def bert(said: Metadata) -> dict[str, Any]:
    """RoBERTa's files are of this architecture, too: their first rows of positions, which no text has, are cut off."""
    return _expect_no_window(said, _encoder(said, "bert", "BertModel")) | {
        "max_position_embeddings": said.rows("position_embd"),
        "type_vocab_size": said.rows("token_types"),
        "layer_norm_eps": said.number(_POST_NORM_EPS),
        "hidden_act": _activation(said, "gelu"),
    }


def nomic_bert(said: Metadata) -> dict[str, Any]:
    found = _expect_no_window(said, _encoder(said, "nomic_bert", "NomicBertModel"))
    return found | {
        "type_vocab_size": said.rows("token_types"),
        "layer_norm_eps": said.number(_POST_NORM_EPS),
        "hidden_act": _activation(said, "silu"),
        "rope_parameters": rope(said, _head_size(said, found), 1000.0),
    }


def modernbert(said: Metadata) -> dict[str, Any]:
    found = _encoder(said, "modernbert", "ModernBertModel")
    return found | {
        "norm_eps": said.number(_POST_NORM_EPS),
        "local_attention": said.count("attention.sliding_window", 0) or 128,
        "layer_types": _layer_types(said, found, 3, lambda i, every: i % every == 0),
        "hidden_activation": _activation(said, "gelu", "silu"),
        "rope_parameters": rope_by_type(said, _head_size(said, found), 160_000.0, both=True),
        "bos_token_id": said.token("bos"),
        "eos_token_id": said.token("eos"),
        "cls_token_id": said.token("cls"),
        "sep_token_id": said.token("seperator"),  # as llama.cpp spells it
    }


def _decoder(
    said: Metadata, model_type: str, architecture: str, theta: float, activation: str = "silu"
) -> dict[str, Any]:
    found = _sizes(said, model_type, architecture)
    found |= {
        "num_key_value_heads": said.count("attention.head_count_kv", found["num_attention_heads"]),
        "rms_norm_eps": said.number(_RMS_EPS),
        "hidden_act": _activation(said, activation),
        "tie_word_embeddings": not said.has("output.weight"),
        "bos_token_id": said.token("bos"),
        "eos_token_id": said.token("eos"),
        "head_dim": _head_size(said, found),
    }
    found["rope_parameters"] = rope(said, found["head_dim"], theta)
    return found if said.flag("attention.causal", True) else found | {"is_causal": False}


def llama(said: Metadata) -> dict[str, Any]:
    biases = {"attention_bias": said.has("blk.0.attn_output.bias"), "mlp_bias": said.has("blk.0.ffn_down.bias")}
    return _expect_no_window(said, _decoder(said, "llama", "LlamaForCausalLM", 10_000.0)) | biases


def qwen2(said: Metadata) -> dict[str, Any]:
    found = _expect_no_window(said, _decoder(said, "qwen2", "Qwen2ForCausalLM", 10_000.0))
    return found | {"use_sliding_window": False}


def qwen3(said: Metadata) -> dict[str, Any]:
    found = _expect_no_window(said, _decoder(said, "qwen3", "Qwen3ForCausalLM", 10_000.0))
    return found | {"use_sliding_window": False, "attention_bias": said.has("blk.0.attn_q.bias")}


def smollm3(said: Metadata) -> dict[str, Any]:
    """Which layers have no rotary positions is no entry of the file: every fourth."""
    found = _expect_no_window(said, _decoder(said, "smollm3", "SmolLM3ForCausalLM", 10_000.0))
    return found | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def gemma(said: Metadata) -> dict[str, Any]:
    return _expect_no_window(said, _decoder(said, "gemma", "GemmaForCausalLM", 10_000.0, "gelu_pytorch_tanh"))


def gemma3(said: Metadata) -> dict[str, Any]:
    _expect_causal(said, True)
    return _gemma(said, "Gemma3ForCausalLM")


def gemma_embedding(said: Metadata) -> dict[str, Any]:
    _expect_causal(said, False)
    found = _gemma(said, "Gemma3TextModel") | {"use_bidirectional_attention": True, "tie_word_embeddings": True}
    found.pop("is_causal", None)
    return found


def _gemma(said: Metadata, architecture: str) -> dict[str, Any]:
    found = _decoder(said, "gemma3_text", architecture, 1_000_000.0, "gelu_pytorch_tanh")
    # Gemma 3 of 27B alone, which llama.cpp knows by its layers, does not scale scores by the size of its heads.
    by_width = found["num_hidden_layers"] == 62
    heads = found["hidden_size"] / found["num_attention_heads"] if by_width else found["head_dim"]
    scale = said.number("attention.scale", None)
    found |= {
        "hidden_activation": found.pop("hidden_act"),
        "query_pre_attn_scalar": scale**-2 if scale else heads,
        "sliding_window": said.count("attention.sliding_window", 0) or 4096,
        "layer_types": _layer_types(said, found, 6, lambda i, every: (i + 1) % every == 0),
        "rope_parameters": rope_by_type(said, found["head_dim"], 1_000_000.0),
    }
    return found | {"final_logit_softcapping": said.number("final_logit_softcapping", None) or None}


def _head_size(said: Metadata, found: dict[str, Any]) -> int:
    heads = found["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"{said.arch}.attention.head_count {heads}: expected at least 1")
    size = said.count("attention.key_length", said.count("rope.dimension_count", found["hidden_size"] // heads))
    others = ("attention.value_length", "rope.dimension_count")
    for key in (*others, "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        if (other := said.count(key, size)) != size:
            raise ValueError(f"{said.arch}.{key} {other} is not supported: only {size}, the size of its heads")
    return int(size)


def _layer_types(said: Metadata, found: dict[str, Any], usual: int, is_full: Any) -> list[str]:
    """sliding_window_pattern: every which layer sees the whole text, or for each layer whether it slides. Without a
    window, or with one of 0, all see it."""
    key = "attention.sliding_window_pattern"
    layers, pattern = found["num_hidden_layers"], said.raw(key)
    if hasattr(pattern, "tolist"):
        listed = [bool(one) for one in pattern.tolist()]
        if len(listed) != layers:
            raise ValueError(f"{said.arch}.{key}: {len(listed)} entries for {layers} layers")
    else:
        every = said.count(key, usual)
        if every < 1:
            raise ValueError(f"{said.arch}.{key} {every}: expected at least 1")
        listed = [not is_full(i, every) for i in range(layers)]
    windows = said.count("attention.sliding_window", 0) > 0
    return ["sliding_attention" if slides and windows else "full_attention" for slides in listed]
