"""Finds and loads the compiled libraries, once, and says how they were built.

libftbert_core.so holds kernels, models and products, and knows nothing of torch. A binding for each release of torch
lies beside it, libftbert_torch-2.13.so, which registers the ops and classes; the one for this torch is loaded. Where
none is, ftbert/binding.py compiles it.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch

from ftbert import binding, cores
from ftbert.torch_release import binding_name, torch_release
from ftbert.version import build_record

_FOLDER = Path(__file__).parent / "lib"
_CORE = "libftbert_core.so"


def library_path() -> Path:
    """The compiled library for this torch: what a C++ program loads before it reads a saved module. It loads the core
    beside it. Where the package has none for this torch it is compiled, once. ImportError says why there is none."""
    named = _FOLDER / f"lib{binding_name(torch.__version__)}.so"
    if named.exists():
        return named
    if not (_FOLDER / _CORE).exists():
        raise ImportError(
            f"ftbert's compiled libraries are missing ({_CORE} in {_FOLDER}); "
            "build them with `make build`, or `pip install --no-build-isolation .`"
        )
    return binding.compiled(_FOLDER, known_releases(), Path(torch.__path__[0]), torch.__version__)


def known_releases() -> list[str]:
    """Of torch, for which a binding lies in the package: "2.9", "2.13"."""
    found = (file.stem.partition("-")[2] for file in _FOLDER.glob(f"lib{binding_name('*')}.so"))
    return sorted(found, key=lambda release: [int(part) if part.isdigit() else 0 for part in release.split(".")])


@cache
def load_library() -> None:
    """Registers `torch.ops.ftbert` and `torch.classes.ftbert`, which `torch.jit.load` and `torch.export.load` need
    before they meet a model of ftbert. Once is enough. Torch's number of threads then follows the affinity and the CPU
    quota (ftbert/cores.py). ImportError says what to do when it cannot."""
    path = library_path()
    _refuse_a_second(path)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(_why_not(path, str(error.__cause__ or error))) from error  # torch says less than its cause
    from ftbert import _fake

    _fake.register()
    cores.take()


@cache
def core_library() -> ctypes.CDLL:
    """The core, as loaded behind the binding: its C functions."""
    load_library()
    return ctypes.CDLL(str(_FOLDER / _CORE))


def _refuse_a_second(path: Path) -> None:
    """ImportError where this process runs the binding of another copy of ftbert: torch ends a process that registers
    the same classes twice."""
    try:
        mapped = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    except OSError:
        return
    for line in mapped:
        file, deleted, _ = line.partition("/")[2].partition(" (deleted)")
        name = file.rpartition("/")[2]
        if not (name.startswith(f"lib{binding_name('')}") and name.endswith(".so")):
            continue
        if deleted or not (os.path.exists(f"/{file}") and path.samefile(f"/{file}")):
            ours = f"ftbert of {path} is the second; " if f"/{file}" != str(path) else "its file was replaced since; "
            raise ImportError(
                f"this process has loaded /{file}, and torch takes one ftbert in a process; {ours}"
                "start a new process (in a notebook, restart the kernel)"
            )


def _why_not(path: Path, error: str) -> str:
    this, cuda = f"torch {torch.__version__}", str(build_record().get("cuda", ""))
    if "libcublasLt" in error:
        theirs, major = f"CUDA {torch.version.cuda}" if torch.version.cuda else "none", cuda.partition(".")[0]
        return (
            f"this build of ftbert has CUDA {cuda} and takes cuBLAS from torch's packages, but {this} has {theirs} "
            f"({error}); install a torch for CUDA {major}, `pip install nvidia-cublas`, or ftbert's wheel for the CPU"
        )
    if "GLIBC" in error:
        return f"this system is too old for this wheel of ftbert ({error}); it needs Ubuntu 22.04, Debian 12 or later"
    release = torch_release(torch.__version__)
    return (
        f"ftbert's {path.name} does not load with {this} ({error}); install ftbert again, or where it was built beside "
        f"another torch {release}, build it beside this one: `make build`, or `pip install --no-build-isolation .`"
    )


def build_info() -> dict[str, str]:
    """How the library was built and what it can use here: keys cuda, cuda_reason, cpu_isa, cpu_isas, gemm, torch,
    threads, ..."""
    load_library()
    info = dict(torch.ops.ftbert.build_info())
    info["torch"] = torch.__version__
    info |= cores.told()
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            info[f"cuda:{i}"] = f"{torch.cuda.get_device_name(i)} (capability {major}.{minor})"
    return info
