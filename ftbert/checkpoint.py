"""A checkpoint ready to be read: its config and its tensors by our names, whatever format it came in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ftbert._library import load_library
from ftbert.config import FORMAT, CheckpointConfig, read_json
from ftbert.converters.tensors import StateDictSource, TensorSource, open_folder
from ftbert.converters.weights import Family, find_family


@dataclass(frozen=True)
class Checkpoint:
    """tensors[ours] = the names in `source` that are stacked along the rows to make it."""

    config: CheckpointConfig
    source: TensorSource
    tensors: dict[str, tuple[str, ...]]
    folder: Path | None  # where the tokenizer's files are

    def read(self, ours: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        parts = [self.source.read(name).to(dtype) for name in self.tensors[ours]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def items(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
        for ours in self.tensors:
            yield ours, self.read(ours, dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.source.read(next(iter(self.tensors.values()))[0]).dtype


def open_checkpoint(source: str | Path | torch.nn.Module) -> Checkpoint:
    """A checkpoint folder of ours, a HuggingFace folder, a hub id, or a live transformers model.

    ValueError lists every missing, extra and misshapen tensor at once; FileNotFoundError says what was looked for.
    """
    load_library()
    if isinstance(source, torch.nn.Module):
        return _from_live(source)
    folder = _find_folder(source)
    document = read_json(folder / "config.json")
    tensors = open_folder(folder)
    if document.get("format") == FORMAT:
        config = CheckpointConfig.parse(document, str(folder / "config.json"))
        names = {ours: (ours,) for ours in torch.ops.ftbert.weight_shapes(config.encoder.entries())}
        _check(config, names, tensors, ignore=())
        return Checkpoint(config, tensors, names, folder)
    return _from_huggingface(document, tensors, folder, str(folder / "config.json"))


def _from_live(model: torch.nn.Module) -> Checkpoint:
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise TypeError(f"expected a transformers model, got {type(model).__name__} without a transformers config")
    document = config.to_dict()  # type: ignore[union-attr]
    where = f"{type(model).__name__} (live)"
    return _from_huggingface(document, StateDictSource(model.state_dict(), where), None, where)


def _find_folder(source: str | Path) -> Path:
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder}: no config.json in this folder")
        return folder
    if folder.exists() or isinstance(source, Path) or str(source).count("/") > 1 or str(source).startswith((".", "/")):
        raise FileNotFoundError(f"{source}: expected a model folder (with config.json and weights) or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                str(source),
                allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors", "pytorch_model*.bin"],
                ignore_patterns=["onnx/*", "openvino/*", "coreml/*"],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise FileNotFoundError(f"{source}: no such folder, and not to be had from the hub ({reason})") from error


def _from_huggingface(document: dict[str, Any], tensors: TensorSource, folder: Path | None, where: str) -> Checkpoint:
    try:
        family = find_family(document.get("model_type"))
        encoder = family.config(document)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    found = tensors.shapes()
    prefix = _prefix(family, found)
    pooler = any(name.startswith(prefix + theirs) for name in found for theirs in family.source_names("pooler.weight"))
    encoder = replace(encoder, pooler=pooler)
    names = {
        ours: tuple(_spelling(prefix + theirs, found) for theirs in family.source_names(ours))
        for ours in torch.ops.ftbert.weight_shapes(encoder.entries())
    }
    config = CheckpointConfig(family.name, encoder, document)
    ignore = tuple(name for name in found if _is_not_encoder(name, prefix, family))
    _check(config, names, tensors, ignore)
    return Checkpoint(config, tensors, names, folder)


def _prefix(family: Family, found: dict[str, Any]) -> str:
    word = family.source_names("embeddings.word")[0]
    for prefix in family.prefixes:
        if prefix + word in found:
            return prefix
    # None fits: complain about the names as they would be without a prefix.
    return family.prefixes[0]


def _spelling(name: str, found: dict[str, Any]) -> str:
    """Checkpoints converted from TensorFlow before 2019 call LayerNorm's tensors gamma and beta."""
    if name not in found and ".LayerNorm." in name:
        old = name.replace(".LayerNorm.weight", ".LayerNorm.gamma").replace(".LayerNorm.bias", ".LayerNorm.beta")
        return old if old in found else name
    return name


def _is_not_encoder(name: str, prefix: str, family: Family) -> bool:
    return name.startswith(family.heads) or name.endswith(family.buffers)


def _check(
    config: CheckpointConfig, names: dict[str, tuple[str, ...]], source: TensorSource, ignore: tuple[str, ...]
) -> None:
    found = source.shapes()
    expected = torch.ops.ftbert.weight_shapes(config.encoder.entries())
    wrong: list[str] = []
    for ours, parts in names.items():
        shape = list(expected[ours])
        shape[0] //= len(parts)
        for part in parts:
            if part not in found:
                wrong.append(f"missing {part} {shape}")
            elif list(found[part]) != shape:
                wrong.append(f"{part}: the config asks for {shape}, the file has {list(found[part])}")
    used = {part for parts in names.values() for part in parts}
    wrong += [f"extra {name} {list(found[name])}" for name in found if name not in used and name not in ignore]
    if wrong:
        raise ValueError(f"{source.where}: the weights do not fit the config:\n  " + "\n  ".join(wrong))
