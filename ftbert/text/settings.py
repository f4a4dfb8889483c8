"""What a model folder says about turning text into one vector, read as sentence-transformers reads it.

The files: `modules.json`, which names the folders of the others, `config_sentence_transformers.json`,
`sentence_bert_config.json`, `1_Pooling/config.json`. Without `modules.json` the others do not count: such a folder gets
mean pooling and the tokenizer's own maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from ftbert.input_file import read_json_object, read_json_value, shown

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len", "last")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

_MODEL_TYPE = "SentenceTransformer"
_NOTHING = ("Dropout",)  # modules that do nothing at inference

# How sentence-transformers spells the pooling, as booleans (before 5.x) and as one string (since).
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_POOLING_NAMES = {
    "cls": "cls", "mean": "mean", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last",
}  # fmt: skip

# Older folders name the file after the architecture. The first that is not empty counts.
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_ARGUMENTS = ("model", "tokenizer", "config", "processor")
# Arguments for transformers' model that do not change its numbers in float32.
_HARMLESS = {
    "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype",
    "trust_remote_code", "use_safetensors",
}  # fmt: skip
# Of a download; the files are here.
_HUB_ARGUMENTS = {"trust_remote_code", "token", "cache_dir", "revision", "local_files_only"}
# Names of files: they would let a folder's own config read any other file.
_FILE_ARGUMENTS = ("_file", "_files", "_dir", "_path", "subfolder", "proxies", "config", "_commit_hash")


@dataclass(frozen=True)
class TextSettings:
    """How a model wants its text treated.

    pooling: one of `POOLINGS`. include_prompt: the prompt's tokens are pooled too. normalize: the folder ends in a
    Normalize module. max_length, query_length, document_length: tokens with the special ones, None where the
    folder does not say. lower_case: lower the text before the tokenizer. tokenizer_arguments: for AutoTokenizer.
    prompts: by name; default_prompt_name: the one put before every text. truncate_dim: entries kept of a vector.
    similarity: one of `SIMILARITIES`.
    """

    pooling: str = "mean"
    include_prompt: bool = True
    normalize: bool = False
    max_length: int | None = None
    query_length: int | None = None
    document_length: int | None = None
    lower_case: bool = False
    tokenizer_arguments: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, str] = field(default_factory=lambda: {"query": "", "document": ""})
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    similarity: str = "cosine"

    @property
    def default_prompt(self) -> str:
        """Put before every text where the caller names no prompt."""
        return "" if self.default_prompt_name is None else self.prompts[self.default_prompt_name]

    @classmethod
    def from_folder(cls, folder: Path) -> TextSettings:
        """Reads the settings of `folder`. ValueError names the file that is broken or asks for something else."""
        head = folder / "config_sentence_transformers.json"
        values = read_json_object(head) if (folder / "modules.json").exists() and head.exists() else {}
        # What another kind of model saved (a CrossEncoder) is not used for embeddings.
        if not (folder / "modules.json").exists() or values.get("model_type", _MODEL_TYPE) != _MODEL_TYPE:
            return cls(pooling=_default_pooling(folder))
        pooling, normalize = _modules(folder)
        return cls(
            **_pooling(pooling / "config.json"),
            normalize=_normalizes(normalize),
            **_transformer(folder),
            **_sentence_settings(head, values),
        )


def _modules(folder: Path) -> tuple[Path, list[Path]]:
    """The folder of the Pooling, and that of each Normalize behind it. ValueError for other chains than Transformer,
    Pooling and any Normalize, and for a path that leads out of the folder."""
    where = folder / "modules.json"
    modules = read_json_value(where)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise ValueError(f"{where}: expected a list of modules, each with a 'type'")
    names = [module["name"] for module in modules if "name" in module]
    if len({str(name) for name in names}) != len(names):
        raise ValueError(f"{where}: two modules have one name")
    found: list[tuple[str, Path]] = []
    for module in modules:
        kind, path = _kind(str(module["type"]), where), _inside(folder, module.get("path", ""), where)
        if kind not in _NOTHING:
            found.append((kind, path))
    if [kind for kind, _ in found[:2]] != ["Transformer", "Pooling"] or any(k != "Normalize" for k, _ in found[2:]):
        chain = ", ".join(kind for kind, _ in found) or "nothing"
        raise ValueError(f"{where}: expected Transformer, Pooling and at most Normalize behind them; got {chain}")
    if found[0][1] != folder:
        raise ValueError(f"{where}: the Transformer is in {found[0][1]}; only one in the folder itself is loaded")
    return found[1][1], [path for _, path in found[2:]]


def _kind(full: str, where: Path) -> str:
    # The class has moved between packages over the releases; only its own name is stable. A class from elsewhere
    # (custom_st.Transformer) may compute anything, whatever its name.
    name = full.rsplit(".", 1)[-1] if full.startswith("sentence_transformers.") else full
    if name not in ("Transformer", "Pooling", "Normalize", *_NOTHING):
        raise ValueError(
            f"{where}: module {full!r} is not supported; encode() knows Transformer, Pooling, Normalize. "
            "Call the model itself for last_hidden_state and apply the module to that"
        )
    return name


def _inside(folder: Path, path: Any, where: Path) -> Path:
    parts = PureWindowsPath(path) if isinstance(path, str) else None
    if parts is None or parts.anchor or ".." in parts.parts or "\0" in path:
        raise ValueError(f"{where}: path {path!r} must stay inside the folder")
    return folder / path


def one_of(known: tuple[str, ...], name: str, value: Any) -> str:
    """`value` itself when it is one of these, else ValueError."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    return str(value)


