"""Converted checkpoints under the user's cache folder, so that a foreign file is converted once.

$FTBERT_CACHE, else $XDG_CACHE_HOME/ftbert, else ~/.cache/ftbert; FTBERT_CACHE=off switches it off. An entry is a
checkpoint folder named after the content of what it was converted from; config.json counts, the path does not.

What is worth it was measured on BERT base (438 MB, one thread, files in memory): safetensors read directly takes 85 to
110 ms, its converted copy 78 to 94 ms, so safetensors is never cached. ONNX takes 490 ms (its matrices are stored the
other way round), pytorch_model.bin 165 to 290 ms: those two are.

A full checksum (190 ms) would cost more than the load. Each time an entry is opened its sizes and the checksums of its
config and of the weights' header are compared; the weights' own checksum when the file's time says that it has been
written to since.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ftbert.cache_key import Foreign, foreign, key_of
from ftbert.checkpoint import Checkpoint, find_folder, open_checkpoint

_SEAL = "entry.json"  # written last: what the entry's files must look like
_FORGOTTEN_SECONDS = 24 * 3600


def cache_folder() -> Path | None:
    """None when the cache is switched off, and where nobody knows a home (a container's user without an entry)."""
    chosen = os.environ.get("FTBERT_CACHE", "")
    if chosen == "off":
        return None
    if chosen:
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ftbert"
    except RuntimeError:
        return None


def untrusted(*folders: Path) -> str:
    """Why what lies in these folders may come from somebody else, and what to do; "" where it cannot, or where there
    is none. As ssh has it: the owner is this user or root, and nobody else may write."""
    for folder in folders:
        try:
            found = folder.stat()
        except OSError:
            continue  # whoever goes on says so
        if found.st_uid not in (0, os.geteuid()):
            return f"{folder} belongs to another user; FTBERT_CACHE names another folder"
        if found.st_mode & 0o022:
            return f"others can write to {folder}; `chmod -R go-w {folder}`, or name another with FTBERT_CACHE"
    return ""


def make_private(folder: Path) -> None:
    """Makes the folder and its parents, for this user alone to write in whatever the umask says."""
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            folder.chmod(folder.stat().st_mode & ~0o022)


def open_cached(source: str | Path | torch.nn.Module) -> Checkpoint:
    """As `ftbert.checkpoint.open_checkpoint`, through the cache where that is faster.

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
        if _is_whole(entry):  # somebody else was faster
            return entry
        _clear_up(entry)
        _build(entry, found)
    return entry


def _clear_up(entry: Path) -> None:
    """Goes over what killed processes left: of this entry, whose lock we have, or so old that nobody works on it."""
    for left in entry.parent.glob(".*"):
        try:
            if left.name.startswith(f".{entry.name}.") or time.time() - left.stat().st_mtime > _FORGOTTEN_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except FileNotFoundError:  # its owner has finished
            continue


def _build(entry: Path, found: Foreign) -> None:
    from ftbert.converters.from_huggingface import convert

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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time; a killed process lets go by itself. Without locks (some network file systems) both do the work."""
    handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)  # to read: another user's file will do
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
