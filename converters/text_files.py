"""Which files of a model's folder say how text becomes ids and vectors, and whether a copy of them says the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ftbert.checkpoint import (
    MODULES,
    ROUTER_CONFIG,
    ROUTERS,
    Checkpoint,
    inner_modules,
    origin,
    read_json_value,
    read_modules,
    transformer_folder,
)
from ftbert.text import COLBERT_METADATA, MULTI_LINEAR, SPARSE_LINEAR, TOKENIZER_FILES, TextSettings, load_tokenizer

MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # best first
TABLE = "SparseStaticEmbedding"
LINEARS = (SPARSE_LINEAR, MULTI_LINEAR)
GENERATION = "generation_config.json"  # how texts are generated, and which tokens end them
_NEVER = ("config.json", "*.safetensors", "*.bin", "*.onnx", "*.index.json")  # whatever tokenizer_config.json names

# Case, accents, scripts, emoji, what tweets are cleaned of, unknown characters, special tokens, spaces.
_SAMPLES = (
    "Hello World, naïve CAFÉ", "Sinh_viên trường đại_học Công_nghệ .", "中文字符 and 日本語 🙂 👩‍👩‍👧",
    "@USER https://a.b #tag :)", "[MASK] <mask> [CLS] </s> mid</s>dle", "  two  spaces\ttab\nline ", "", "a" * 50,
)  # fmt: skip
_PAIR = ("a query", "Its Text")


def text_files(folder: Path) -> dict[str, Path]:
    """What is copied, by its place in the target: the tokenizer's files, from the folder of the transformer, and the
    settings and modules of sentence-transformers, and how texts are generated. ValueError as of `read_modules`."""
    home = transformer_folder(folder)
    paths = [path for pattern in (*TOKENIZER_FILES, "sentence_*_config.json") for path in sorted(home.glob(pattern))]
    found = {str(path.relative_to(home)): path for path in (*paths, *(home / name for name in named_files(home)))}
    found |= {name: folder / name for name in (MODULES, "config_sentence_transformers.json")}
    found |= {name: home / name for name in (*LINEARS, GENERATION, COLBERT_METADATA)}
    for module in read_modules(folder):
        if module.kind in ROUTERS:
            found[str((module.folder / ROUTER_CONFIG).relative_to(folder))] = module.folder / ROUTER_CONFIG
        for one in inner_modules(module):
            if one.folder not in (folder, home):
                names = ["config.json", *MODULE_WEIGHTS]
                if one.kind == TABLE:  # with a tokenizer of its own
                    names += [path.name for pattern in TOKENIZER_FILES for path in sorted(one.folder.glob(pattern))]
                found |= {str((one.folder / name).relative_to(folder)): one.folder / name for name in names}
    return {name: path for name, path in found.items() if path.exists()}


def model_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """All files of a model that results depend on, by name: weights, config.json and the files of `text_files`. None of
    a live model."""
    files = {path.name: path for path in checkpoint.source.files}
    if files and checkpoint.folder is not None:
        files |= {"config.json": transformer_folder(checkpoint.folder) / "config.json", **text_files(checkpoint.folder)}
    return {name: path for name, path in sorted(files.items()) if path.is_file()}


def named_files(home: Path) -> Iterator[str]:
    """Names of files in `home` that its tokenizer_config.json mentions; not all of them exist."""
    settings = _json(home / "tokenizer_config.json")
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key.endswith(("_file", "_files")):
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and PurePosixPath(name).name == name and "\0" not in name:
                    yield from [] if any(PurePosixPath(name).match(one) for one in _NEVER) else [name]


def _json(path: Path) -> Any:
    """None where there is no such file or it is broken: whoever reads texts with it says so."""
    try:
        return read_json_value(path)
    except (OSError, ValueError):
        return None


def check_copy(source: Path, copy: Path) -> tuple[str, str]:
    """ValueError where the folder `copy` makes other ids of texts than `source`, or none.

    Returns why the two were not compared, "" where they were or where `source` has no tokenizer, and the class of
    the tokenizer, "" without one.
    """
    try:
        expected = _reading(source)
    except FileNotFoundError:
        return "", ""
    except (ValueError, OSError) as error:
        return f"the tokenizer cannot be used here, so its files are copied as they are ({error})", ""
    needed = f"Does it need a file beside {', '.join(TOKENIZER_FILES)}?"
    try:
        found = _reading(copy)
    except (ValueError, OSError) as error:
        raise ValueError(f"{source}: the converted folder would have no tokenizer ({error}). {needed}") from error
    if wrong := [what for what, value in expected.items() if found[what] != value]:
        raise ValueError(f"{source}: the converted folder would read texts otherwise: {', '.join(wrong)}. {needed}")
    return "", str(expected["class"])


def _reading(folder: Path) -> dict[str, Any]:
    """By name: what texts become, and what their tokenizer is. Errors as of `load_tokenizer`."""
    home = transformer_folder(folder)
    try:
        settings = TextSettings.from_folder(folder)
    except ValueError:  # modules that encode() refuses
        settings = TextSettings(subfolder="" if home == folder else str(home.relative_to(folder)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever reads texts hears them
        tokenizer = load_tokenizer(folder, settings)
    try:
        ids = {f"ids of {text!r}": tokenizer(text)["input_ids"] for text in _SAMPLES}
        pair = dict(tokenizer(*_PAIR))
    except Exception as error:  # of no type of its own
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{origin(folder)}: its tokenizer cannot encode texts ({reason})") from error
    about = {"class": type(tokenizer).__name__, "longest text": tokenizer.model_max_length}
    return {**ids, f"ids of {_PAIR}": pair, **about, "special tokens": tokenizer.special_tokens_map}
