"""A folder that is filled beside its target and takes its place in one step.

The work folder is `.<target>.ftbert-<8 hex digits>`, locked (flock) while its process lives. What a killed process left
there has no lock any more and goes when the next one works on the same target. Where a file system has no locks for
folders, nothing is cleared.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EXDEV)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """`new`, an empty folder for what shall become `target`; what is left of it at the end is removed.

    The parent of `target` must exist. OSError where nothing can be written there.
    """
    _clear_up(target)
    folder, lock = _make(target)
    try:
        (folder / "new").mkdir()
        yield folder / "new"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def put_in_place(new: Path, target: Path, replaceable: Callable[[Path], bool]) -> None:
    """Makes `new`, from `work_folder`, the target: by one rename where that is free or an empty folder, else by one
    exchange of the two, after which the old one is in `new`.

    A folder for which `replaceable` is False stays: FileExistsError. Where the file system cannot exchange, the old one
    is renamed away first, and back when the new one cannot follow. A stranger's folder that came in between gets
    another name, which the error says.
    """
    while True:
        try:
            os.rename(new, target)  # POSIX: replaces an empty folder and nothing else
            return
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        if not replaceable(target):
            raise FileExistsError(errno.EEXIST, "exists and is not replaced", str(target))
        with suppress(FileNotFoundError):  # another process has just removed it
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


def _make(target: Path) -> tuple[Path, int]:
    """A new work folder and the lock on it, -1 where there are no locks."""
    while True:
        folder = target.with_name(f".{target.name}.ftbert-{secrets.token_hex(4)}")
        folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            lock = _lock(folder)
            # Between mkdir and lock another process may have taken it for a leftover.
            if lock is not None and folder.exists():
                return folder, lock
            if lock is not None and lock >= 0:
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock, -1 where there are no locks, None when another process has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        return -1
    return handle


def _clear_up(target: Path) -> None:
    """Removes what killed processes left of this target, and puts back an old one that had stepped aside."""
    name = re.compile(re.escape(f".{target.name}.ftbert-") + "[0-9a-f]{8}")
    for path in [path for path in target.parent.iterdir() if name.fullmatch(path.name)]:
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
                continue  # another user's
            lock = _lock(path)
            if lock is None or lock < 0:
                continue
            try:
                if (path / "old").exists() and not target.exists():
                    os.rename(path / "old", target)  # an error where one has come since: nothing is removed
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
