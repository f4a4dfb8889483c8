"""Opens whatever a model may be given as: a folder of ours or HuggingFace's, a file of ONNX or GGUF, a hub id, a live
model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import (
    FORMAT,
    Checkpoint,
    StateDictSource,
    TensorSource,
    exists,
    in_transformers_words,
    open_weights,
    read_checkpoint,
    read_json_object,
    transformer_folder,
)
from ftbert.converters.adapters import ADAPTER, AdaptedSource, Adapter, adapter_of, has_weights, text_folder
from ftbert.converters.clip_families import text_part
from ftbert.converters.families import find_family
from ftbert.converters.gguf_source import gguf_of, open_gguf
from ftbert.converters.gliner import GLINER, open_gliner
from ftbert.converters.hub import fetch, fetch_small
from ftbert.converters.hub_name import HubName, is_gguf
from ftbert.converters.huggingface import MERGE, recognise
from ftbert.converters.onnx_check import check_graph
from ftbert.converters.onnx_int8 import with_int8
from ftbert.converters.onnx_source import onnx_of, open_onnx
from ftbert.converters.own_code import read_config, todays_words
from ftbert.converters.static_embedding import StaticTable, static_config, with_sizes
from ftbert.converters.task_adapters import with_tasks


def open_checkpoint(
    source: str | Path | torch.nn.Module | Checkpoint,
    *,
    filename: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    verify: bool = True,
    task: str | None = None,
) -> Checkpoint:
    """An ftbert or HuggingFace folder, an .onnx or .gguf file or a folder with one, a hub id, or a live transformers
    model. A checkpoint is one that is open.

    filename: of a .gguf file in the folder or the repository, or a pattern of it. revision, token: of a hub id, see
    `fetch`. verify: see `open_weights`. task: whose adapter is merged. ValueError lists every missing and misshapen
    tensor at once; FileNotFoundError says what was looked for, PermissionError whose it is.
    """
    found = source if isinstance(source, Checkpoint) else _opened(source, filename, revision, token, verify)
    return found if task is None else found.at(task)


def _opened(
    source: str | Path | torch.nn.Module, filename: str | None, revision: str | None, token: str | None, verify: bool
) -> Checkpoint:
    if isinstance(source, torch.nn.Module):
        if filename is not None:
            raise ValueError(f"filename {filename!r}: is for a folder or a model of the hub")
        _expect_no_hub(f"a live {type(source).__name__}", revision, token)
        return _from_live(source)
    if filename is not None and exists(Path(source)):
        source, filename = _file_in(Path(source), filename), None
    onnx = onnx_of(source)
    if onnx is not None:
        _expect_no_hub(str(onnx), revision, token)
        document, initialisers, home = open_onnx(onnx)
        checkpoint = _from_huggingface(document, initialisers, home, str(onnx))
        check_graph(initialisers.file, initialisers.encoder, initialisers.head, checkpoint)
        return with_int8(checkpoint, initialisers)
    gguf = gguf_of(source)
    if gguf is not None:
        _expect_no_hub(str(gguf), revision, token)
        return _from_gguf(gguf)
    folder = find_folder(source, revision, token, filename)
    if is_gguf(folder) and folder.is_file():
        return _from_gguf(folder)
    if exists(folder / GLINER):
        return open_gliner(folder, open_weights(folder, verify), lambda name: _backbone(folder, name, token))
    home = transformer_folder(folder)
    if (adapter := adapter_of(home)) is not None:
        return _adapted(folder, home, adapter, token, verify)
    if (static := static_config(folder)) is not None:
        table = StaticTable(open_weights(home, verify))
        return _from_huggingface(with_sizes(static, table), table, folder, str(home))
    document, where = read_json_object(home / "config.json"), str(home / "config.json")
    if document.get("format") == FORMAT:
        return read_checkpoint(folder, document, open_weights(home, verify))
    try:
        document = read_config(document)  # before its weights are looked for
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error

    recognised = partial(_from_huggingface, document, folder=folder, where=where)
    return with_tasks(document, open_weights(home, verify), home, recognised, verify)


def _adapted(folder: Path, home: Path, adapter: Adapter, token: str | None, verify: bool) -> Checkpoint:
    """An adapter's base with the adapter merged into its weights. folder: of the adapter."""
    where = str(adapter.where)
    base = home if exists(home / "config.json") and has_weights(home) else None
    if base is None:
        if not adapter.base:
            raise ValueError(f"{where}: base_model_name_or_path names no base, and no weights lie beside the adapter")
        try:
            base = find_folder(adapter.base, adapter.revision if not exists(Path(adapter.base)) else None, token)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{where}: base_model_name_or_path: {error}") from error
    inner = transformer_folder(base)
    document = read_json_object(inner / "config.json")
    if document.get("format") == FORMAT:
        raise ValueError(f"{where}: its base {base} is a folder of ftbert convert; expected one of HuggingFace")
    if exists(inner / ADAPTER) and inner != home:
        raise ValueError(f"{where}: its base {base} has an adapter, too; merge that with ftbert convert")
    try:
        document = read_config(adapter.document(todays_words(document)))
    except ValueError as error:
        raise ValueError(f"{inner / 'config.json'}: {error}") from error
    tensors = AdaptedSource(open_weights(inner, verify), adapter, find_family(document).prefixes, verify)
    return _from_huggingface(document, tensors, text_folder(folder, home, base), str(inner / "config.json"))


