"""What a folder says of the transformer itself: sentence_bert_config.json, with lengths, case and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftbert.input_file import read_json_object
from ftbert.text.checks import length_in
from ftbert.text.towers import without_modality

# Older folders name the file after the architecture. The first that is not empty counts.
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Arguments for transformers' model that do not change its numbers in float32.
_HARMLESS = {
    "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype",
    "trust_remote_code", "use_safetensors",
}  # fmt: skip
# Of a download; the files are here.
_HUB_ARGUMENTS = {"trust_remote_code", "token", "cache_dir", "revision", "local_files_only"}
# Names of files: they would let a folder's own config read any other file.
_FILE_ARGUMENTS = ("_file", "_files", "_dir", "_path", "subfolder", "proxies", "config", "_commit_hash")


def sentence_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file and what it says, {} where there is none."""
    paths = [folder / name for name in _LENGTH_FILES if (folder / name).exists()]
    path = next((path for path in paths if read_json_object(path)), folder / _LENGTH_FILES[0])
    return path, read_json_object(path) if path in paths else {}


def read_transformer(
    folder: Path, task: str, output: str, method_output: str, *, expands: bool = False, chats: bool = False,
    features: bool = False,
) -> dict[str, Any]:
    """Lengths, case, and arguments for the tokenizer. task, output, method_output: what the file may say of the model's
    own. expands: queries may be longer by tokens of their own; chats: texts may go through the chat template; features:
    the model gives vectors of texts by itself."""
    path, config = sentence_config(folder)
    if features:
        config = without_modality(config)
    for key in (*(() if expands else ("query_expansion",)), "processing_kwargs", "tokenizer_name_or_path"):
        if config.get(key):
            raise ValueError(f"{path}: {key} is not supported")
    for key, only in (("transformer_task", task), ("module_output_name", output)):
        if config.get(key, only) != only:
            raise ValueError(f"{path}: {key} {config[key]!r} is not supported; expected {only}")
    text = {"method": "forward", "method_output_name": method_output}
    allowed = [{"text": text}, {"text": text, "message": {**text, "format": "flat"}}][: 1 + chats]
    if config.get("modality_config", allowed[0]) not in allowed:
        raise ValueError(f"{path}: modality_config is not supported; expected text through forward")
    given = _arguments(path, config)
    for kind, known in (("config", _HUB_ARGUMENTS), ("model", _HARMLESS | _HUB_ARGUMENTS)):
        if unknown := sorted(given[kind].keys() - known):
            raise ValueError(f"{path}: arguments for the {kind} are not supported: {', '.join(unknown)}")
    arguments = {key: value for key, value in given["tokenizer"].items() if key not in _HUB_ARGUMENTS}
    if elsewhere := sorted(key for key in arguments if key.endswith(_FILE_ARGUMENTS)):
        raise ValueError(f"{path}: arguments for the tokenizer are not supported: {', '.join(elsewhere)}")
    # The tokenizer's own argument goes first, as in sentence-transformers.
    longest = length_in(path, config, "max_seq_length")
    own = length_in(path, arguments, "model_max_length")
    return {
        "max_length": longest if own is None else own,
        "query_length": length_in(path, config, "query_length"),
        "document_length": length_in(path, config, "document_length"),
        "lower_case": bool(config.get("do_lower_case", False)),
        "tokenizer_arguments": arguments,
    }


def _arguments(path: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For transformers' model, config and tokenizer; each has an older name, which goes first."""
    found = {}
    for kind, names in {
        "model": ("model_args", "model_kwargs"),
        "config": ("config_args", "config_kwargs"),
        "tokenizer": ("tokenizer_args", "processor_kwargs"),
    }.items():
        value: Any = next((config[name] for name in names if config.get(name)), {})
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {names[1]} must be an object; got {value!r}")
        found[kind] = value
    return found
