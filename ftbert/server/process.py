"""What the processes of one server share: the extra's packages, signals, a folder for sockets and metrics.

The folder goes with the server, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Set
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("httptools", "msgspec", "orjson", "uvloop")  # of the extra ftbert[serve]
_PREFIX = "ftbert-serve-"
_LOCK = "supervisor.lock"


class ServerFolder:
    """A new folder. As long as this process lives it holds a lock on a file in it, so that others see that it does."""

    def __init__(self) -> None:
        # The path of a socket may have 107 bytes.
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 70 else "/tmp"  # noqa: S108 - made by mkdtemp
        with contextlib.suppress(OSError):
            for path in Path(parent).glob(f"{_PREFIX}*"):
                if _abandoned(path):
                    remove(path)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unlocked = self.path / "unlocked"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)  # nobody sees it without its lock

    def remove(self) -> None:
        remove(self.path)
        os.close(self._lock)


def socket_path(folder: Path, model: int, device: int) -> Path:
    return folder / f"engine-{model}-{device}.sock"


def remove(path: Path) -> None:
    """For the children too, once their supervisor is gone. Follows no link."""
    shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    """Made by this user's server that was killed with all its processes: nobody holds its lock."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        lock = os.open(path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # another's, or one that is being made
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def wait_for_signal(wanted: Set[int], seconds: float, others: Set[int] = frozenset()) -> int | None:
    """The first of `wanted`, which every thread blocks, within so many seconds. One of `others` ends the waiting too.

    CPython's sigtimedwait returns what happens to be on the stack where a process is stopped and continued and the time
    is over meanwhile: only a number that was asked for is a signal.
    """
    got = signal.sigtimedwait(wanted | others, seconds)
    return got.si_signo if got is not None and got.si_signo in wanted else None


def check_extra() -> None:
    """RuntimeError that names the missing packages of the extra and what to type."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise RuntimeError(
            f"ftbert serve needs {', '.join(missing)}. Type: pip install {' '.join(missing)}, or install ftbert[serve]"
        )
