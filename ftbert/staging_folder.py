"""The folder beside an output, a file or a folder, in which it is made before it takes its place in one step.

Every path out of a run leaves either the whole target, or no target and (when there is something worth keeping, which a
manifest says) this folder. A kill at any moment costs at most the chunk being computed; what it left goes with the next
run for the same target.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftbert.input_file import named

_MANIFEST = "manifest.json"
_MARK = "made-by-ftbert"  # the first file in the folder, and the last to go
_OURS = re.compile(_MARK + r"|manifest\.(json|new)|(rows(-\d{8})?|skipped)\.(npy|jsonl|parquet|new)|new|old")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class StagingFolder:
    """`<target>.part`, held by one process at a time. Use as a context manager. The target's parent must exist.

    Where a file system has no locks for folders, only a new folder is taken: OSError for one that is there.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = staging_path(target)
        self._lock = -1

    def __enter__(self) -> StagingFolder:  # noqa: PYI034 - typing.Self needs Python 3.11
        while True:
            if os.path.islink(self.folder) or not self.folder.is_dir():
                refuse_others_folder(self.folder)
            made = True
            try:
                self.folder.mkdir()
            except FileExistsError:
                made = False
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise BlockingIOError(
                    f"{self.target}: another process is writing it now; wait for it, or name another output"
                ) from None
            except OSError:
                if not made:
                    os.close(self._lock)
                    raise
            try:
                # The one who held the lock may just have finished and removed the folder.
                with contextlib.suppress(FileNotFoundError):
                    if os.stat(self.folder).st_ino == os.fstat(self._lock).st_ino:
                        refuse_others_folder(self.folder)
                        (self.folder / _MARK).touch()
                        if (self.folder / "old").exists() and not self.target.exists():
                            os.rename(self.folder / "old", self.target)  # a killed process had moved it away
                        return self
            except BaseException:
                os.close(self._lock)
                raise
            os.close(self._lock)

    def __exit__(self, *raised: object) -> None:
        """Keeps the folder only when it holds a finished chunk."""
        if not (self.folder / _MANIFEST).exists():
            with contextlib.suppress(OSError):
                self._empty()
                (self.folder / _MARK).unlink()
                self.folder.rmdir()
        os.close(self._lock)

    def saved(self, made_with: dict[str, Any]) -> dict[str, Any] | None:
        """What `save` last stored. ValueError where it was made with other things; where its manifest is broken the
        folder is emptied, with one warning."""
        path = self.folder / _MANIFEST
        if not path.exists():
            self.discard(None)
            return None
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            before, progress = dict(manifest["made_with"]), dict(manifest["progress"])
        except (ValueError, KeyError, TypeError):
            self.discard("its manifest is broken")
            return None
        if changed := sorted(key for key in before | made_with if before.get(key) != made_with.get(key)):
            raise self.cannot_go_on(f"it was made with another {', '.join(changed)}")
        return progress

    def cannot_go_on(self, reason: str) -> ValueError:
        """The error for finished work that does not fit what is asked for."""
        return ValueError(
            f"{self.folder}: holds finished work, and {reason}. Ask for the same again, or start again with "
            "--no-resume (resume=False), which throws that work away"
        )

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
        self._empty()

    def _empty(self) -> None:
        # The manifest goes first: files without one are never taken for finished chunks.
        (self.folder / _MANIFEST).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _MARK:
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

    def new_folder(self) -> Path:
        """An empty one, for what shall become the target."""
        self._empty()
        new = self.folder / "new"
        new.mkdir()
        return new

    def deliver_folder(self, replaceable: Callable[[Path], bool]) -> None:
        """Makes `new_folder` the target: by one rename where that is free or an empty folder, else by one exchange of
        the two.

        A folder for which `replaceable` is False stays: FileExistsError. Where the file system cannot exchange, the old
        one is renamed away first, and back when the new one cannot follow. A stranger's folder that came in between
        gets another name, which the error says.
        """
        new, target = self.folder / "new", self.target
        while True:
            try:
                os.rename(new, target)  # POSIX: replaces an empty folder and nothing else
                return
            except OSError as error:
                if error.errno not in _OCCUPIED:
                    raise
            if not replaceable(target):
                raise FileExistsError(errno.EEXIST, "exists and is not replaced", str(target))
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                old = _exchange_or_step_aside(new, target)
                if not replaceable(old):  # it came between the two looks at it
                    raise _kept(old, target)
                return


def _exchange_or_step_aside(new: Path, target: Path) -> Path:
    """Where the old target is now."""
    try:
        _exchange(new, target)
        return new
    except OSError as error:
        if error.errno not in _CANNOT_EXCHANGE:
            raise
    old = new.parent / "old"
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException as error:
        try:
            os.rename(old, target)
        except OSError:
            raise _kept(old, target) from error
        raise
    return old


def _kept(old: Path, target: Path) -> FileExistsError:
    """Gives what was at `target` a name beside it; the error that says which."""
    kept = target.with_name(f"{target.name}.found-{secrets.token_hex(4)}")
    os.rename(old, kept)
    return FileExistsError(errno.EEXIST, f"was made meanwhile; what was there before is {kept}", str(target))


def _exchange(one: Path, other: Path) -> None:
    """OSError with one of _CANNOT_EXCHANGE where the file system has no such step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one), None, str(other))


def refuse_others_folder(folder: Path) -> None:
    """FileExistsError where the place of the folder is taken by something that ftbert did not make, such as a link."""
    if not os.path.lexists(folder):
        return
    odd = "" if folder.is_dir() and not folder.is_symlink() else "it is no folder"
    with contextlib.suppress(FileNotFoundError):  # another process has just finished
        names = [] if odd else sorted(path.name for path in folder.iterdir())
        if names and (_MARK not in names or not all(map(_OURS.fullmatch, names))):
            others = [name for name in names if not _OURS.fullmatch(name)] or names
            odd = f"it holds {others[0]!r}"
    if odd:
        raise FileExistsError(
            f"{folder}: ftbert keeps unfinished work there, and {odd}, which ftbert did not write; move it away, or "
            "name another output"
        )


def staging_path(target: Path) -> Path:
    """Where an unfinished run for `target` keeps its work."""
    return target.with_name(target.name + ".part")
