"""What a model's files hold, as a digest of their bytes, which is kept until they change."""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ftbert.checkpoint import in_parts
from ftbert.user_cache import make_private, untrusted

_PART = 16 << 20  # bytes that a thread reads and hashes at once: SHA-256 takes 1.2 GB/s on a core
_SETTLED = 2.0  # seconds: a file that has changed less long ago may change again within one tick of its time


def digest_of(path: Path, kept: Path | None) -> str:
    """SHA-256 of the SHA-256 of each _PART of the file. kept: a folder that remembers digests, each for as long as the
    file's place, size, inode and times stay. The kernel alone sets the time of an inode's change, so that the file's
    owner cannot hide one. Without such a folder, or where others may write there, the file is read each time. OSError
    where it cannot be read."""
    stat = path.stat()
    known = [os.path.realpath(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    if kept is not None and untrusted(kept.parent, kept):
        kept = None
    entry = None if kept is None else kept / f"{hashlib.sha256(str(known[0]).encode()).hexdigest()[:32]}.json"
    if entry is not None and not untrusted(entry):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(entry.read_text(encoding="utf-8"))
            if found["file"] == known:
                return str(found["digest"])
    digest = _digest(path, stat.st_size)
    if entry is not None and time.time() - stat.st_ctime > _SETTLED:
        with suppress(OSError):  # a full disk, or a folder that is read only
            make_private(entry.parent)
            beside = entry.with_name(f"{entry.name}.{os.getpid()}")
            beside.write_text(json.dumps({"file": known, "digest": digest}), encoding="utf-8")
            beside.chmod(0o644)
            beside.replace(entry)
    return digest


def _digest(path: Path, size: int) -> str:
    with path.open("rb") as file:

        def part(begin: int, end: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), end - begin, begin)).digest()

        return hashlib.sha256(b"".join(in_parts(part, max(size, 1), _PART))).hexdigest()
