"""8-bit weights of models that are stored in other types: made when first asked for, and kept in the user's cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ftbert.caller import warn_caller
from ftbert.checkpoint import Checkpoint, transformer_folder
from ftbert.converters import model_files, open_checkpoint, write_folder
from ftbert.dtypes import Q8_0, Dtype, users_word
from ftbert.quantization.contents import digest_of
from ftbert.quantization.q8_0 import in_q8_0
from ftbert.quantization.quantize import calibration_texts, quantize, text_folder
from ftbert.text import TOKENIZER_FILES
from ftbert.user_cache import cache_folder, locked, make_private, untrusted
from ftbert.version import __version__

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
FORMAT = 2  # counts up where `quantize` makes other numbers of the same model and texts


@contextmanager
def in_8_bits(checkpoint: Checkpoint, dtype: Dtype, device: torch.device, verify: bool = True) -> Iterator[Checkpoint]:
    """`checkpoint` as `quantize` writes it in `dtype` with the package's texts, on `device`; to be read inside the
    context.

    It is kept in the user's cache, and made again when its source changes, or where it is damaged, which verify=False
    leaves out. Several processes make it once; where the cache is off, full or not to be used, it is made each time
    and removed. Warns when it is made. q8_0 asks no texts, and is made as it is read. Errors as of `quantize`.
    """
    if dtype == Q8_0:
        yield in_q8_0(checkpoint)
        return
    if checkpoint.task:
        raise ValueError(
            f"{checkpoint.source.where}: {users_word(dtype)} of task {checkpoint.task!r} is made of a folder: write "
            f"one with `ftbert convert --task {checkpoint.task}`, and load that"
        )
    source = _source(checkpoint)
    target, why = cached_at(checkpoint, dtype), ""
    if target is None:
        why = "the cache is switched off"
    elif found := untrusted(target.parent.parent, target.parent, target, *target.rglob("*")):
        why = found
    elif kept := _complete(target, verify):
        yield kept
        return
    else:
        try:
            make_private(target.parent)
            (lock := target.with_name(f"{target.name}.lock")).touch()
        except OSError as error:
            why = f"the cache cannot be written ({error})"
    where, found_now = checkpoint.source.where, None
    if target is not None and not why:
        with locked(lock):
            found_now = _complete(target, verify)  # by another process, while this one waited
            if found_now is None:
                _warn(where, dtype, f"kept in {target}")
                try:
                    found_now = _kept(checkpoint, target, dtype, device)
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    why = f"the cache has no room; FTBERT_CACHE names another folder ({error})"
    if found_now is not None:
        yield found_now
        return
    with TemporaryDirectory(prefix="ftbert-8-bits-") as folder:
        _warn(where, dtype, f"not kept: {why}")
        yield _made(source, Path(folder) / "stored", dtype, device)


@contextmanager
def live_in_8_bits(
    checkpoint: Checkpoint, dtype: Dtype, device: torch.device, module: torch.nn.Module, tokenizer: Any = None
) -> Iterator[Checkpoint]:
    """The same of a live model, which `checkpoint` was opened from; nothing is kept. tokenizer: transformers' own, None
    for that of the folder or the hub's snapshot that the module's config names. ValueError where there is none."""
    if dtype == Q8_0:
        yield in_q8_0(checkpoint)
        return
    with TemporaryDirectory(prefix="ftbert-8-bits-") as folder:
        home, plain = Path(folder) / "tokenizer", Path(folder) / "plain"
        if tokenizer is None:
            home = _home_of(module, dtype)
        else:
            tokenizer.save_pretrained(home)
        whole = replace(checkpoint, folder=home, config=replace(checkpoint.config, left_out=""))  # `load` warns of that
        write_folder(whole, checkpoint.items(checkpoint.stored_dtype), module, plain, force=False)
        _warn(checkpoint.source.where, dtype, "not kept, since it is of a live model")
        yield _made(plain, Path(folder) / "stored", dtype, device)


_FILES = (".onnx", ".gguf")  # models that are one file


def cached_at(checkpoint: Checkpoint, dtype: Dtype) -> Path | None:
    """The folder that `in_8_bits` keeps; None where the cache is switched off. Its name changes with all that the
    numbers come from: the bytes of the source's files, the texts, ftbert. OSError where one cannot be read."""
    folder = cache_folder()
    if folder is None:
        return None
    name, identity = _identity(checkpoint, folder / "contents")
    texts = hashlib.sha256("\n".join(calibration_texts()).encode()).hexdigest()
    digest = hashlib.sha256(json.dumps([identity, texts, FORMAT, __version__]).encode()).hexdigest()
    return folder / users_word(dtype) / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[-80:]}-{digest[:32]}"


