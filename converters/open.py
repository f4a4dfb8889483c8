"""Opens whatever a model may be given as: a folder of ours or HuggingFace's, an ONNX file, a hub id, a live model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import (
    FORMAT,
    Checkpoint,
    StateDictSource,
    TensorSource,
    open_weights,
    read_checkpoint,
    read_json_object,
    transformer_folder,
)
from ftbert.converters.hub import fetch
from ftbert.converters.huggingface import MERGE, recognise
from ftbert.converters.onnx_check import check_graph
from ftbert.converters.onnx_source import onnx_of, open_onnx


def open_checkpoint(source: str | Path | torch.nn.Module) -> Checkpoint:
    """An ftbert or HuggingFace folder, an .onnx file or a folder with one, a hub id, or a live transformers model.

    ValueError lists every missing, extra and misshapen tensor at once; FileNotFoundError says what was looked for.
    """
    if isinstance(source, torch.nn.Module):
        return _from_live(source)
    onnx = onnx_of(source)
    if onnx is not None:
        document, initialisers, home = open_onnx(onnx)
        checkpoint = _from_huggingface(document, initialisers, home, str(onnx))
        check_graph(initialisers.file, initialisers.encoder, checkpoint)
        return checkpoint
    folder = find_folder(source)
    home = transformer_folder(folder)
    document = read_json_object(home / "config.json")
    tensors = open_weights(home)
    if document.get("format") == FORMAT:
        return read_checkpoint(folder, document, tensors)
    return _from_huggingface(document, tensors, folder, str(home / "config.json"))


def _from_live(model: torch.nn.Module) -> Checkpoint:
    if type(model).__module__.partition(".")[0] == "peft":
        raise ValueError(f"{type(model).__name__}: a model with PEFT adapters; {MERGE}")
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise TypeError(f"expected a transformers model, got {type(model).__name__} without a transformers config")
    document = config.to_dict()  # type: ignore[union-attr]
    if type(model).__module__.startswith("transformers."):
        document["architectures"] = [type(model).__name__]  # the config may name the class it was loaded as
    where = f"{type(model).__name__} (live)"
    return _from_huggingface(document, StateDictSource(model.state_dict(), where), None, where)


def find_folder(source: str | Path) -> Path:
    """The folder itself, or the hub's snapshot of it; FileNotFoundError says what was looked for."""
    folder = Path(source)
    if not str(source):
        raise FileNotFoundError("expected a model folder (with config.json and weights) or a hub id, got ''")
    if folder.is_dir():
        if (folder / "adapter_config.json").exists():
            raise ValueError(f"{folder}: a PEFT adapter (adapter_config.json), no whole model; {MERGE}")
        home = transformer_folder(folder)
        if not (home / "config.json").exists():
            raise FileNotFoundError(f"{home}: no config.json in this folder")
        return folder
    if folder.exists() or isinstance(source, Path) or str(source).count("/") > 1 or str(source).startswith((".", "/")):
        raise FileNotFoundError(f"{source}: expected a model folder (with config.json and weights) or a hub id")
    return fetch(str(source))


def _from_huggingface(document: dict[str, Any], tensors: TensorSource, folder: Path | None, where: str) -> Checkpoint:
    try:
        return recognise(document, tensors, folder)
    except ValueError as error:
        # What does not fit lies in the tensors or in the config; the former say so themselves.
        raise error if str(error).startswith(tensors.where) else ValueError(f"{where}: {error}") from error
