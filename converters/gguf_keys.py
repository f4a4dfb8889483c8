"""Entries of a file's metadata that llama.cpp knows and no function of gguf_config.py reads: what they may say.

Keys are of llama.cpp's src/llama-arch.cpp, as far as they change the results of some architecture of it. Keys that only
describe are left out (vocab_size, tensor_data_layout, rope.scaling.finetuned, decoder_start_token_id).
"""

from __future__ import annotations

import re
from typing import Any

from ftbert.checkpoint import shown
from ftbert.converters.gguf_metadata import Metadata

_OFF = (0,)  # also False
_FACTOR = (1, 0)  # llama.cpp takes a factor of 0 for none
_NEUTRAL = {
    **dict.fromkeys((
        "attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "swin_norm",
        "use_parallel_residual", "decoder_block_count", "leading_dense_block_count", "expert_.*", "experts_per_group",
        "moe_.*", "nextn_predict_layers", "n_deepstack_layers", "interleave_moe_layer_step", "swiglu_clamp_.*",
        "embedding_length_per_layer_input", "embedding_length_out", "rescale_every_n_layers", "time_.*",
        "token_shift_count", "full_attention_interval", "activation_sparsity_scale", "hash_layer_count",
        "(altup|hyper_connection|kda|ssm|wkv|shortconv)\\..*",
    ), _OFF),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), _FACTOR),
    **dict.fromkeys((
        "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.relative_buckets_count",
        "attention.sliding_window", "attention.sliding_window_pattern", "attention.[qkv_]*lora_rank",
        "attention.temperature_length", "attention.shared_kv_layers", "attention.(key|value)_length_(mla|swa)",
        "attention.indexer\\..*", "attention.compress_.*", "attention.recurrent_layers",
    ), _OFF),
    **dict.fromkeys(("attention.(output|value|temperature)_scale",), _FACTOR),
    "rope.scaling.type": ("none", "linear"),  # linear is by a factor
    "rope.(scaling.factor|scale_linear|scaling.attn_factor|scaling.alpha)": _FACTOR,
    "rope.scaling.yarn_log_multiplier": _OFF,
    "rope.dimension_(sections|count_swa)": _OFF,
}  # fmt: skip
_KNOWN = [(re.compile(key), values) for key, values in _NEUTRAL.items()]


def expect_no_more(said: Metadata) -> None:
    """ValueError for an entry that nobody has asked `said` for, and that changes what the model computes."""
    for key in said.unread():
        allowed = next((values for known, values in _KNOWN if known.fullmatch(key)), None)
        if allowed is None:
            continue
        value: Any = said.raw(key)
        listed = value.tolist() if hasattr(value, "tolist") else value if isinstance(value, list) else [value]
        if not all(one in allowed for one in listed):
            only = " or ".join(map(str, allowed))
            raise ValueError(f"{said.arch}.{key} {shown(value)} is not supported: only {only}")
