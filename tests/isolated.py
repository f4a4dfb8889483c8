"""One call in a forked child with bounds on time and memory, so that a crash or a hang is a result."""

from __future__ import annotations

import os
import pickle
import resource
import select
import signal
import time
from collections.abc import Callable
from typing import Any

SECONDS, BYTES = 5.0, 4 << 30


def run(call: Callable[[], Any], seconds: float = SECONDS, memory: int = BYTES) -> tuple[str, Any]:
    """("done", result), ("raised", (type name, is ValueError or OSError, message)), ("memory", ...), ("crash", signal)
    or ("hang", seconds). The parent must not have started OpenMP's threads. `memory` is on top of the parent's."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _bound(memory)
        try:
            found: tuple[str, Any] = ("done", call())
        except MemoryError as error:
            found = ("memory", str(error))
        except BaseException as error:  # noqa: BLE001 - what it is, is the result
            kind = "memory" if "allocate memory" in str(error) else "raised"
            found = (kind, (type(error).__name__, isinstance(error, ValueError | OSError), str(error)))
        with os.fdopen(theirs, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)
    os.close(theirs)
    data, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([ours], [], [], left)[0]:
            part = os.read(ours, 1 << 16)
            data += part
            if not part:
                break
    hung = left <= 0
    if hung:
        os.kill(child, signal.SIGKILL)
    os.close(ours)
    status = os.waitpid(child, 0)[1]
    if hung:
        return "hang", seconds
    return pickle.loads(data) if os.WIFEXITED(status) and data else ("crash", status)


def _bound(memory: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
