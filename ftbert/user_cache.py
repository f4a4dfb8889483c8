"""The user's cache folder: where it is, who may write there, and one process at a time.

$FTBERT_CACHE, else $XDG_CACHE_HOME/ftbert, else ~/.cache/ftbert; FTBERT_CACHE=off switches it off.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def cache_folder() -> Path | None:
    """None when the cache is switched off, and where the user has no home (in a container, one without an entry)."""
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


def untrusted(*paths: Path) -> str:
    """Why other users may have written these folders or files, and what to do; "" where they cannot have, or where one
    does not exist. The rule is ssh's: each belongs to this user or root, and no other user may write."""
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue  # whoever goes on says so
        if found.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user; FTBERT_CACHE names another folder"
        if found.st_mode & 0o022:
            return f"others can write to {path}; `chmod -R go-w {path}`, or name another with FTBERT_CACHE"
    return ""


def make_private(folder: Path) -> None:
    """Makes the folder and its parents; whatever the umask says, only this user may write there."""
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            folder.chmod(folder.stat().st_mode & ~0o022)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file: one process at a time, and a killed one lets go. Where a file system has no locks (some
    network file systems), several processes go on at once."""
    handle = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)  # to read: another user's file will do
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
