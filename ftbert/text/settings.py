"""What a model folder says about turning text into one vector, read as sentence-transformers reads it.

The files: `modules.json`, which names the folders of the others, `config_sentence_transformers.json`,
`sentence_bert_config.json`, `1_Pooling/config.json`, `2_Dense/config.json`. Without `modules.json` the others do not
count: such a folder gets mean pooling and the tokenizer's own maximum length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbert.input_file import read_json_object, shown
from ftbert.sentence_modules import MODULES, Module, read_modules, transformer_folder

# How a text's tokens become one vector: our name, sentence-transformers' one, and its flag before 5.x. Vectors of
# several flags stand in this order.
_POOLINGS = {
    "cls": ("cls", "pooling_mode_cls_token"),
    "max": ("max", "pooling_mode_max_tokens"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "mean_sqrt_len": ("mean_sqrt_len_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    "weightedmean": ("weightedmean", "pooling_mode_weightedmean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
}
POOLINGS = tuple(_POOLINGS)
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

_HEAD = "config_sentence_transformers.json"
_MODEL_TYPE, _SCORES_TYPE = "SentenceTransformer", "CrossEncoder"
_NOTHING = ("Dropout",)  # modules that do nothing at inference
# What a folder of vectors of another kind shows itself by: its model_type, or the class of any of its modules.
_SPARSE = (
    "SparseEncoder", "SpladePooling", "MLMTransformer", "SparseAutoEncoder", "CSRSparsity", "SparseStaticEmbedding",
)  # fmt: skip
_MULTI = ("MultiVectorEncoder", "ColBERT", "MultiVectorMask", "TokenPooling")
_HINT = "ftbert.optimize(SentenceTransformer(folder)) makes its encoder faster and leaves the other modules to torch"

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


class OtherVectors(ValueError):
    """A folder's model is made for vectors that encode does not give: sparse ones, or one for each token."""


@dataclass(frozen=True)
class DenseSettings:
    """activation(linear(x)), with x added where `residual`; x is brought to length 1 before where `normalized`.

    folder: of its weights. inputs, outputs: entries of a vector. activation: a class of torch.nn, with its module.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool
    normalized: bool


@dataclass(frozen=True)
class TextSettings:
    """How a model wants its text treated.

    pooling: one of `POOLINGS`, or several joined by "+", whose vectors stand one after the other. include_prompt: the
    prompt's tokens are pooled too. dense: what the pooled vector goes through. normalize: the folder ends in a
    Normalize module. max_length, query_length, document_length: tokens with the special ones, None where the
    folder does not say. lower_case: lower the text before the tokenizer. tokenizer_arguments: for AutoTokenizer.
    prompts: by name; default_prompt_name: the one put before every text. truncate_dim: entries kept of a vector.
    similarity: one of `SIMILARITIES`. subfolder: where in the folder the tokenizer is. stated: the folder itself says
    how its vectors are made.
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
    dense: tuple[DenseSettings, ...] = ()
    subfolder: str = ""
    stated: bool = False

    @property
    def default_prompt(self) -> str:
        """Put before every text where the caller names no prompt."""
        return "" if self.default_prompt_name is None else self.prompts[self.default_prompt_name]

    def width(self, hidden: int, pooling: str | None = None) -> int:
        """Entries of a vector, before any truncation. pooling: another than the folder's. ValueError where a Dense
        module does not fit what comes before it."""
        width = hidden * len((pooling or self.pooling).split("+"))
        for dense in self.dense:
            if dense.inputs != width:
                raise ValueError(f"{dense.folder}: takes vectors of {dense.inputs} entries, gets {width}")
            width = dense.outputs
        return width

    @classmethod
    def from_folder(cls, folder: Path) -> TextSettings:
        """As SentenceTransformer reads `folder`. ValueError names the file that is broken or asks for what encode does
        not do; `OtherVectors` names what the model is for."""
        modules, values = read_modules(folder), _head(folder)
        _refuse_other_vectors(folder, modules, values)
        home = transformer_folder(folder)
        subfolder = "" if home == folder else str(home.relative_to(folder))
        # What another kind of model saved (a CrossEncoder) is not used for embeddings.
        if not modules or values.get("model_type", _MODEL_TYPE) != _MODEL_TYPE:
            return cls(pooling=_default_pooling(home), subfolder=subfolder)
        pooling, behind = _chain(folder / MODULES, modules)
        dense, normalize = _behind(behind)
        return cls(
            **_pooling(pooling / "config.json"),
            dense=dense,
            normalize=normalize,
            subfolder=subfolder,
            stated=True,
            **_transformer(home, "feature-extraction", "token_embeddings", "last_hidden_state"),
            **_sentence_settings(folder / _HEAD, values),
        )

    @classmethod
    def for_scores(cls, folder: Path) -> TextSettings:
        """As CrossEncoder reads `folder`: prompts, lengths, case and arguments for the tokenizer. ValueError as of
        `from_folder`."""
        modules, values = read_modules(folder), _head(folder)
        home = transformer_folder(folder)
        subfolder = "" if home == folder else str(home.relative_to(folder))
        if not modules or values.get("model_type") != _SCORES_TYPE:
            return cls(prompts={}, subfolder=subfolder)
        if [module.kind for module in modules] != ["Transformer"]:
            kinds = ", ".join(module.kind for module in modules)
            raise ValueError(
                f"{folder / MODULES}: predict computes a Transformer with its head alone; got {kinds}. "
                "ftbert.optimize(CrossEncoder(folder)) makes its encoder faster and leaves the other modules to torch"
            )
        prompts, name = read_prompts(folder / _HEAD, values, {})
        return cls(
            prompts=prompts,
            default_prompt_name=name,
            subfolder=subfolder,
            **_transformer(home, "sequence-classification", "scores", "logits"),
        )


