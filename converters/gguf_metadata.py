"""The metadata of a GGUF file by the short keys of its architecture, each of the type that it must have; and what the
entries may say that llama.cpp knows and no function of gguf_config.py reads.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ftbert.checkpoint import shown, typed
from ftbert.converters.gguf_file import GgufFile

_MISSING: Any = object()


class Metadata:
    """of: the file. `number("rope.freq_base")` is its llama.rope.freq_base."""

    def __init__(self, of: GgufFile) -> None:
        self.of, self.arch = of, str(of.metadata.get("general.architecture"))
        self._read: set[str] = set()

    def raw(self, key: str) -> Any:
        self._read.add(key)
        return self.of.metadata.get(f"{self.arch}.{key}")

    def unread(self) -> list[str]:
        """The short keys of entries that nobody has asked for."""
        prefix = f"{self.arch}."
        keys = [key.removeprefix(prefix) for key in self.of.metadata if key.startswith(prefix)]
        return [key for key in keys if key not in self._read]

    def count(self, key: str, default: Any = _MISSING) -> Any:
        """A whole number of at least 0, `default` where there is none. ValueError names it."""
        value = self._value("int", key, default)
        if type(value) is int and value < 0:
            raise ValueError(f"{self.arch}.{key}: expected at least 0, got {value}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A number, files have float32, as the shortest decimal that is the same: 1e-5, not 9.999999747378752e-06."""
        value = self._value("float", key, default)
        return float(str(np.float32(value))) if isinstance(value, float) and abs(value) < 3e38 else value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._value("bool", key, default))

    def text(self, key: str, default: str) -> str:
        return str(self._value("str", key, default))

    def rows(self, tensor: str) -> int:
        """Of a table, 0 where it is not there. ggml writes no last side that is 1: a row alone is a vector."""
        found = self.of.tensors.get(f"{tensor}.weight")
        return 0 if found is None else found.shape[0] if len(found.shape) > 1 else 1

    def has(self, tensor: str) -> bool:
        return tensor in self.of.tensors

    def token(self, name: str) -> int | None:
        """The id of a special token ("padding"), None where there is none in the vocabulary."""
        value = self.of.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < self.rows("token_embd") else None

    def _value(self, kind: str, key: str, default: Any) -> Any:
        full = f"{self.arch}.{key}"
        self._read.add(key)
        value = self.of.metadata.get(full, default)
        if value is _MISSING:
            raise ValueError(f"its metadata lack {full}")
        return value if value is default else typed(kind, full, self._of_all_layers(full, value))

    def _of_all_layers(self, full: str, value: Any) -> Any:
        """What an entry says, which may be a list with one value for each layer."""
        listed = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(listed, list) or not listed:
            return listed
        layers = self.of.metadata.get(f"{self.arch}.block_count")
        if len(listed) != layers:
            raise ValueError(f"{full}: {len(listed)} values for {shown(layers)} layers")
        if any(one != listed[0] for one in listed):
            raise ValueError(f"{full} {shown(listed)} is not supported: layers of one size alone")
        return listed[0]


# Keys of llama.cpp's src/llama-arch.cpp, as far as they change the results of some architecture of it. Keys that only
# describe are left out (vocab_size, tensor_data_layout, rope.scaling.finetuned, decoder_start_token_id).
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