def _source(checkpoint: Checkpoint) -> Path:
    """The folder or file that `checkpoint` was opened from."""
    found = Path(checkpoint.source.where)
    return found if found.suffix in _FILES else text_folder(checkpoint)


def _identity(checkpoint: Checkpoint, digests: Path) -> tuple[str, list[Any]]:
    """A name, and what changes with the weights and with how texts are read: the bytes of the files. Nothing else tells
    a model from one that a stranger has put under its name, or beside it. Files that others may change, also while they
    are read, have another identity than private ones of the same bytes. digests: see `digest_of`."""
    source = _source(checkpoint)
    folder = Path(os.path.realpath(source.parent if source.is_file() else source))
    name = source.name if source.is_file() else folder.name
    if len(folder.parts) > 3 and folder.parts[-2] == "snapshots" and folder.parts[-3].startswith("models--"):
        name = folder.parts[-3].removeprefix("models--") + ("" if name == folder.name else f"-{name}")
    files = model_files(checkpoint)
    if source.suffix == ".gguf":  # which has the tokenizer in it, and the folder is a temporary one
        files = {name: path for name, path in files.items() if path in checkpoint.source.files}
    found = [(name, digest_of(path, digests)) for name, path in files.items()]
    return name, [*found, untrusted(folder, *files.values())]


def _complete(target: Path, verify: bool) -> Checkpoint | None:
    try:
        if verify:
            whole = open_checkpoint(target)
            for name in whole.source.shapes():
                whole.source.read(name)
        return open_checkpoint(target, verify=False)
    except (OSError, ValueError):  # none, or one that somebody broke, whose place the next takes
        return None


def _kept(checkpoint: Checkpoint, target: Path, dtype: Dtype, device: torch.device) -> Checkpoint:
    """Made at `target`, where no other user may write whatever the umask says. ValueError where the source's files have
    changed meanwhile: then nothing is kept."""
    made = _made(_source(checkpoint), target, dtype, device)
    if cached_at(checkpoint, dtype) != target:
        shutil.rmtree(target)
        raise ValueError(f"{checkpoint.source.where}: its files changed while they were read; load it again")
    for path in (target, *target.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o022)
    return made


def _made(source: Path, target: Path, dtype: Dtype, device: torch.device) -> Checkpoint:
    quantize(source, target, dtype=dtype, device=str(device), force=True)
    return open_checkpoint(target)


def _warn(where: str, dtype: Dtype, kept: str) -> None:
    made = f"made {users_word(dtype)} by calibration on {len(calibration_texts())} texts, which takes seconds"
    warn_caller(f"{where}: {made}; {kept}")


def _home_of(module: torch.nn.Module, dtype: Dtype) -> Path:
    """Where the tokenizer lies of the folder or hub id that transformers loaded the module from; nothing is fetched."""
    config = getattr(module, "config", None)
    name = str(getattr(config, "name_or_path", "") or "")
    found = Path(name).expanduser() if name else None
    if name and not Path(name).expanduser().is_dir():
        from huggingface_hub import snapshot_download

        try:
            commit = getattr(config, "_commit_hash", None)
            found = Path(snapshot_download(name, revision=commit, local_files_only=True))
        except (OSError, ValueError):  # those of the hub's client among them
            found = None
    if found is None or not any(any(transformer_folder(found).glob(name)) for name in TOKENIZER_FILES):
        raise ValueError(
            f"{type(module).__name__}: {users_word(dtype)} needs the model's tokenizer for calibration, and its config "
            f"names no folder or model of the hub with one that is here (name_or_path {name!r}). Save model and "
            "tokenizer to a folder: ftbert.load(folder, device, dtype) and `ftbert quantize` take that"
        )
    return found
