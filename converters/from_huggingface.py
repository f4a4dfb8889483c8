"""HuggingFace folder, hub id, .onnx or .gguf file, or live model -> ftbert checkpoint folder."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ftbert.checkpoint import (
    DTYPES,
    FORMAT,
    MODULES,
    ROUTER_CONFIG,
    ROUTERS,
    Checkpoint,
    Module,
    StagingFolder,
    checksums,
    exists,
    expect_file,
    expect_inside,
    named,
    open_weights,
    read_json_object,
    read_json_value,
    read_modules,
    transformer_folder,
    warn_caller,
)
from ftbert.converters.open import open_checkpoint
from ftbert.converters.text_files import GENERATION, check_copy, text_files


def convert(
    source: str | Path | torch.nn.Module,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    task: str | None = None,
) -> Path:
    """Writes `target` (model.safetensors, config.json, the tokenizer's files) and returns its path.

    dtype: of the stored weights, in which the folder is then loaded where no other dtype is asked for; None keeps
    the source's, int8 among them. force: replace a checkpoint folder that ftbert wrote; nothing else is ever
    replaced. revision, token: of a hub id, see `fetch`. task: of a model with an adapter for each, the one that is
    merged; the others stay behind, with a warning where none is named. The target appears whole, in one step, and
    with `force` there is one at every moment. Its tokenizer is compared with the source's on a few texts before
    that. Of a live model what its generation_config says is written, too.
    FileExistsError, ValueError (the target holds the source, links that lead out of the source, another tokenizer; see
    also `open_checkpoint`), OSError when the target cannot be written.
    """
    target = Path(target)
    check_target(target, source, force)
    checkpoint = open_checkpoint(source, revision=revision, token=token, task=task)
    if checkpoint.config.left_out:
        warn_caller(f"{checkpoint.source.where}: {checkpoint.config.left_out}")
    if dtype is None and checkpoint.in_int8 is not None:
        checkpoint = checkpoint.in_int8()
    word = next((word for word, one in DTYPES.items() if one == dtype), "")
    if dtype is not None and not word:
        others = "`ftbert convert --dtype q8_0` and `ftbert quantize` write folders in 8 bits"
        raise ValueError(f"dtype: expected {', '.join(DTYPES)}, got {dtype}; {others}")
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, dtype=word))
    write_folder(checkpoint, checkpoint.items(dtype) if dtype else checkpoint.stored_items(), source, target, force)
    return target


def _tell_of_tasks(checkpoint: Checkpoint) -> None:
    names = ", ".join(checkpoint.tasks)
    if checkpoint.tasks and not checkpoint.task:
        if not checkpoint.bare:
            raise ValueError(
                f"{checkpoint.source.where}: this model has an adapter for each task and is none without: task= "
                f"(--task) names one of {names}"
            )
        warn_caller(f"{checkpoint.source.where}: adapters for tasks stay behind: {names}; task= (--task) merges one")


def write_folder(
    checkpoint: Checkpoint,
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: str | Path | torch.nn.Module,
    target: Path,
    force: bool,
) -> None:
    """A folder of our format, in one step: the config of `checkpoint`, which was opened from `source`, these tensors,
    and the tokenizer's files. Errors as of `convert`."""
    if checkpoint.entities is not None:
        raise ValueError(
            f"{checkpoint.source.where}: ftbert's format has no place for a GLiNER's head; load the folder itself"
        )
    _tell_of_tasks(checkpoint)
    place = Path(os.path.realpath(target))  # a link stays one
    if checkpoint.folder is not None:
        _refuse_links(checkpoint.folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    with StagingFolder(place) as staging:
        folder = staging.new_folder()
        _save_weights(dict(tensors), folder / "model.safetensors")
        checkpoint.config.write(folder / "config.json")
        if checkpoint.folder is not None:
            _copy_text_files(checkpoint.folder, folder)
            unchecked, tokenizer_class = check_copy(checkpoint.folder, folder)
            if unchecked:
                warn_caller(f"{checkpoint.folder}: {unchecked}")
            checkpoint.config.write(folder / "config.json", tokenizer_class)
        if checkpoint.generation is not None:
            _write_generation(checkpoint.generation, folder / GENERATION)
        try:
            staging.deliver_folder(lambda found: force and not _not_ours(found))
        except FileExistsError:
            check_target(target, source, force)  # the reason, for whoever came in between
            raise


def _save_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(stored, path, metadata=checksums(stored))
    except SafetensorError as error:  # a full disk among them
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, f"cannot be written ({error})", str(path)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library gives others no access whatever the umask says


def _write_generation(said: dict[str, Any], path: Path) -> None:
    """said: as a live model's generation_config does, whose sequence_bias has tuples for keys."""
    if isinstance(biases := said.get("sequence_bias"), dict):
        said = said | {"sequence_bias": [[list(ids), bias] for ids, bias in biases.items()]}
    with named(path):
        path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def check_target(target: Path, source: str | Path | torch.nn.Module, force: bool) -> None:
    """Whether a folder may be written there; the errors of `convert` say why not."""
    if not isinstance(source, torch.nn.Module) and exists(Path(source)):
        here, there = Path(source).resolve(), target.resolve()
        if here == there or there in here.parents:
            raise ValueError(f"{target}: holds the source, {source}; write to another folder")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        raise FileExistsError(f"{target}: exists already; remove it or pass force=True (--force)")
    if reason := _not_ours(target):
        raise FileExistsError(f"{target}: {reason}, and nothing else is replaced; remove it")


def _not_ours(folder: Path) -> str:
    """Why it is no checkpoint folder that `convert` wrote, or ""."""
    try:
        ours = read_json_object(folder / "config.json").get("format") == FORMAT
    except (OSError, ValueError):
        ours = False
    if not ours:
        return "is no checkpoint folder of ftbert"
    written = {folder / "config.json", folder / "model.safetensors", *text_files(folder).values()}
    others = sorted(path for path in folder.rglob("*") if path not in written and not path.is_dir())
    return f"holds {str(others[0].relative_to(folder))!r}, which ftbert did not write" if others else ""


def _refuse_links(folder: Path) -> None:
    """What is written may be shared: nothing of it comes from elsewhere by way of a link."""
    for pattern in ("config.json", "*.safetensors", "*.bin", "*.index.json", "*.onnx", "onnx/*.onnx"):
        for path in sorted({*folder.glob(pattern), *transformer_folder(folder).glob(pattern)}):
            expect_inside(path, folder)
    for path in text_files(folder).values():
        expect_inside(path, folder)
        expect_file(path)


def _copy_text_files(source: Path, target: Path) -> None:
    for name, path in text_files(source).items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy.suffix == ".safetensors":  # of a module
            weights = open_weights(path.parent)
            _save_weights({one: weights.read(one) for one in weights.shapes()}, copy)
        else:
            shutil.copyfile(path, copy)
    if transformer_folder(source) != source:  # what was there is in the target itself
        _put_first(read_modules(source)[0], transformer_folder(source), source, target)


def _put_first(first: Module, home: Path, source: Path, target: Path) -> None:
    """The transformer's path becomes "", that of the target itself: in modules.json, or in the Router's file."""
    if first.kind in ROUTERS:
        where = target / (first.folder / ROUTER_CONFIG).relative_to(source)
        found = read_json_value(where)
        old = str(home.relative_to(first.folder))
        types = {"" if name == old else name: kind for name, kind in found["types"].items()}
        structure = {
            route: ["" if name == old else name for name in names] for route, names in found["structure"].items()
        }
        written: Any = {**found, "types": types, "structure": structure}
    else:
        where, written = target / MODULES, read_json_value(source / MODULES)
        written[0]["path"] = ""
    with named(where):
        where.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