def _from_gguf(path: Path) -> Checkpoint:
    document, tensors = open_gguf(path)
    return _from_huggingface(document, tensors, tensors.text.path, str(path))


def _file_in(folder: Path, filename: str) -> Path:
    """The .gguf file that is meant, in a folder of this machine."""
    if not folder.is_dir():
        raise ValueError(f"filename {filename!r}: is for a folder or a model of the hub, and {folder} is a file")
    files = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return folder / (HubName(str(folder), filename).choose(files) or "")


def _expect_no_hub(source: str, revision: str | None, token: str | None) -> None:
    for name, value in (("revision", revision), ("token", token)):
        if value is not None:
            raise ValueError(f"{name}: is for a model of the hub, and {source} is none")


def _from_live(model: torch.nn.Module) -> Checkpoint:
    if type(model).__module__.partition(".")[0] == "peft":
        raise ValueError(f"{type(model).__name__}: a model with PEFT adapters; {MERGE}")
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise TypeError(f"expected a transformers model, got {type(model).__name__} without a transformers config")
    document = config.to_dict()  # type: ignore[union-attr]
    if type(model).__module__.startswith("transformers."):
        # The config may name the class that it was loaded as, and code that was not.
        document = {key: value for key, value in document.items() if key != "auto_map"}
        document["architectures"] = [type(model).__name__]
        document = text_part(document)
    else:  # whatever its code computes is compared with
        document = in_transformers_words(document)
    where = f"{type(model).__name__} (live)"
    made = _from_huggingface(document, StateDictSource(model.state_dict(), where), None, where)
    generation = getattr(model, "generation_config", None)
    # Without the defaults of transformers, which nobody has said.
    return made if generation is None else replace(made, generation=generation.to_diff_dict())  # type: ignore[operator]


def find_folder(
    source: str | Path, revision: str | None = None, token: str | None = None, filename: str | None = None
) -> Path:
    """The folder itself, or the hub's snapshot of it or a .gguf file there; FileNotFoundError says what was looked
    for. filename: see `HubName`."""
    folder = Path(source)
    if not str(source):
        raise FileNotFoundError("expected a model folder (with config.json and weights) or a hub id, got ''")
    there = exists(folder)
    if there and folder.is_dir():
        _expect_no_hub(str(folder), revision, token)
        home = transformer_folder(folder)
        if exists(home / ADAPTER):
            return folder
        if static_config(folder) is None and not (exists(home / "config.json") or exists(folder / GLINER)):
            raise FileNotFoundError(f"{home}: no config.json in this folder")
        return folder
    name = None if there or isinstance(source, Path) else HubName.of(str(source), filename)
    if name is None:
        if not there and Path(source).suffix.lower() in (".gguf", ".onnx"):
            raise FileNotFoundError(f"{source}: no such file; one of the hub is named org/repo/file.gguf")
        raise FileNotFoundError(f"{source}: expected a model folder (with config.json and weights) or a hub id")
    return fetch(name, revision, token)


def _backbone(folder: Path, name: str, token: str | None) -> Path:
    """The small files of the model that a GLiNER's model_name names."""
    there = Path(name)
    if exists(there) and there.is_dir():
        return there
    repository = HubName.of(name, None)
    if repository is None:
        raise FileNotFoundError(f"{folder / GLINER}: model_name {name!r}: expected a folder or a hub id")
    return fetch_small(repository.repository, token)


def _from_huggingface(document: dict[str, Any], tensors: TensorSource, folder: Path | None, where: str) -> Checkpoint:
    try:
        return recognise(document, tensors, folder)
    except ValueError as error:
        # What does not fit lies in the tensors or in the config; the former say so themselves.
        raise error if str(error).startswith(tensors.where) else ValueError(f"{where}: {error}") from error
