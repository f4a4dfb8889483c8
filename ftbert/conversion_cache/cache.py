"""Converted checkpoints under the user's cache folder, so that a foreign file is converted once.

An entry is a checkpoint folder named after the path, size and time of each file that it was converted from, config.json
among them. Files that have just been written may change again without showing it there: they are read directly.

What is worth it was measured on BERT base (438 MB, one thread, files in memory): safetensors read directly takes 85 to
110 ms, its converted copy 78 to 94 ms, so safetensors is never cached. ONNX takes 490 ms (its matrices are stored the
other way round), pytorch_model.bin 165 to 290 ms: those two are.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ftbert.checkpoint import VERSION, Checkpoint, put_in_place, work_folder
from ftbert.converters import convert, file_set, find_folder, home_of, onnx_of, open_checkpoint
from ftbert.user_cache import cache_folder, locked, make_private, untrusted

# Raised when the same file would be converted differently.
_CONVERSION = 3
_SEAL = "entry.json"  # sizes and times of the entry's files, and of what else it was converted from
_FILES = ("config.json", "model.safetensors")
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class _Foreign:
    """source: what to open. home: the folder with config.json and the tokenizer. files: found without reading them."""

    source: Path
    home: Path | None
    files: tuple[Path, ...]


def open_cached(source: str | Path | torch.nn.Module) -> Checkpoint:
    """As `ftbert.converters.open_checkpoint`, through the cache where that is faster.

    Several processes may do this at once, and any of them may be killed. A cache that cannot be written only warns.
    """
    root = cache_folder()
    if root is None or isinstance(source, torch.nn.Module):
        return open_checkpoint(source)
    source = source if Path(source).exists() else find_folder(source)
    found = _foreign(Path(source))
    if found is None or any(abs(time.time_ns() - path.stat().st_mtime_ns) < _SETTLED_NS for path in found.files):
        return open_checkpoint(source)
    if reason := untrusted(root, root / "converted"):
        warnings.warn(f"the cache is not used: {reason}", stacklevel=3)
        return open_checkpoint(source)
    try:
        entry = _entry(root / "converted", found)
    except OSError as error:
        warnings.warn(f"the cache in {root} cannot be used ({error}); FTBERT_CACHE names another", stacklevel=3)
        return open_checkpoint(source)
    return replace(open_checkpoint(entry), folder=found.home)  # the tokenizer is the source's


def _foreign(path: Path) -> _Foreign | None:
    """What is worth caching: an ONNX model, or a folder whose weights are pytorch_model*.bin. None for all else."""
    onnx = onnx_of(path)
    if onnx is not None:
        home = home_of(onnx)
        files = [onnx, *([] if home is None else [home / "config.json"])]
        return _Foreign(onnx, home, tuple(filter(Path.is_file, files)))
    weights = sorted(filter(Path.is_file, path.glob("pytorch_model*.bin")))
    if not weights or any(path.glob("*.safetensors")) or not (path / "config.json").is_file():
        return None
    files = [*weights, path / "pytorch_model.bin.index.json", path / "config.json"]
    return _Foreign(path, path, tuple(filter(Path.is_file, files)))


def _entry(folder: Path, found: _Foreign) -> Path:
    """The entry in `folder`, converted now if there is none or it is broken."""
    name = json.dumps([VERSION, _CONVERSION, *((str(path.resolve()), *_looks(path)) for path in found.files)])
    entry = folder / hashlib.sha256(name.encode()).hexdigest()[:32]
    if not _is_whole(entry):
        make_private(folder)
        with locked(entry.with_suffix(".lock")):
            if not _is_whole(entry):  # another process may have been faster
                _build(entry, found)
    return entry


def _build(entry: Path, found: _Foreign) -> None:
    with work_folder(entry) as fresh:
        convert(found.source, fresh)
        seal = {name: _looks(fresh / name) for name in _FILES}
        if found.source.suffix == ".onnx":  # its external data too, which only the graph names
            seal |= {str(path.absolute()): _looks(path) for path in file_set(found.source)}
        (fresh / _SEAL).write_text(json.dumps(seal), encoding="utf-8")
        for path in (fresh, *fresh.iterdir()):
            path.chmod(path.stat().st_mode & ~0o022)
        put_in_place(fresh, entry, lambda _: True)


def _is_whole(entry: Path) -> bool:
    """Whether the entry is what was written, and by whom it may be. False too where there is none."""
    if untrusted(entry, *(entry / name for name in (_SEAL, *_FILES))):
        return False
    try:
        seal = json.loads((entry / _SEAL).read_text(encoding="utf-8"))
        return seal.keys() >= set(_FILES) and all(_looks(entry / path) == looks for path, looks in seal.items())
    except (OSError, ValueError, AttributeError):
        return False


def _looks(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
