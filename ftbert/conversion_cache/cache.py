"""Converted checkpoints under the user's cache folder, so that a foreign file is converted once.

An entry is a checkpoint folder named after the content of what it was converted from; config.json counts, the path does
not.

What is worth it was measured on BERT base (438 MB, one thread, files in memory): safetensors read directly takes 85 to
110 ms, its converted copy 78 to 94 ms, so safetensors is never cached. ONNX takes 490 ms (its matrices are stored the
other way round), pytorch_model.bin 165 to 290 ms: those two are.

A full checksum (190 ms) would cost more than the load. Each time an entry is opened its sizes and the checksums of its
config and of the weights' header are compared; the weights' own checksum when the file's time says that it has been
written to since.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ftbert.checkpoint import Checkpoint
from ftbert.conversion_cache.key import Foreign, foreign, key_of
from ftbert.converters import convert, find_folder, open_checkpoint
from ftbert.user_cache import cache_folder, locked, make_private, untrusted

_SEAL = "entry.json"  # written last: what the entry's files must look like
_FORGOTTEN_SECONDS = 24 * 3600


def open_cached(source: str | Path | torch.nn.Module) -> Checkpoint:
    """As `ftbert.converters.open_checkpoint`, through the cache where that is faster.

    Several processes may do this at once, and any of them may be killed. A cache that cannot be written only warns.
    """
    root = cache_folder()
    if root is None or isinstance(source, torch.nn.Module):
        return open_checkpoint(source)
    source = source if Path(source).exists() else find_folder(source)
    found = foreign(source)
    if found is None:
        return open_checkpoint(source)
    if reason := untrusted(root, root / "index", root / "converted"):
        warnings.warn(f"the cache is not used: {reason}", stacklevel=3)
        return open_checkpoint(source)
    try:
        entry = _entry(root, found)
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileNotFoundError) and not all(path.exists() for path in found.files):
            raise
        warnings.warn(f"the cache in {root} cannot be used ({error}); FTBERT_CACHE names another", stacklevel=3)
        return open_checkpoint(source)
    # The tokenizer is not part of the content that the entry is named after.
    return replace(open_checkpoint(entry), folder=found.home)


def _entry(root: Path, found: Foreign) -> Path:
    """The folder of the entry, converted now if there is none or it is broken."""
    make_private(root / "index")
    key = key_of(found, root / "index")
    entry = root / "converted" / key
    if _is_whole(entry):
        return entry
    make_private(entry.parent)
    with locked(entry.parent / f"{key}.lock"):
        if _is_whole(entry):  # another process was faster
            return entry
        _clear_up(entry)
        _build(entry, found)
    return entry


def _clear_up(entry: Path) -> None:
    """Removes leftovers of killed processes: those of this entry, whose lock we hold, and those older than a day."""
    for left in entry.parent.glob(".*"):
        try:
            if left.name.startswith(f".{entry.name}.") or time.time() - left.stat().st_mtime > _FORGOTTEN_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # its owner has finished
            continue


def _build(entry: Path, found: Foreign) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        fresh = convert(found.source, work / "entry")
        seal = {name: _looks(fresh / name) | {"crc": _crc(fresh / name)} for name in _files(fresh)}
        (fresh / _SEAL).write_text(json.dumps(seal), encoding="utf-8")
        for path in (fresh, *fresh.iterdir()):
            path.chmod(path.stat().st_mode & ~0o022)
        if entry.exists():
            os.rename(entry, work / "broken")
        os.rename(fresh, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return ["config.json", "model.safetensors"] if folder.is_dir() else []


def _is_whole(entry: Path) -> bool:
    """Whether the entry is what was written, and by whom it may be. False too where there is none."""
    if untrusted(entry, *(entry / name for name in (_SEAL, *_files(entry)))):
        return False
    try:
        seal = json.loads((entry / _SEAL).read_text(encoding="utf-8"))
        for name in _files(entry):
            sealed, looks = dict(seal[name]), _looks(entry / name)
            touched = looks.pop("mtime_ns") != sealed.pop("mtime_ns")
            crc = sealed.pop("crc")
            if looks != sealed or (touched and _crc(entry / name) != crc):
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _looks(path: Path) -> dict[str, Any]:
    """What is cheap to compare: size, time, checksum of the beginning (all of a config, the header of the weights)."""
    stat = path.stat()
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else stat.st_size
        file.seek(0)
        head = file.read(min(length + 8, stat.st_size))
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "head": zlib.crc32(head)}


def _crc(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found = zlib.crc32(chunk, found)
    return found
