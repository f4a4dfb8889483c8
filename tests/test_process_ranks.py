"""A model shared by processes of torch.distributed, as torchrun starts them: over gloo here, NCCL on GPUs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import have_gpu

_SCRIPT = Path(__file__).with_name("rank_process.py")


@pytest.fixture(params=["cpu", "cuda"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not (have_gpu() and torch.cuda.device_count() > 1):
        pytest.skip("needs two GPUs")
    return str(request.param)


def run(ranks: int, *arguments: str) -> list[tuple[int, str, str]]:
    """Of each rank the exit code and what it wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, str(_SCRIPT), *arguments], env=common | {"RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return [(process.returncode, *written) for process in processes for written in [process.communicate(timeout=300)]]
    finally:
        for process in processes:
            process.kill()


def assert_done(kind: str, ranks: int, what: str, parallel: str, words: str) -> None:
    if kind == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for rank, (code, out, errors) in enumerate(run(ranks, what, parallel, kind)):
        assert code == 0, errors[-3000:]
        assert re.search(f"rank {rank}: {words}", out)


@pytest.mark.parametrize(("parallel", "ranks"), [("tensor", 2), ("tensor", 4), ("pipeline", 2)])
def test_every_family(kind: str, parallel: str, ranks: int) -> None:
    assert_done(kind, ranks, "families", parallel, r"\d\d families")


def test_every_call_of_stages(kind: str) -> None:
    """Three: one receives and sends."""
    assert_done(kind, 3, "calls", "pipeline", r"\d\d calls")


@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_a_rank_that_is_killed_ends_the_others(parallel: str) -> None:
    (code, out, errors), (other, _, _) = run(2, "killed", parallel)
    assert other == -9 and code == 0, errors[-3000:]
    took = re.match(r"([\d.]+) s: rank 0 of 2: rank 1 has ended or failed", out)
    assert took and float(took[1]) < 10
