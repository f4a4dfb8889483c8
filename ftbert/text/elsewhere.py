"""What sentence-transformers' models and their calls have and ftbert's do not: for each name what to use instead."""

from __future__ import annotations

from typing import Any

import torch

from ftbert.keywords import Answer
from ftbert.packed_model import PackedModel
from ftbert.text.checks import one_of

_TRAIN = "ftbert does not train: train with sentence-transformers, then ftbert.load(the folder that it saves)"
_POOL = "ftbert.load(folder, device=['cuda:0', 'cuda:1']) has several devices, which share the texts of each call"
_FOLDER = "`ftbert convert SRC DST` (ftbert.converters.convert) writes a folder for ftbert"
_PLACE = "model.to(device) returns the model there, and ftbert.load(folder, device=...) loads it there"
_DTYPE = "model.to(dtype='fp16') returns the model in it, and ftbert.load(folder, dtype=...) loads it so"
_WEIGHTS = "model.reference() is the transformers model with these weights"
_ADAPTER = "load the model that PEFT's merge_and_unload() returns"
_MODULES = "ftbert computes the modules that the folder's modules.json names, and has no objects for them"
_OPTIMIZED = "ftbert.optimize(SentenceTransformer(folder)) keeps that class, with this method, and makes it faster"

_ANSWERS: dict[tuple[str, ...], str] = {
    ("fit", "old_fit", "smart_batching_collate", "smart_batching_collate_text_only", "gradient_checkpointing_enable",
     "train", "training", "zero_grad", "requires_grad_", "get_sentence_features"): _TRAIN,
    ("eval",): "it never computes as in training, so the call is left out",
    ("start_multi_process_pool", "stop_multi_process_pool", "encode_multi_process"): _POOL,
    ("save", "save_pretrained", "merge"): _FOLDER,
    ("save_to_hub", "push_to_hub"): f"{_FOLDER}, which huggingface_hub's upload_folder uploads",
    ("load",): "ftbert.load(folder)",
    ("cuda", "cpu", "xpu", "ipu", "mtia", "to_empty"): _PLACE,
    ("half", "float", "bfloat16", "double", "type", "keep_in_fp32_modules",
     "set_keep_in_fp32_modules"): _DTYPE,
    ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict",
     "transformers_model", "model"): _WEIGHTS,
    ("forward",): "call the model itself: model(input_ids, attention_mask)",
    ("compile",): "its kernels are compiled already; torch.compile takes model.module",
    ("evaluate", "model_card_data", "model_card_data_class"): _OPTIMIZED,
    ("active_adapter", "active_adapters", "add_adapter", "check_peft_compatible_model", "delete_adapter",
     "disable_adapters", "enable_adapters", "get_adapter_state_dict", "has_peft_compatible_model", "load_adapter",
     "set_adapter"): _ADAPTER,
    ("append", "extend", "insert", "pop", "modules", "named_modules", "children", "named_children"): _MODULES,
    ("set_pooling_include_prompt",): "include_prompt of the folder's 1_Pooling/config.json says it",
    ("activation_fn", "default_activation_function", "get_default_activation_fn"):
        "predict(activation_fn=...); without one the folder's counts",
    ("get_model_kwargs", "module_kwargs"): "encode has no arguments for the folder's modules",
    ("trust_remote_code",): "ftbert never runs a folder's code",
    ("get_backend", "backend"): "ftbert computes by itself; model.info() says with what",
    ("clear_placement_cache", "is_hpu_graph_enabled"): "a model stays where it was loaded",
    ("modalities", "supports"): "ftbert reads text alone",
    ("is_singular_input",): "a str is one text, a tuple of two str one pair, a list several",
    ("decode",): "model.tokenizer.convert_ids_to_tokens names the entries of a sparse vector",
    ("intersection",): "the product of two sparse tensors of encode_sparse has the entries that both have",
    ("sparsity",): "the entries of a sparse tensor of encode_sparse are vectors.coalesce().values()",
    ("splade_pooling_chunk_size",): "max_tokens of encode_sparse bounds what is computed at once",
    ("SUPPORTED_SIMILARITY_FN_NAMES",): "similarity_fn_name is cosine, dot, euclidean or manhattan",
    ("model_type", "default_huggingface_organization"): "model.config and model.tasks say what it is",
}  # fmt: skip
ELSEWHERE = {name: words for names, words in _ANSWERS.items() for name in names}
_OF_MODULES = "ftbert.Model is no torch module; model.module is the scriptable one with its weights"


def answer(model: PackedModel, name: str) -> AttributeError:
    """For `name`, which `model` does not have."""
    found = ELSEWHERE.get(name)
    if found is None and not name.startswith("_") and hasattr(torch.nn.Module, name):
        found = _OF_MODULES
    kind = type(model).__name__
    return AttributeError(f"{kind} has no attribute {name!r}" + (f": {found}" if found else ""), name=name, obj=model)


def _same_place(model: PackedModel, device: Any) -> None:
    """ValueError for another device, or several, than those of the model; None and [] name none."""
    if device is None or device == []:
        return
    lies = [one.device for one in model.replicas]
    asked = [torch.device(one) for one in (device if isinstance(device, list | tuple) else [device])]
    gpus = [one for one in lies if one.type == "cuda"]
    asked = [gpus[0] if str(one) == "cuda" and gpus else one for one in asked]
    if asked != lies and asked != lies[:1]:
        raise ValueError(
            f"this model lies on {', '.join(map(str, lies))}, and device asks for {', '.join(map(str, asked))}: "
            "model.to(device) returns one there, and ftbert.load(folder, device=...) loads it there"
        )


# Arguments of sentence-transformers' encode, predict and rank that have another place here.
ARGUMENTS: dict[str, Answer] = {
    "device": _same_place,
    "pool": _POOL,
    "chunk_size": lambda model, value: None,  # of a pool's jobs
    "num_workers": lambda model, value: None,  # without effect there, too
    "processing_kwargs": "max_length= is here, other settings of the tokenizer in the folder's tokenizer_config.json",
}
ARGUMENTS_OF_TOKENS: dict[str, Answer] = {
    **ARGUMENTS,
    "normalize_embeddings": "the folder's Normalize says whether vectors of tokens have length 1",
    "output_value": lambda model, value: one_of(("token_embeddings",), "output_value", value),
    "token_pooling": "vectors of tokens are not merged here: give it those of encode_multi_vector",
}
INPUTS = {"inputs": "texts", "sentences": "texts"}
