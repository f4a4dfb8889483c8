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