def _default_pooling(folder: Path) -> str:
    """Of a folder without modules: a causal language model's is the last token."""
    path = folder / "config.json"
    config = read_json_object(path) if path.exists() else {}
    config = config.get("huggingface") or config  # a converted folder keeps the original one level down
    architectures = config.get("architectures") or [""] if isinstance(config, dict) else None
    if not isinstance(architectures, list):
        raise ValueError(f"{path}: architectures must be a list of names; got {shown(architectures)}")
    causal = str(architectures[0]).endswith("ForCausalLM") and config.get("is_causal", True)
    return "last" if causal else "mean"


def _pooling(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path}: missing, although modules.json names it")
    config = read_json_object(path)
    value = config.get("pooling_mode")
    if value is None:
        names = [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    else:
        names = value if isinstance(value, list) else [value]
    if len(names) != 1 or str(names[0]) not in _POOLING_NAMES:
        known = ", ".join(_POOLING_NAMES)
        raise ValueError(f"{path}: pooling {' + '.join(map(str, names))} is not supported; expected one of {known}")
    return {"pooling": _POOLING_NAMES[names[0]], "include_prompt": bool(config.get("include_prompt", True))}


def _normalizes(folders: list[Path]) -> bool:
    for folder in folders:
        path = folder / "config.json"
        config = read_json_object(path) if path.exists() else {}
        for key in ("module_input_name", "module_output_name"):
            if config.get(key) not in (None, "sentence_embedding"):
                raise ValueError(f"{path}: {key} {config[key]!r} is not supported; expected sentence_embedding")
    return bool(folders)


def _transformer(folder: Path) -> dict[str, Any]:
    """Of sentence_bert_config.json: lengths, case, and arguments for the tokenizer."""
    paths = [folder / name for name in _LENGTH_FILES if (folder / name).exists()]
    path = next((path for path in paths if read_json_object(path)), folder / _LENGTH_FILES[0])
    config = read_json_object(path) if path in paths else {}
    for key in ("query_expansion", "processing_kwargs", "tokenizer_name_or_path"):
        if config.get(key):
            raise ValueError(f"{path}: {key} is not supported")
    for key, only in (("transformer_task", "feature-extraction"), ("module_output_name", "token_embeddings")):
        if config.get(key, only) != only:
            raise ValueError(f"{path}: {key} {config[key]!r} is not supported")
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    if config.get("modality_config", {"text": text}) != {"text": text}:
        raise ValueError(f"{path}: modality_config is not supported; expected text through forward")
    given = _arguments(path, config)
    for kind, known in (("config", _HUB_ARGUMENTS), ("model", _HARMLESS | _HUB_ARGUMENTS)):
        if unknown := sorted(given[kind].keys() - known):
            raise ValueError(f"{path}: arguments for the {kind} are not supported: {', '.join(unknown)}")
    arguments = {key: value for key, value in given["tokenizer"].items() if key not in _HUB_ARGUMENTS}
    if elsewhere := sorted(key for key in arguments if key.endswith(_FILE_ARGUMENTS)):
        raise ValueError(f"{path}: arguments for the tokenizer are not supported: {', '.join(elsewhere)}")
    # The tokenizer's own argument goes first, as in sentence-transformers.
    longest = _length(path, config, "max_seq_length")
    own = _length(path, arguments, "model_max_length")
    return {
        "max_length": longest if own is None else own,
        "query_length": _length(path, config, "query_length"),
        "document_length": _length(path, config, "document_length"),
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


def positive(name: str, value: Any) -> int:
    """`value` itself; ValueError for what is no positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer; got {value!r}")
    return value


def _length(path: Path, config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else positive(f"{path}: {key}", config[key])


def read_prompts(
    path: Path, config: Mapping[str, Any], usual: Mapping[str, str]
) -> tuple[dict[str, str], str | None]:
    """Prompts by name, `usual` where the file has no other, and the name of the one put before every text."""
    stored = config.get("prompts") or {}
    if not isinstance(stored, dict) or not all(isinstance(text, str | None) for text in stored.values()):
        raise ValueError(f"{path}: prompts must be an object of texts; got {stored!r}")
    prompts = {**usual, **{name: text or "" for name, text in stored.items()}}
    name = config.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise ValueError(f"{path}: default_prompt_name {name!r} is none of the prompts: {', '.join(prompts)}")
    return prompts, name


def _sentence_settings(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Of config_sentence_transformers.json: prompts, width, similarity."""
    prompts, name = read_prompts(path, config, {"query": "", "document": ""})
    # One that is for other kinds of models, "maxsim", leaves the default.
    similarity = config.get("similarity_fn_name")
    return {
        "prompts": prompts,
        "default_prompt_name": name,
        "truncate_dim": _length(path, config, "truncate_dim"),
        "similarity": similarity if similarity in SIMILARITIES else "cosine",
    }
