"""What counts of a GPU: its own capability, or that of the code of this build that runs there; FTBERT_MAX_GPU. What a GPU,
its code and the variable come to is tested in tests/cpp/core_test.cpp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import have_gpu
from own_kernels import VARIANTS, have_warpgroups

from ftbert import gpus
from ftbert.gpus import Gpu
from ftbert.tuning import Machine, Product, described, gemm_table, tuner_module

ROOT = Path(__file__).resolve().parent.parent
A100, HOPPER = Gpu(80, 108, 80, shared_bytes=163 << 10), Gpu(90, 132, 90, warpgroups=1, kernels="wgmma_tile, few_rows")
HELD = Gpu(80, 132, 90, why="the code of this build that runs here is for 8.0")
on_a_gpu = pytest.mark.skipif(not have_gpu(), reason="no GPU")


def seem(monkeypatch: pytest.MonkeyPatch, *found: Gpu | Exception) -> None:
    """This machine seems to have these GPUs."""

    def of(device: int | torch.device) -> Gpu:
        gpu = found[device if isinstance(device, int) else device.index]
        if isinstance(gpu, Exception):
            raise gpu
        return gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Fake")
    monkeypatch.setattr(Gpu, "of", staticmethod(of))


def test_info_says_what_counts_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    seem(monkeypatch, HOPPER, HELD, RuntimeError("kernel failed: this build has no code for this GPU\nat ..."))
    assert gpus.told_gpus() == {
        "cuda:0_capability": "9.0",
        "cuda:0_products": "wgmma_tile, few_rows",
        "cuda:1_capability": "9.0 (held to 8.0)",
        "cuda:1_reason": "the code of this build that runs here is for 8.0",
        "cuda:1_products": "cuBLASLt's alone",
        "cuda:2_reason": "kernel failed: this build has no code for this GPU",
    }


def test_a_held_gpu_has_tables_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seem(monkeypatch, HOPPER, HELD, Gpu(90, 170, 120))
    monkeypatch.setattr(gemm_table, "build_info", lambda: {"cuda_gemm": "cuBLASLt 1.2.3"})
    own, held, later = (Machine.of(torch.device("cuda", index)) for index in range(3))
    assert (own.gpu, own.kind, own.capability) == ("NVIDIA Fake", "sm_90 x 132", 90)
    assert (held.gpu, held.kind, held.capability) == ("NVIDIA Fake as 8.0", "sm_90 as 80 x 132", 80)
    assert (later.gpu, later.kind, later.capability) == ("NVIDIA Fake as 9.0", "sm_120 as 90 x 170", 90)
    assert not own.is_like(held) and own.file_name != held.file_name


@pytest.mark.skipif(not VARIANTS, reason="this build has no kernels for GPUs")
def test_kernels_are_asked_about_imagined_gpus() -> None:
    product = described(Product("fp16", 768, 768), 4096)
    for gpu in (A100, HOPPER, HELD):
        found = [variant for variant in VARIANTS["wgmma_tile"] if tuner_module().supports(gpu, "wgmma_tile", variant, product)]
        assert bool(found) == bool(gpu.warpgroups)


@on_a_gpu
def test_facts_are_those_of_the_driver() -> None:
    gpu, told = Gpu.of("cuda"), torch.cuda.get_device_properties("cuda")
    assert gpu.device_capability == 10 * told.major + told.minor >= gpu.capability
    assert bool(gpu.why) == (gpu.capability < gpu.device_capability)
    assert gpu.sm_count == told.multi_processor_count and gpu.l2_bytes == told.L2_cache_size
    assert 48 << 10 < gpu.shared_bytes <= gpu.shared_bytes_of_sm <= 256 << 10
    assert gpu.clock_khz > 500_000 and (gpu.bandwidth == 0 or 1e11 < gpu.bandwidth < 2e13)


def told(most: str) -> subprocess.CompletedProcess[str]:
    """By `ftbert info` of a process with that FTBERT_MAX_GPU."""
    command = [sys.executable, "-m", "ftbert", "info", "--json"]
    environment = {**os.environ, "FTBERT_MAX_GPU": most, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


@on_a_gpu
def test_the_variable_is_obeyed_or_refused() -> None:
    gpu = Gpu.of("cuda")
    wrong = json.loads(told("8.0").stdout)["build"]
    assert "FTBERT_MAX_GPU: expected one of 75, 80, 86, 89, 90, got 8.0" in wrong["cuda:0_reason"]
    same = json.loads(told("90").stdout)["build"]
    if gpu.capability <= 90:
        assert same["cuda:0_capability"] == gpu.told and same["cuda:0_products"] == (gpu.kernels or "cuBLASLt's alone")
    if have_warpgroups():
        lesser = json.loads(told("80").stdout)["build"]
        assert "build with FTBERT_CUDA_ARCHS=80-virtual" in lesser["cuda:0_reason"] and "cuda:0_products" not in lesser
