"""A checkpoint ready to be read: its config and its tensors by our names, whatever format it came in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ftbert._library import load_library
from ftbert.config import FORMAT, CheckpointConfig
from ftbert.converters.family import Derived
from ftbert.converters.from_onnx import onnx_of, open_onnx
from ftbert.converters.huggingface import MERGE, complain, recognise
from ftbert.converters.onnx_check import check_graph
from ftbert.converters.tensors import StateDictSource, TensorSource, open_folder
from ftbert.hub import fetch
from ftbert.input_file import read_json_object

_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Checkpoint:
    """tensors[ours] = the names in `source` that are stacked along the rows to make it, or as derived[ours] says.

    Ours are the encoder's (csrc/model/weights.cpp) and the heads' (ftbert.config.HeadConfig).
    """

    config: CheckpointConfig
    source: TensorSource
    tensors: dict[str, tuple[str, ...]]
    folder: Path | None  # where the tokenizer's files are
    derived: dict[str, Derived] = field(default_factory=dict)

    def read(self, ours: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if ours in self.derived:
            exact = [self._part(name).float() for name in self.tensors[ours]]
            return self.derived[ours].make(self.config.encoder, exact).to(dtype)
        parts = [self._part(name).to(dtype) for name in self.tensors[ours]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, name: str) -> torch.Tensor:
        part = self.source.read(name)
        if part.dtype not in _REAL:
            raise ValueError(
                f"{self.source.where}: {name} is stored as {part.dtype}; quantized weights need their scales, which "
                "ftbert does not read: load the model that they were made from"
            )
        return part

    def items(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        for ours in self.tensors:
            yield ours, self.read(ours, dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.source.read(next(iter(self.tensors.values()))[0]).dtype


def open_checkpoint(source: str | Path | torch.nn.Module) -> Checkpoint:
    """An ftbert or HuggingFace folder, an .onnx file or a folder with one, a hub id, or a live transformers model.

    ValueError lists every missing, extra and misshapen tensor at once; FileNotFoundError says what was looked for.
    """
    load_library()
    if isinstance(source, torch.nn.Module):
        return _from_live(source)
    onnx = onnx_of(source)
    if onnx is not None:
        document, initialisers, home = open_onnx(onnx)
        checkpoint = _from_huggingface(document, initialisers, home, str(onnx))
        check_graph(initialisers.interface, checkpoint)
        return checkpoint
    folder = find_folder(source)
    document = read_json_object(folder / "config.json")
    tensors = open_folder(folder)
    if document.get("format") == FORMAT:
        config = CheckpointConfig.parse(document, str(folder / "config.json"))
        try:
            shapes = config.shapes()
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None
        complain(tensors.where, shapes, tensors.shapes(), ignored=set())
        return Checkpoint(config, tensors, {ours: (ours,) for ours in shapes}, folder)
    return _from_huggingface(document, tensors, folder, str(folder / "config.json"))


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
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder}: no config.json in this folder")
        return folder
    if folder.exists() or isinstance(source, Path) or str(source).count("/") > 1 or str(source).startswith((".", "/")):
        raise FileNotFoundError(f"{source}: expected a model folder (with config.json and weights) or a hub id")
    return fetch(str(source))


def _from_huggingface(document: dict[str, Any], tensors: TensorSource, folder: Path | None, where: str) -> Checkpoint:
    try:
        recognised = recognise(document, tensors)
    except ValueError as error:
        # What does not fit lies in the tensors or in the config; the former say so themselves.
        raise error if str(error).startswith(tensors.where) else ValueError(f"{where}: {error}") from error
    return Checkpoint(recognised.config, tensors, recognised.tensors, folder, recognised.derived)
