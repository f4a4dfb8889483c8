"""Norms of training under DistributedDataParallel, in two processes: over gloo on the CPU, over NCCL on two GPUs."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from compare import assert_close
from conftest import have_gpu
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from training_norms import random

from ftbert.norm import FusedBatchNorm2d, FusedLayerNorm, FusedRMSNorm

WORLD = 2


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The gradients of a step, by the names of parameters."""
    module = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def train(rank: int, backend: str, rendezvous: Path) -> None:
    """What one process does."""
    device, gpus = (f"cuda:{rank}", [rank]) if backend == "nccl" else ("cpu", None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if gpus:
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))

    torch.manual_seed(0)
    rows = nn.Sequential(nn.Linear(16, 32), FusedLayerNorm(32, memory_efficient="auto"), nn.Linear(32, 32), FusedRMSNorm(32, memory_efficient=True), nn.Linear(32, 8)).to(device)
    images = nn.Sequential(nn.Conv2d(3, 8, 3), FusedBatchNorm2d(8), nn.Conv2d(8, 4, 3)).to(device)
    torchs = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()), nn.Conv2d(8, 4, 3)).to(device)
    for ours, theirs in ((images[0], torchs[0]), (images[1], torchs[1][0]), (images[2], torchs[2])):
        theirs.load_state_dict(ours.state_dict())
    alone = copy.deepcopy(rows)  # as one process that has the joined batch
    several, of_ours, of_torchs = (DistributedDataParallel(model, gpus) for model in (rows, images, torchs))
    for seed in range(3):
        x = random(6 * WORLD, 16, device=device, seed=seed)
        wanted = step(alone, x)
        got = step(several, x.chunk(WORLD)[rank])
        assert got.keys() == wanted.keys() and len(got) == 9
        for name, grad in got.items():
            assert_close(grad, wanted[name], atol=1e-5, what=name)
        # Statistics are each process's own, and buffers those of the first one.
        x = random(3 * WORLD, 3, 9, 9, device=device, seed=seed) * 2 + seed
        got, wanted = step(of_ours, x.chunk(WORLD)[rank]), step(of_torchs, x.chunk(WORLD)[rank])
        for (name, grad), want in zip(got.items(), wanted.values(), strict=True):
            assert_close(grad, want, atol=1e-5, what=name)
        for (name, buffer), want in zip(images.named_buffers(), torchs.buffers(), strict=True):
            assert_close(buffer, want, atol=1e-5, what=name)
    distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_processes_train_as_one(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and not (have_gpu() and torch.cuda.device_count() >= WORLD):
        pytest.skip("fewer than two GPUs")
    multiprocessing.spawn(train, (backend, tmp_path / "rendezvous"), WORLD)