def _head(folder: Path) -> dict[str, Any]:
    """What config_sentence_transformers.json says; without modules.json it does not count."""
    return read_json_object(folder / _HEAD) if (folder / MODULES).exists() and (folder / _HEAD).exists() else {}


def _refuse_other_vectors(folder: Path, modules: list[Module], values: Mapping[str, Any]) -> None:
    kinds = {str(values.get("model_type")), *(module.kind for module in modules)}
    pylate = any(module.full.startswith("pylate.") for module in modules)
    if pylate or kinds.intersection(_MULTI) or "HF_ColBERT" in _architectures(transformer_folder(folder)):
        raise OtherVectors(
            f"{folder}: a model of one vector for each token (ColBERT), and encode gives one for each text; "
            "sentence-transformers' MultiVectorEncoder computes it, ftbert does not yet"
        )
    if kinds.intersection(_SPARSE):
        raise OtherVectors(
            f"{folder}: a model of sparse vectors (SPLADE), and encode gives dense ones; sentence-transformers' "
            "SparseEncoder computes it, ftbert does not yet"
        )


def _chain(where: Path, modules: list[Module]) -> tuple[Path, list[Module]]:
    """The folder of the Pooling, and the modules behind it. ValueError for other chains than Transformer, Pooling and
    any Dense and Normalize."""
    known = ("Transformer", "Pooling", "Dense", "Normalize")
    found = [module for module in modules if module.kind not in _NOTHING]
    for module in found:
        if module.kind not in known:
            raise ValueError(
                f"{where}: module {module.full!r} is not supported; encode() knows {', '.join(known)}. {_HINT}"
            )
    kinds = [module.kind for module in found]
    if kinds[:2] != ["Transformer", "Pooling"] or not {"Dense", "Normalize"}.issuperset(kinds[2:]):
        raise ValueError(
            f"{where}: expected Transformer, Pooling and behind them only Dense and Normalize; got "
            f"{', '.join(kinds) or 'nothing'}. {_HINT}"
        )
    return found[1].folder, found[2:]


def _behind(modules: list[Module]) -> tuple[tuple[DenseSettings, ...], bool]:
    """The Dense modules, and whether a Normalize comes last."""
    dense: list[DenseSettings] = []
    normalized = False
    for module in modules:
        path = module.folder / "config.json"
        config = read_json_object(path) if path.exists() else {}
        for key in ("module_input_name", "module_output_name"):
            if config.get(key) not in (None, "sentence_embedding"):
                raise ValueError(f"{path}: {key} {config[key]!r} is not supported; expected sentence_embedding")
        if module.kind == "Dense":
            dense.append(_dense(path, config, normalized))
        normalized = module.kind == "Normalize"
    return tuple(dense), normalized


def _dense(path: Path, config: Mapping[str, Any], normalized: bool) -> DenseSettings:
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(activation, str):
        raise ValueError(f"{path}: activation_function must be the name of a class; got {shown(activation)}")
    return DenseSettings(
        path.parent,
        positive(f"{path}: in_features", config.get("in_features")),
        positive(f"{path}: out_features", config.get("out_features")),
        bool(config.get("bias", True)),
        activation,
        bool(config.get("use_residual", False)),
        normalized,
    )


def one_of(known: tuple[str, ...], name: str, value: Any) -> str:
    """`value` itself when it is one of these, else ValueError."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
    return str(value)


def _default_pooling(folder: Path) -> str:
    """Of a folder without modules: a causal language model's is the last token."""
    architectures = _architectures(folder)
    causal = architectures[:1] and str(architectures[0]).endswith("ForCausalLM")
    return "last" if causal and _config(folder).get("is_causal", True) else "mean"


def _architectures(folder: Path) -> list[Any]:
    config = _config(folder)
    architectures = config.get("architectures") or [] if isinstance(config, dict) else None
    if not isinstance(architectures, list):
        raise ValueError(f"{folder / 'config.json'}: architectures must be a list of names; got {shown(architectures)}")
    return architectures


def _config(folder: Path) -> Any:
    path = folder / "config.json"
    config = read_json_object(path) if path.exists() else {}
    return config.get("huggingface") or config  # a converted folder keeps the original one level down


def _pooling(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path}: missing, although modules.json names it")
    config = read_json_object(path)
    value = config.get("pooling_mode")
    if value is None:
        modes = [mode for mode, (_, flag) in _POOLINGS.items() if config.get(flag)] or ["mean"]
    else:
        ours = {name: mode for mode, (name, _) in _POOLINGS.items()}
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        if not names or not set(names) <= set(ours):
            known = ", ".join(ours)
            raise ValueError(f"{path}: pooling {' + '.join(names)} is not supported; expected any of {known}")
        modes = [ours[name] for name in names]
    return {"pooling": "+".join(modes), "include_prompt": bool(config.get("include_prompt", True))}


def _transformer(folder: Path, task: str, output: str, method_output: str) -> dict[str, Any]:
    """Of sentence_bert_config.json: lengths, case, and arguments for the tokenizer. task, output, method_output: what
    it may say of the model's own."""
    paths = [folder / name for name in _LENGTH_FILES if (folder / name).exists()]
    path = next((path for path in paths if read_json_object(path)), folder / _LENGTH_FILES[0])
    config = read_json_object(path) if path in paths else {}
    for key in ("query_expansion", "processing_kwargs", "tokenizer_name_or_path"):
        if config.get(key):
            raise ValueError(f"{path}: {key} is not supported")
    for key, only in (("transformer_task", task), ("module_output_name", output)):
        if config.get(key, only) != only:
            raise ValueError(f"{path}: {key} {config[key]!r} is not supported; expected {only}")
    text = {"method": "forward", "method_output_name": method_output}
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
