"""What `load` is given: a source, and arguments of other packages' classes, which are taken as others or answered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import Checkpoint
from ftbert.dtypes import parse_dtype
from ftbert.keywords import Answer, unknown

_CODE = "ftbert never runs a folder's code: a model type that it knows (docs/models.md) is read by its own table"
_CACHE = "the environment variable HF_HOME says where the hub's files are kept"
_EIGHT_BITS = "ftbert.load(folder, dtype='int8'), 'fp8' or 'q8_0'"
_MODULES = "ftbert.optimize(SentenceTransformer(modules=...)) makes such a model faster"
_CONFIG = "ftbert computes what the folder's config.json says: write it there (nomic's rotary_scaling_factor, too)"
_TOKENIZER = "load(max_length=...) is its length; all else is what the folder's tokenizer_config.json says"
_FILE = "ftbert.load takes the .onnx file itself, and of a folder HuggingFace's weights"

SAME = {"model_name_or_path": "source", "use_auth_token": "token", "torch_dtype": "dtype", "gguf_file": "filename"}
ANSWERS: dict[str, Answer] = {
    "trust_remote_code": _CODE,
    "cache_folder": _CACHE,
    "local_files_only": "a folder is never looked for on the hub, and HF_HUB_OFFLINE=1 keeps a hub id from it",
    "modules": _MODULES,
    "backend": lambda model, value: _check_backend(value),
    "processor_kwargs": _TOKENIZER,
    "tokenizer_kwargs": _TOKENIZER,
    "config_kwargs": _CONFIG,
    "model_card_data": "ftbert writes no model cards",
    "num_labels": "the head of the folder has the labels that it was trained with",
    "activation_fn": "predict(activation_fn=...); without one the folder's counts",
    "keep_in_fp32_modules": "norms, softmax and sums of products are float32 in every dtype",
    "max_active_dims": "encode_sparse(max_active_dims=...)",
}
# Of transformers' from_pretrained: what changes no number here, and what has another place.
_WITHOUT_EFFECT = ("add_pooling_layer", "low_cpu_mem_usage", "use_safetensors")
_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_MODEL_ANSWERS = {
    "trust_remote_code": _CODE,
    "cache_dir": _CACHE,
    "device_map": "ftbert.load(folder, device=..., parallel=...)",
    "quantization_config": _EIGHT_BITS,
    "rotary_scaling_factor": _CONFIG,
    "load_in_8bit": _EIGHT_BITS,
    "load_in_4bit": _EIGHT_BITS,
    "file_name": _FILE,
    "gguf_file": "ftbert.load(folder or hub id, filename=...)",
    "provider": _FILE,
    "export": _FILE,
    "revision": "ftbert.load(hub id, revision=...)",
    "token": "ftbert.load(hub id, token=...)",
}


def asked_dtype(dtype: str | torch.dtype | None, model_kwargs: Mapping[str, Any] | None) -> str | torch.dtype | None:
    """`dtype`, or the one that model_kwargs names. ValueError for an attention or a dtype that is none, TypeError for
    two dtypes and for what else has no meaning here."""
    found = dtype
    for name, value in (model_kwargs or {}).items():
        if name in ("dtype", "torch_dtype"):
            named = value if value in (None, "auto") else parse_dtype(value)
            given = dtype if dtype in (None, "auto") else parse_dtype(dtype)
            if None not in (value, dtype) and named != given:
                raise TypeError(f"load: dtype={dtype!r} and model_kwargs' {name}={value!r}; give one of them")
            found = dtype if named is None else named
        elif name == "attn_implementation":
            if value not in _ATTENTIONS:
                raise ValueError(
                    f"model_kwargs: attn_implementation: expected one of {', '.join(map(str, _ATTENTIONS))}, whose "
                    f"numbers ftbert's own attention gives; got {value!r}"
                )
        elif name not in _WITHOUT_EFFECT and value is not None and value is not False:
            if name in _MODEL_ANSWERS:
                raise TypeError(f"model_kwargs: {name}: {_MODEL_ANSWERS[name]}")
            known = ("dtype", "torch_dtype", "attn_implementation", *_WITHOUT_EFFECT)
            raise TypeError(unknown("model_kwargs", name, known))
    return found


def _check_backend(value: Any) -> None:
    if value not in (None, "torch"):
        raise TypeError(f"load has no argument 'backend': ftbert is its own; {_FILE}. Got {value!r}")


def checked_source(source: Any) -> str | Path | torch.nn.Module | Checkpoint:
    """TypeError for what cannot be one, with what the caller may have meant."""
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, torch.nn.Module):
        if type(source).__module__.startswith("sentence_transformers"):
            raise TypeError(
                f"load takes a transformers model, got a {type(source).__name__}: ftbert.optimize(model) makes it "
                "faster in place, and ftbert.load(its folder) loads it"
            )
        return source
    if not isinstance(source, str | Path):
        wanted = "a folder, an .onnx or .gguf file, a hub id or a transformers model"
        raise TypeError(f"load takes {wanted}, got {type(source)}")
    path = Path(source).expanduser()
    if path.suffix in (".safetensors", ".bin") and path.is_file():
        raise ValueError(f"{source}: load takes the folder that holds the weights and config.json: {path.parent}")
    return path if str(source).startswith("~") else source
