"""Finds and loads the compiled library, once, and says how it was built."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from ftbert import cores
from ftbert.torch_release import torch_release

_LIBRARY = Path(__file__).parent / "lib" / "libftbert.so"


def library_path() -> Path:
    """The compiled library: what a C++ program loads before it reads a saved module."""
    return _LIBRARY


@cache
def load_library() -> None:
    """Registers `torch.ops.ftbert` and `torch.classes.ftbert`, which `torch.jit.load` and `torch.export.load` need
    before they meet a model of ftbert. Once is enough. Torch's number of threads then follows the affinity and the CPU
    quota (ftbert/cores.py). ImportError says how to build when it cannot."""
    if not _LIBRARY.exists():
        raise ImportError(
            f"ftbert's compiled library is missing ({_LIBRARY.name} beside {Path(__file__).name}); "
            "build it with `make build`, or `pip install --no-build-isolation .`"
        )
    _check_torch()
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"ftbert's compiled library does not load with torch {torch.__version__} ({error}); "
            "rebuild it with this torch: `make build`"
        ) from error
    from ftbert import _fake

    _fake.register()
    cores.take()


def _check_torch() -> None:
    """Before the library is loaded: beside another torch it misses symbols, or finds them and crashes."""
    record = _LIBRARY.with_name("built_for.json")
    if not record.exists():  # a library that CMake did not put there
        return
    release = torch_release(json.loads(record.read_text())["torch"])
    if torch_release(torch.__version__) != release:
        raise ImportError(
            f"ftbert was built for torch {release} and this is torch {torch.__version__}; build it beside this one "
            f"(`pip install --no-build-isolation .`, or `make build`), or install torch=={release}"
        )


def build_info() -> dict[str, str]:
    """How the library was built and what it can use here: keys cuda, cuda_reason, cpu_isa, gemm, torch,
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
