"""What a foreign checkpoint consists of, and the name of its content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftbert.checkpoint import VERSION
from ftbert.converters import file_set, home_of, onnx_of

# Raised when the same file would be converted differently.
_CONVERSION = 2
# A file younger than this may change again without its time or size showing it.
_SETTLED_NS = 2_000_000_000
_FORGOTTEN_SECONDS = 3600


@dataclass(frozen=True)
class Foreign:
    """source: what to open. home: the folder with config.json and the tokenizer. files: found without reading them."""

    source: Path
    home: Path | None
    files: tuple[Path, ...]


def foreign(source: str | Path) -> Foreign | None:
    """What is worth caching: an ONNX model, or a folder whose weights are pytorch_model*.bin. None for all else."""
    path = Path(source)
    if not path.exists():
        return None
    onnx = onnx_of(path)
    if onnx is not None:
        return Foreign(onnx, home_of(onnx), (onnx,))
    if not path.is_dir() or any(True for _ in path.glob("*.safetensors")) or not (path / "config.json").is_file():
        return None
    files = tuple(sorted(file for file in path.glob("pytorch_model*.bin") if file.is_file()))
    index = path / "pytorch_model.bin.index.json"
    return Foreign(path, path, (*files, index) if index.exists() else files) if files else None


def key_of(found: Foreign, index: Path) -> str:
    """The hash of config and weights. `index` remembers it by path, size and time; it may be lost at any moment."""
    place = index / f"{hashlib.sha256(str(found.source.resolve()).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(place.read_text(encoding="utf-8"))
        if known["version"] == [VERSION, _CONVERSION] and all(_stamp(Path(one[0])) == one for one in known["files"]):
            return str(known["key"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        pass
    files = [one for path in found.files for one in (file_set(path) if path.suffix == ".onnx" else [path])]
    if found.home is not None:
        files.append(found.home / "config.json")
    stamps = [_stamp(path) for path in files]
    total = hashlib.sha256(f"{VERSION} {_CONVERSION}".encode())
    for path in files:
        total.update(_digest(path))
    key = total.hexdigest()[:32]
    newest = max(int(stamp[2]) for stamp in stamps)
    if stamps == [_stamp(path) for path in files] and newest < time.time_ns() - _SETTLED_NS:
        _remember(place, {"version": [VERSION, _CONVERSION], "files": stamps, "key": key})
    return key


def _stamp(path: Path) -> list[str | int]:
    """[path, size, time]; a file that is not there has a stamp too, so that one that appears is noticed."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return [str(path.absolute()), -1, 0]
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns]


def _digest(path: Path) -> bytes:
    found = hashlib.sha256()
    if path.exists():
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    return found.digest()


def _remember(place: Path, entry: dict[str, object]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(".index.*"):  # of killed processes; writing one takes milliseconds
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _FORGOTTEN_SECONDS:
                left.unlink()
    handle, name = tempfile.mkstemp(prefix=".index.", dir=place.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(entry, file)
    os.replace(name, place)
