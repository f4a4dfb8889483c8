"""The folder beside an output in which an unfinished run keeps its finished chunks and a manifest.

Every path out of a run leaves either the whole target, or no target and (when there is something worth
keeping) this folder. A kill at any moment costs at most the chunk being computed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from ftbert.input_file import named

_MANIFEST = "manifest.json"
_OURS = re.compile(r"manifest\.(json|new)|(rows(-\d{8})?|skipped)\.(npy|jsonl|parquet)")


class StagingFolder:
    """`<target>.part`, held by one process at a time. Use as a context manager."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = staging_path(target)
        self._lock = -1

    def __enter__(self) -> StagingFolder:  # noqa: PYI034 - typing.Self needs Python 3.11
        while True:
            self.folder.mkdir(exist_ok=True)
            self._refuse_others_files()
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise BlockingIOError(
                    f"{self.target}: another process is writing it now; wait for it, or name another output"
                ) from None
            # The one who held the lock may just have finished and removed the folder.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.folder).st_ino == os.fstat(self._lock).st_ino:
                    return self
            os.close(self._lock)

    def _refuse_others_files(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process has just finished
            names = sorted(path.name for path in self.folder.iterdir() if not _OURS.fullmatch(path.name))
            if names:
                raise FileExistsError(
                    f"{self.folder}: ftbert keeps unfinished work there, and it holds {names[0]!r}, which ftbert did "
                    "not write; move it away, or name another output"
                )

    def __exit__(self, *raised: object) -> None:
        """Keeps the folder only when it holds a finished chunk."""
        if not (self.folder / _MANIFEST).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def saved(self, made_with: dict[str, Any]) -> dict[str, Any] | None:
        """What `save` last stored, if it was made with the same things; else the folder is emptied,
        with one warning that says what has changed.
        """
        path, reason = self.folder / _MANIFEST, None
        if path.exists():
            try:
                manifest = json.loads(path.read_text(encoding="utf-8"))
                before = manifest["made_with"]
                changed = sorted(key for key in before | made_with if before.get(key) != made_with.get(key))
                if not changed:
                    return dict(manifest["progress"])
                reason = f"it was made with another {', '.join(changed)}"
            except (ValueError, KeyError, TypeError):
                reason = "its manifest is broken"
        self.discard(reason)
        return None

    def save(self, made_with: dict[str, Any], progress: dict[str, Any]) -> None:
        """Stores the manifest; the files it speaks of must be on the disk already."""
        beside = self.folder / "manifest.new"
        with named(beside), beside.open("w", encoding="utf-8") as file:
            json.dump({"made_with": made_with, "progress": progress}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.folder / _MANIFEST)
        os.fsync(self._lock)

    def discard(self, reason: str | None) -> None:
        """Empties the folder; warns when `reason` says why."""
        if reason is not None:
            warnings.warn(f"{self.folder}: cannot go on from here, {reason}; starting again", stacklevel=2)
        # The manifest goes first: files without one are never taken for finished chunks.
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            path.unlink()

    def deliver(self, finished: Path) -> None:
        """Moves the finished file (synced, in the folder) over the target and removes the folder."""
        finished.replace(self.target)
        above = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(above)
        finally:
            os.close(above)
        (self.folder / _MANIFEST).unlink(missing_ok=True)


def staging_path(target: Path) -> Path:
    """Where an unfinished run for `target` keeps its work."""
    return target.with_name(target.name + ".part")
