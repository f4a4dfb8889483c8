"""GGUF files of transformers' models, written with the package gguf as llama.cpp's convert_hf_to_gguf.py writes them.

Names come from that package's own table. What the converter does beside renaming is written out here once more.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from families import make_model
from safetensors.torch import load_file

LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50.0,
    "original_max_position_embeddings": 48,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0}
_TYPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
_PLAIN = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("full_attention", 900.0), ("sliding_attention", 70.0))}

# Architecture, family, task, and two configs of it.
MODELS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "bert": ("bert", "encoder", [{}, {"type_vocab_size": 1, "layer_norm_eps": 1e-5}]),
    "nomic-bert": ("nomic_bert", "encoder", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}]),
    "modern-bert": ("modernbert", "encoder", [
        {"num_hidden_layers": 4, "local_attention": 6, "rope_parameters": _PLAIN},
        {"num_hidden_layers": 5, "global_attn_every_n_layers": 2, "local_attention": 8, "norm_eps": 1e-4},
    ]),
    "llama": ("llama", "causal_lm", [
        {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        {"num_key_value_heads": 3, "head_dim": 64, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "is_causal": False},
    ]),
    "qwen2": ("qwen2", "causal_lm", [
        {"num_key_value_heads": 1, "tie_word_embeddings": False, "use_sliding_window": False},
        {"num_key_value_heads": 3, "rope_parameters": YARN, "use_sliding_window": False},
    ]),
    "qwen3": ("qwen3", "causal_lm", [
        {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
        {"num_key_value_heads": 3, "head_dim": 64, "attention_bias": False, "rope_parameters": YARN, "use_sliding_window": False},
    ]),
    "smollm3": ("smollm3", "causal_lm", [
        {"num_hidden_layers": 5, "num_key_value_heads": 1, "no_rope_layer_interval": 4, "head_dim": 32, "tie_word_embeddings": True},
        {"num_hidden_layers": 4, "num_key_value_heads": 3, "no_rope_layer_interval": 4, "no_rope_layers": None, "head_dim": 64, "use_sliding_window": False, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "rope_parameters": YARN},
    ]),
    "gemma": ("gemma", "causal_lm", [
        {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
        {"num_key_value_heads": 3, "head_dim": 64, "attention_bias": False, "tie_word_embeddings": True, "is_causal": False},
    ]),
    "gemma3": ("gemma3_text", "causal_lm", [
        {"num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "use_bidirectional_attention": False, "sliding_window": 5, "query_pre_attn_scalar": 32, "tie_word_embeddings": True, "rope_parameters": _TYPES},
        {"num_hidden_layers": 7, "num_key_value_heads": 3, "head_dim": 64, "use_bidirectional_attention": False, "sliding_window": 7, "query_pre_attn_scalar": 64, "tie_word_embeddings": True, "rope_parameters": _PLAIN},
    ]),
    "gemma-embedding": ("gemma3_text", "encoder", [
        {"num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "use_bidirectional_attention": True, "rope_parameters": _PLAIN},
        {"num_hidden_layers": 7, "num_key_value_heads": 3, "head_dim": 64, "sliding_window": 6, "query_pre_attn_scalar": 64, "use_bidirectional_attention": True, "rope_parameters": _TYPES},
    ]),
}  # fmt: skip
_COMMON = {"hidden_size": 96, "use_cache": False, "intermediate_size": 64, "num_labels": 2}


def make(arch: str, which: int = 0, **overrides: Any) -> Any:
    """A random model of transformers; every row is a multiple of 32."""
    family, task, configs = MODELS[arch]
    usual: dict[str, Any] = {"hidden_act": "gelu" if family in ("bert", "modernbert") else "silu"}  # no file says it
    if family == "gemma":
        usual = {"hidden_act": "gelu_pytorch_tanh"}
    if family == "gemma3_text":
        usual = {"sliding_window_pattern": 6, "attention_bias": False}
    if family == "modernbert":
        usual |= dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    common = {key: value for key, value in _COMMON.items() if key != "use_cache" or family not in ("bert", "nomic_bert", "modernbert")}
    return make_model(family, task, 0, **usual | common | configs[which] | overrides)


Quantise = Callable[[str, np.ndarray], str]  # a tensor's name and floats -> the name of its type


def all_as(name: str) -> Quantise:
    """Matrices in one type, vectors in F32, as the converter has them."""
    return lambda _, data: name if data.ndim > 1 else "F32"


_FLOATS = all_as("F32")


def write(
    model: Any,
    path: Path,
    arch: str,
    quantise: Quantise = _FLOATS,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    version: int = 3,
    most: int = 0,
) -> Path:
    """extra: more of the metadata, None leaves an entry out. tensors: more of them, in F32. most: tensors in a part; the
    first part then."""
    said = {**_metadata(model.config, arch), **(extra or {})}
    writer = gguf.GGUFWriter(path, said.pop("general.architecture", arch), split_max_tensors=most)
    config = model.config
    for key, value in said.items():
        _add(writer, key, value)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in _tensors(model, arch):
        if arch == "gemma-embedding":
            name = "model." + name
        new = names.get_name(name, (".weight", ".bias"))
        assert new is not None, name
        data = tensor.float().contiguous().numpy()
        kind = gguf.GGMLQuantizationType[quantise(new, data)]
        packed = data if kind.name == "F32" else gguf.quants.quantize(data, kind)
        writer.add_tensor(new, packed, raw_dtype=kind)
    if (factors := _factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if most:
        return min(path.parent.glob(f"{path.stem}-*.gguf"))
    if version == 2:
        data = bytearray(path.read_bytes())
        data[4:8] = (2).to_bytes(4, "little")
        path.write_bytes(data)
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    if type(value) is int and value < 0:
        writer.add_int32(key, value)
    elif value is not None:
        kind[type(value)](key, value)


def _metadata(config: Any, arch: str) -> dict[str, Any]:
    said = config.to_dict()
    rope = said.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    sizes = {
        "block_count": said["num_hidden_layers"], "context_length": said["max_position_embeddings"],
        "embedding_length": said["hidden_size"], "feed_forward_length": said["intermediate_size"],
        "attention.head_count": said["num_attention_heads"], "attention.head_count_kv": said.get("num_key_value_heads"),
        "attention.key_length": said.get("head_dim"), "attention.value_length": said.get("head_dim"),
        "attention.layer_norm_epsilon": said.get("layer_norm_eps", said.get("norm_eps")),
        "attention.layer_norm_rms_epsilon": said.get("rms_norm_eps"),
        "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "tokenizer.ggml.padding_token_id": said.get("pad_token_id"),
        "tokenizer.ggml.token_type_count": said.get("type_vocab_size"),
    }  # fmt: skip
    if full.get("rope_type") in ("linear", "yarn"):
        sizes |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": full["factor"]}
        sizes["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
    if arch in ("bert", "nomic-bert", "modern-bert", "gemma-embedding") or said.get("is_causal") is False:
        sizes["attention.causal"] = False
    if arch == "modern-bert":
        sizes |= {"attention.sliding_window": said["local_attention"], "rope.scaling.type": "none"}
        every = said["layer_types"].index("full_attention", 1)
        sizes["attention.sliding_window_pattern"] = every
    if arch in ("gemma3", "gemma-embedding"):
        sizes["attention.sliding_window"] = said["sliding_window"]
    if arch == "llama":
        sizes["rope.dimension_count"] = said["head_dim"]
    return {key if key.startswith("tokenizer.") else f"{arch}.{key}": value for key, value in sizes.items()}


def _tensors(model: Any, arch: str) -> Any:
    """As published: what save_pretrained writes, changed as the converter changes it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        state = load_file(Path(folder) / "model.safetensors")
    config = model.config
    tied = getattr(config, "tie_word_embeddings", False)
    for name, tensor in state.items():
        if "pooler." in name or "position_ids" in name or (tied and name == "lm_head.weight"):
            continue
        if arch in ("llama", "smollm3") and ".q_proj." in name:
            tensor = _interleaved(tensor, config.num_attention_heads)
        if arch in ("llama", "smollm3") and ".k_proj." in name:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        yield name, tensor[0] if tensor.shape[0] == 1 else tensor  # ggml has no side of 1 there


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return torch.stack(tensor.unflatten(0, (heads, 2, -1)).unbind(1), dim=2).flatten(0, 2)


