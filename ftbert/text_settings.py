"""What a model folder says about turning text into one vector: pooling, length, case, prompt, normalisation.

The files are the ones sentence-transformers writes: `modules.json`, `1_Pooling/config.json`,
`sentence_bert_config.json`, `config_sentence_transformers.json`. A folder without them gets what
sentence-transformers gives it: mean pooling, the model's own maximum length.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len", "last")

# How sentence-transformers spells the pooling, as booleans (before 5.x) and as one string (since).
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_POOLING_NAMES = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}

# Older folders name the file after the architecture.
_LENGTH_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


@dataclass(frozen=True)
class TextSettings:
    """How a model wants its text treated.

    pooling: one of `POOLINGS`. normalize: the folder ends in a Normalize module.
    max_length: tokens with the special ones, None when the folder does not say.
    lower_case: lower the text before the tokenizer. prompt: put before every text, usually "".
    """

    pooling: str = "mean"
    normalize: bool = False
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""

    @classmethod
    def from_folder(cls, folder: Path) -> TextSettings:
        """Reads the settings of `folder`; ValueError when it asks for something ftbert does not do."""
        pooling_folder, transformer_folder, normalize = _modules(folder)
        length = _first_json([transformer_folder, folder], _LENGTH_FILES)
        return cls(
            pooling=_pooling(pooling_folder / "config.json"),
            normalize=normalize,
            max_length=_max_length(length, folder),
            lower_case=bool(length.get("do_lower_case", False)),
            prompt=_prompt(folder, pooling_folder),
        )


def check_pooling(name: str) -> str:
    """`name` itself when it is one of `POOLINGS`, else ValueError."""
    if name not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}; got {name!r}")
    return name


def _modules(folder: Path) -> tuple[Path, Path, bool]:
    """(folder of the pooling, folder of the transformer, is there a Normalize) from modules.json."""
    pooling, transformer, normalize = folder / "1_Pooling", folder, False
    path = folder / "modules.json"
    if not path.exists():
        return pooling, transformer, normalize
    modules = _read_json(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise ValueError(f"{path}: expected a list of modules, each with a 'type'")
    for module in modules:
        kind = str(module["type"])
        # The class has moved between packages over the releases; only its own name is stable. A class
        # from elsewhere (custom_st.Transformer) may compute anything, whatever its name.
        name = kind.rsplit(".", 1)[-1] if kind.startswith("sentence_transformers.") else kind
        where = folder / str(module.get("path", ""))
        if name == "Transformer":
            transformer = where
        elif name == "Pooling":
            pooling = where
        elif name == "Normalize":
            normalize = True
        elif name != "Dropout":  # does nothing at inference
            raise ValueError(
                f"{path}: module {kind!r} is not supported; encode() knows Transformer, Pooling, Normalize. "
                "Call the model itself for last_hidden_state and apply the module to that"
            )
    return pooling, transformer, normalize


def _pooling(path: Path) -> str:
    if not path.exists():
        return "mean"
    config = _read_object(path)
    if "pooling_mode" in config:
        value = config["pooling_mode"]
        names = [value] if isinstance(value, str) else list(value)
    else:
        names = [name for flag, name in _POOLING_FLAGS.items() if config.get(flag)] or ["mean"]
    names = [_POOLING_NAMES.get(name, name) for name in names]
    if len(names) != 1 or names[0] not in POOLINGS:
        raise ValueError(
            f"{path}: pooling {' + '.join(map(str, names))} is not supported; expected one of "
            f"{', '.join(POOLINGS)}. Pass pooling= to choose one of them"
        )
    return str(names[0])


def _max_length(config: dict[str, Any], folder: Path) -> int | None:
    """The folder's own limit: sentence_bert_config.json first, tokenizer_config.json after it."""
    value = config.get("max_seq_length")
    if value is None:
        value = _first_json([folder], ("tokenizer_config.json",)).get("model_max_length")
        # transformers writes 1e30 for "no limit".
        if not isinstance(value, (int, float)) or value > 1_000_000:
            return None
    if not isinstance(value, (int, float)) or int(value) < 1:
        raise ValueError(f"{folder}: max_seq_length must be a positive integer; got {value!r}")
    return int(value)


def _prompt(folder: Path, pooling_folder: Path) -> str:
    """The prompt sentence-transformers puts before every text when the caller names none."""
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return ""
    config = _read_object(path)
    name = config.get("default_prompt_name")
    prompt = (config.get("prompts") or {}).get(name) if name is not None else None
    if not prompt:
        return ""
    pooling = pooling_folder / "config.json"
    if pooling.exists() and _read_object(pooling).get("include_prompt") is False:
        raise ValueError(
            f"{path}: the default prompt {name!r} would have to be left out of the pooling "
            f"({pooling}: include_prompt is false), which is not supported"
        )
    return str(prompt)


def _first_json(folders: list[Path], names: tuple[str, ...]) -> dict[str, Any]:
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return _read_object(folder / name)
    return {}


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")  # noqa: TRY004
    return value


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # both broken JSON and broken UTF-8
        raise ValueError(f"{path}: not valid JSON ({error})") from error
