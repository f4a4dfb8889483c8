"""Builds: the library that has CUDA in it on a machine without a GPU, and CPU kernels of another build folder."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ftbert

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ROOT / "build-cuda" / "lib"
CUBLAS = ROOT / ".models" / "nvidia" / "cu13"
PROGRAM = """
import json, sys
from pathlib import Path

import torch
from ftbert import _library

_library._FOLDER = Path(sys.argv[1])  # before anything asks for it
import ftbert

try:
    ftbert.load(sys.argv[2], device="cuda")
except RuntimeError as error:
    said = str(error)
model = ftbert.load(sys.argv[2])
arguments = torch.load(sys.argv[3])
torch.save(model(*arguments).last_hidden_state, sys.argv[3])
print(json.dumps({"said": said, **_library.build_info()}))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.skipif(not (LIBRARIES / "libftbert_core.so").exists(), reason="make cuda-compile has not built the library for GPUs")
def test_computes_the_same_on_the_cpu(tiny_bert: Callable[..., Path], tmp_path: Path) -> None:
    """Every symbol is there, nothing asks for a driver when it is loaded."""
    folder, file = tiny_bert(tmp_path), tmp_path / "tensors.pt"
    ids, mask = torch.randint(5, 100, (5, 40)), torch.randint(0, 2, (5, 40))
    want = ftbert.load(folder)(ids, mask).last_hidden_state
    torch.save((ids, mask), file)
    command = [sys.executable, "-c", PROGRAM, str(LIBRARIES), str(folder), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["cuda"] == "no" and "driver" in facts["cuda_reason"] and facts["cuda_reason"] in facts["said"]
    assert torch.equal(torch.load(file), want)


@pytest.mark.skipif(not shutil.which("nvcc") or not CUBLAS.exists(), reason="no nvcc, or no cuBLAS from make cuda-compile")
@pytest.mark.parametrize(
    "asked, got",
    [
        pytest.param("", {"sm_80", "sm_90a"}, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
        ("80;90", {"sm_80", "sm_90a"}),
        ("90a;90-virtual", {"sm_90a", "compute_90"}),
        ("80-virtual", {"compute_80"}),
        ("75;86-real;89-virtual", {"sm_75", "sm_86", "compute_89"}),
        ("120-virtual", {"compute_120"}),
        ("80:90", {"sm_90"}),
        ("80-ptx", None),
        ("80:90;90a", None),
    ],
)
def test_architectures(asked: str, got: set[str] | None, tmp_path: Path) -> None:
    """sm_90 has none of the warpgroup instructions: whoever asks for it means sm_90a."""
    options = {"CUDA": "ON", "CUDA_ARCHS": asked, "TORCH": "OFF", "CUBLAS_DIR": CUBLAS}
    command = ["cmake", "-S", ROOT, "-B", tmp_path, *(f"-DFTBERT_{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if got is None:
        assert done.returncode != 0 and f"got {asked}" in " ".join(done.stderr.split())
        return
    assert done.returncode == 0, done.stderr
    assert ("90a instead of 90" in done.stdout) == (asked == "80;90")
    named = asked.replace("-real", "") if "virtual" in asked or ":" in asked else "80;90a"
    assert re.search(rf"compiling for GPUs of capability {named}: about \d+ min on \d+ cores\. FTBERT_CUDA_ARCHS=", done.stderr)
    commands = (tmp_path / "compile_commands.json").read_text()
    assert set(re.findall(r"[, ]code=\[?(\w+)", commands)) == got


def test_without_nvcc_its_packages_are_named(tmp_path: Path) -> None:
    folders = [*os.environ["PATH"].split(os.pathsep), "/usr/local/cuda/bin"]
    hidden = sorted({folder for folder in folders if shutil.which("nvcc", path=folder)})
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DFTBERT_CUDA=ON", "-DFTBERT_TORCH=OFF"]
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CUDACXX")}
    done = subprocess.run(
        [*command, f"-DCMAKE_IGNORE_PATH={';'.join(hidden)}"], capture_output=True, text=True, check=False, env=environment
    )
    said = " ".join(done.stderr.split())
    assert done.returncode and "nvcc was not found; set CUDA_HOME" in said
    for package in ("cuda-nvcc", "cuda-crt", "cuda-cccl", "cuda-runtime", "nvvm"):
        assert f"'nvidia-{package}==13.0.*'" in said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets are those of x86-64")
def test_instruction_sets(tmp_path: Path) -> None:
    """A checkout compiles one set of CPU kernels, of this CPU, until others are asked for."""

    def sets(asked: str) -> list[str]:
        options = [f"-DFTBERT_CPU_ISAS={asked}"] if asked else []
        command = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Ninja", "-DFTBERT_CUDA=OFF", "-DFTBERT_TORCH=OFF", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return [" ".join(done.stderr.split())]
        return sorted(set(re.findall(r"FTBERT_ISA=(\w+)", (tmp_path / "compile_commands.json").read_text())))

    (native,) = sets("")
    here = {name: value for name, value in os.environ.items() if name != "FTBERT_MAX_CPU_ISA"}
    asked = [sys.executable, "-c", "from ftbert._library import build_info; print(build_info()['cpu_isa'])"]
    best = subprocess.run(asked, env=here, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert native == ("avx512_bf16" if best == "amx" else best)
    assert sets("avx2;avx512") == ["avx2", "avx512"]
    assert sets("ALL") == ["avx2", "avx2_vnni", "avx512", "avx512_bf16", "avx512_vnni"]
    (said,) = sets("sse9")
    assert "FTBERT_CPU_ISAS: expected NATIVE, ALL or a list of avx2;avx2_vnni;avx512;" in said and "got sse9" in said


def test_kernels_of_another_folder_are_those_that_would_be_compiled(tmp_path: Path) -> None:
    """FTBERT_KERNELS_OF: not where they were compiled of other sources, in another way, or not at all."""

    def configure(name: str, **options: Any) -> str:
        given = {"FTBERT_TORCH": "OFF", "FTBERT_CUDA": "OFF", **options}
        command = ["cmake", "-S", ROOT, "-B", tmp_path / name, *(f"-D{key}={value}" for key, value in given.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else " ".join(done.stderr.split())

    other, foreign, none = tmp_path / "other", tmp_path / "foreign", tmp_path / "none"
    assert not configure("other")
    foreign.mkdir()
    (foreign / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={foreign}\n")
    refused: list[tuple[Path, dict[str, str], str]] = [
        (none, {}, f"expected a build folder of ftbert, got {none}"),
        (foreign, {}, f"expected a build folder of {ROOT}, got one of {foreign}"),
        (other, {"CMAKE_CXX_FLAGS": "-O1"}, "expected kernels compiled with CMAKE_CXX_FLAGS=-O1, got some with"),
        (other, {"FTBERT_ASAN": "ON"}, "expected kernels compiled with FTBERT_ASAN=ON, got some with FTBERT_ASAN=OFF;"),
        (other, {"CMAKE_BUILD_TYPE": "Debug"}, "CMAKE_BUILD_TYPE=Debug, got some with CMAKE_BUILD_TYPE=Release;"),
        (other, {}, "_cpu.cpp.o; build that folder first"),
    ]
    for at, (folder, options, words) in enumerate(refused):
        said = configure(str(at), FTBERT_KERNELS_OF=folder, **options)
        assert "FTBERT_KERNELS_OF: " in said and words in said, said
