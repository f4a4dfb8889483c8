"""Calls in forked children with bounds on time and memory, so that a crash or a hang is a result; fuzzers count them."""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SECONDS, BYTES = 5.0, 4 << 30
GOOD = ("right", "refused")
Tell = Callable[[str], None]
Case = tuple[str, Path, Callable[[], str]]  # its name, what an error must name, a reader: "right" or what was wrong


def run(call: Callable[[], Any], seconds: float = SECONDS, memory: int = BYTES) -> tuple[str, Any]:
    """("done", result), ("raised", (type name, is ValueError or OSError, message)), ("memory", ...), ("crash", signal)
    or ("hang", seconds). `call` must bear it if the parent has started OpenMP's threads. `memory` is on top of the
    parent's."""
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


def judge(outcome: tuple[str, Any], path: Path) -> tuple[str, str]:
    """(class, words) of a reader's outcome."""
    kind, what = outcome
    if kind == "done":
        return ("right", "") if what == "right" else ("silent wrong result", what)
    if kind == "raised":
        name, expected, message = what
        if expected and path.name in message and len(message) < 20_000:
            return "refused", message
        return ("wrong type" if not expected else "no name" if len(message) < 20_000 else "long message"), f"{name}: {message[:300]}"
    return kind, str(what)[:300]


def count_cases(cases: Iterable[Case], tell: Tell, seconds: float = SECONDS, memory: int = BYTES) -> Counter[str]:
    """Counts by class; `tell` gets a line for each case that was neither read rightly nor refused."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, path, read in cases:
            verdict, words = judge(run(read, seconds, memory), path)
            found[verdict] += 1
            if verdict not in GOOD:
                tell(f"{name}: {verdict}: {words}")
    return found


def main(description: str | None, fuzz: Callable[[int, int, Tell], Counter[str]], count: int) -> int:
    """The command of a fuzzer: 1 where a case was neither read rightly nor refused, or all were the same."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help=f"files (default {count})")
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    options = parser.parse_args()
    found = fuzz(options.count, options.seed, lambda line: print(line, flush=True))
    print(f"{options.count} files: " + ", ".join(f"{n} {kind}" for kind, n in found.most_common()))
    return int(set(found) != set(GOOD))
