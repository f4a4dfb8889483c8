"""Which cores this process may use, how many threads calls on the CPU take, and how these wait for each other.

Torch starts a thread for each core that it sees, and knows nothing of a container's share of them. Here that number
follows the affinity and the CPU quota. A number that the user asks for, by OMP_NUM_THREADS, MKL_NUM_THREADS or
torch.set_num_threads, is kept. While others keep the cores busy, threads sleep where they wait for each other
(csrc/binding/team.h), unless OMP_WAIT_POLICY or GOMP_SPINCOUNT says how they wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SYSTEM = Path("/")


@dataclass(frozen=True)
class Cores:
    """number: threads that this process can have at work at the same time. reason: what limits them."""

    number: int
    reason: str


def cores(root: Path = _SYSTEM) -> Cores:
    """By the affinity and the CPU quota; of a quota of 2.5 cores two, since threads that wait for each other all stand
    still once it is used up. root: where proc/ and the folders of cgroups are."""
    may_run_on = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    if quota is None or quota >= may_run_on:
        return Cores(may_run_on, f"{may_run_on} core{'s' * (may_run_on != 1)} that this process may run on")
    return Cores(max(1, int(quota)), f"a CPU quota of {quota:g} core{'s' * (quota != 1)}")


def cpu_quota(root: Path = _SYSTEM) -> float | None:
    """Cores that the cgroup of this process, or one around it, may use at a time; None where none says so."""
    found = [quota for folder in _folders(root) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def wish() -> str | None:
    """The environment variable that says how many threads there shall be."""
    return _said(_THREADS)


def _said(names: Iterable[str]) -> str | None:
    return next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), None)


_reason: str | None = None  # for _number threads of torch's; None before take()
_number: int | None = None


def take() -> None:
    """Once, behind the library: torch gets the number of cores where it has more threads and nobody asked for them, and
    calls begin to see whether others keep the cores busy."""
    import torch

    global _reason, _number
    threads, most = torch.get_num_threads(), cores()
    if (said := wish()) is not None:
        _reason = said
    elif threads == _number:
        _reason = "its share of the cores"
    elif threads not in _torchs_own():
        _reason = "torch.set_num_threads"
    else:
        _reason = most.reason
        if threads > most.number:
            torch.set_num_threads(most.number)
    _number = torch.get_num_threads()
    torch.ops.ftbert.follow_busy_cores(_said(_WAITING) is None)


def share(threads: int) -> None:
    """torch.set_num_threads by ftbert itself."""
    import torch

    global _number
    torch.set_num_threads(threads)
    if _reason is None:  # take() is to come
        _number = threads


def told() -> dict[str, str]:
    """threads, threads_reason, busy_cores: how many threads calls take, why so many, and what they do about cores that
    others keep busy. After take()."""
    import torch

    assert _reason is not None, "the library was not loaded by load_library()"
    threads, state = torch.get_num_threads(), torch.ops.ftbert.busy_cores()
    if threads == 1:
        busy = "one thread, which waits for no other"
    elif (said := _said(_WAITING)) is not None:
        busy = f"threads wait for each other as {said} says"
    elif not state["followed"]:
        busy = "threads spin while they wait for each other; whether cores are busy cannot be seen here"
    else:
        busy = (
            f"threads sleep, not spin, while others keep cores busy; they {'do' if state['crowded'] else 'do not'} now"
        )
    reason = _reason if threads == _number else "torch.set_num_threads"
    return {"threads": str(threads), "threads_reason": reason, "busy_cores": busy}


def sentence() -> str:
    """The same in words, for a log."""
    about = told()
    number = about["threads"]
    return f"{number} thread{'s' * (number != '1')} ({about['threads_reason']}); {about['busy_cores']}"


def _torchs_own() -> set[int]:
    """Numbers of threads that torch may have come to by itself: a thread a core, with or without hyperthreads, of this
    machine or of those that this process may run on."""
    mine, all_ = os.sched_getaffinity(0), range(os.cpu_count() or 1)
    return {len(mine), len(all_), _without_hyperthreads(mine), _without_hyperthreads(all_)}


def _without_hyperthreads(cpus: Iterable[int]) -> int:
    def core(cpu: int) -> str:
        try:
            return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("utf-8")
        except OSError:
            return str(cpu)

    return len({core(cpu) for cpu in cpus})


def _folders(root: Path) -> Iterator[Path]:
    """Of the cgroups that limit this process, v1 and v2, each with those around it that can be seen."""
    for mount, point, kind in _mounts(root):
        for line in _lines(root / "proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if (controllers == "") != (kind == "cgroup2") or (kind == "cgroup" and "cpu" not in controllers.split(",")):
                continue
            top = root / point.lstrip("/")
            # In a container the path may be the host's, of which this mount is the end.
            inside = Path(path).is_relative_to(mount) and ".." not in Path(path).parts
            folder = top / Path(path).relative_to(mount) if inside else top
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(top))


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Of the CPU's cgroups: which folder of them is mounted, where, and cgroup or cgroup2."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount, point = before.split()[3:5]
        kind, _, options = after.split(" ")[:3]  # a source may be empty
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            yield mount, point, kind


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _quota(folder: Path) -> float | None:
    """Cores; None where it has no limit."""
    numbers = " ".join(_lines(folder / "cpu.max")).split() or [
        *_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us"),
    ]  # fmt: skip
    try:
        quota, period = map(int, numbers)
    except ValueError:  # "max", or no such files
        return None
    return quota / period if quota > 0 and period > 0 else None