def _factors(config: Any) -> np.ndarray | None:
    """Llama 3's divisors of frequencies."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    dim = config.head_dim
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    return (plain / scaled).float().numpy()


def vocabulary(folder: Path, kind: str, **special: str) -> dict[str, Any]:
    """The metadata of a folder's fast tokenizer. kind: of tokenizer.ggml.model. special: tokens, by the names of llama.cpp
    ("bos")."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = document["model"], {one["content"]: one for one in document["added_tokens"]}
    scores = {pair[0]: pair[1] for pair in model["vocab"]} if model["type"] == "Unigram" else {}
    ids = {token: i for i, token in enumerate(scores)} if scores else dict(model["vocab"])
    ids |= {token: one["id"] for token, one in added.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    types = [(3 if added[token]["special"] else 4) if token in added else 1 for token in tokens]
    found: dict[str, Any] = {"model": kind, "token_type": types}
    if kind == "bert":  # a mark for the first piece of a word, none for the others
        marked = (t if kind == 3 else t[2:] if t.startswith("##") else "\u2581" + t for t, kind in zip(tokens, types, strict=True))
        found["tokens"] = list(marked)
    else:
        found["tokens"] = tokens
    if kind == "gpt2":
        found["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    if scores:
        found["scores"] = [float(scores.get(token, 0.0)) for token in tokens]
        found["precompiled_charsmap"] = _charsmap(document["normalizer"])
    found |= {f"{name}_token_id": ids[token] for name, token in special.items()}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value not in (None, [])}


def _charsmap(normalizer: Any) -> list[int]:
    parts = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    return [byte for one in parts for byte in base64.b64decode(one.get("precompiled_charsmap") or "")]
