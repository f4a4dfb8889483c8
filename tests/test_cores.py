"""How many threads calls on the CPU take, and how these wait for each other while others keep the cores busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ftbert
from ftbert import cores

V2 = "24 23 0:22 {mount} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "30 23 0:26 {mount} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 23 0:27 {mount} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)
Cgroup = Callable[..., Path]
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
measured = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="this system does not say for how long threads wait"
)


@pytest.fixture
def cgroup(tmp_path: Path) -> Cgroup:
    def make(mounts: str, groups: str, files: dict[str, str], mount: str = "/") -> Path:
        others = "22 1 0:20 / /proc rw - proc proc rw\n23 1 0:21 / /tmp rw - tmpfs  rw\n"  # one without a source
        for name, text in {
            "proc/self/mountinfo": others + mounts.format(mount=mount),
            "proc/self/cgroup": groups,
            **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    return make


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads; behind the test that, and what calls follow, are as they were."""
    ftbert.load_library()
    before, reason, number = torch.get_num_threads(), cores._reason, cores._number
    followed = torch.ops.ftbert.busy_cores()["followed"]
    yield torch.set_num_threads
    torch.set_num_threads(before)
    cores._reason, cores._number = reason, number
    torch.ops.ftbert.follow_busy_cores(followed)


@pytest.mark.parametrize(
    ("mounts", "mount", "groups", "files", "quota"),
    [
        pytest.param(V2, "/", "0::/\n", {"cpu.max": "250000 100000\n"}, 2.5, id="a container"),
        pytest.param(V2, "/", "0::/a/b\n", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5, id="around it"),
        pytest.param(V2, "/", "0::/../other\n", {"cpu.max": "300000 100000"}, 3.0, id="outside of its namespace"),
        pytest.param(V2, "/", "0::/\n", {"cpu.max": "max 100000\n"}, None, id="no limit"),
        pytest.param(V2, "/", "0::/\n", {}, None, id="the root of v2"),
        pytest.param(
            V1, "/", "4:cpu,cpuacct:/job\n3:cpuset:/job\n0::/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
             "cpuset/job/cpu.cfs_quota_us": "100000\n", "cpuset/job/cpu.cfs_period_us": "100000\n"}, 4.0, id="v1",
        ),
        pytest.param(
            V1, "/docker/7f", "4:cpu,cpuacct:/docker/7f\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 1.5,
            id="v1, the host's path",
        ),
        pytest.param(
            V1, "/", "4:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, None, id="v1, no limit",
        ),
    ],
)  # fmt: skip
def test_a_cgroup_limits_cores(
    cgroup: Cgroup, monkeypatch: pytest.MonkeyPatch, mounts: str, mount: str, groups: str, files: dict[str, str],
    quota: float | None,
) -> None:  # fmt: skip
    root = cgroup(mounts, groups, files, mount)
    assert cores.cpu_quota(root) == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = cores.cores(root)
    assert found.number == (8 if quota is None else max(1, int(quota)))
    assert ("quota" in found.reason) == (quota is not None)


def test_affinity_limits_cores(cgroup: Cgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    found = cores.cores(cgroup(V2, "0::/\n", {"cpu.max": "400000 100000"}))
    assert found == cores.Cores(1, "1 core that this process may run on")


def test_threads_follow_cores(threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "_number", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "cpu_quota", lambda root: 2.5)
    threads(8)  # as torch by itself
    cores.take()
    about = cores.told()
    assert torch.get_num_threads() == 2 and about["threads"] == "2"
    assert about["threads_reason"] == "a CPU quota of 2.5 cores"
    threads(3)
    assert cores.told()["threads_reason"] == "torch.set_num_threads"


@pytest.mark.parametrize("asked", ["environment", "torch"])
def test_who_asks_for_threads_has_them(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "_number", None)
    monkeypatch.setattr(cores, "cpu_quota", lambda root: 1.0)
    many = 7 + (os.cpu_count() or 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked == "environment":
        many = os.cpu_count() or 1
        monkeypatch.setenv("OMP_NUM_THREADS", str(many))
    threads(many)
    cores.take()
    assert torch.get_num_threads() == many
    assert cores.told()["threads_reason"] == (
        "torch.set_num_threads" if asked == "torch" else f"OMP_NUM_THREADS={many}"
    )


# How many threads the process has more while cores are busy, and while they are free again; each once it is as wanted.
SURPLUS = """
import os, time, torch, ftbert
torch.set_num_threads(2)
ftbert.load_library()
torch.add(torch.ones(1 << 20), 1)
def threads(wanted):
    end = time.monotonic() + 60
    while (found := len(os.listdir("/proc/self/task")) - before) != wanted and time.monotonic() < end:
        pass
    return found
before = len(os.listdir("/proc/self/task"))
more = max(2, len(os.sched_getaffinity(0)))
torch.ops.ftbert.follow_busy_cores(True, True)
print(threads(more) == more, threads(more) == more and torch.ops.ftbert.busy_cores()["crowded"])
torch.ops.ftbert.follow_busy_cores(True, False)
print(threads(0) == 0, not torch.ops.ftbert.busy_cores()["crowded"])
"""


@measured
def test_there_are_more_threads_than_cores_while_those_are_busy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SURPLUS],
        env=os.environ | {"GOMP_SPINCOUNT": "300000"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True"] * 4


@measured
@pytest.mark.parametrize("said", [None, "OMP_WAIT_POLICY=active", "GOMP_SPINCOUNT=1000"])
def test_who_says_how_threads_wait_has_it(
    said: str | None, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(*said.split("="))
    threads(2)
    cores.take()
    assert torch.ops.ftbert.busy_cores()["followed"] == (said is None)
    assert ("sleep" if said is None else said) in cores.told()["busy_cores"]
