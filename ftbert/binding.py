"""Compiles the binding for a release of torch that the package has none for, once, into the user's cache.

A wheel carries the binding's sources and the core's headers (lib/csrc); they need a C++20 compiler, not CMake. In a
checkout, where sources may be newer than the core, `make build` does it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftbert.torch_release import binding_name, torch_release
from ftbert.user_cache import cache_folder, locked, make_private, untrusted
from ftbert.version import __version__

_OLDEST = (2, 9)  # its headers are the first that the sources compile with
_COMPILERS = ("c++", "g++", "clang++")


def compiled(folder: Path, known: list[str], torch: Path, version: str) -> Path:
    """The binding for this torch, compiled against the core in `folder` unless it is in the cache. known: releases for
    which `folder` has one. torch: its package's folder. ImportError says what is missing."""
    sources = folder / "csrc" / "binding"
    none = f"ftbert has bindings for torch {', '.join(known) or 'of no release'}, and this is torch {version}"
    other = f"install torch {known[-1]} (`pip install 'torch=={known[-1]}.*'`)" if known else "install ftbert again"
    release = torch_release(version).split(".")
    if tuple(int(part) for part in release[:2]) < _OLDEST:
        raise ImportError(f"{none}; ftbert needs torch {'.'.join(map(str, _OLDEST))} or later: {other}")
    if not sources.is_dir():
        raise ImportError(f"{none}; build it beside this one (`make build`), or {other}")
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise ImportError(f"{none}; a C++ compiler would build one, and none is here: {other}, or apt install g++")
    with _place(folder, torch, version, f"{none}; {other}") as file:
        if not file.exists():
            _compile(compiler, folder, torch, file, f"{none}; {other}")
    return file


@contextmanager
def _place(folder: Path, torch: Path, version: str, otherwise: str) -> Iterator[Path]:
    """Where the binding lies, held by one process at a time. Another core, torch or folder has another place."""
    cache = cache_folder()
    if cache is None:
        raise ImportError(f"{otherwise}, or let FTBERT_CACHE name a folder, where one for this torch is built")
    core = (folder / "libftbert_core.so").stat()
    facts = [__version__, str(folder), core.st_mtime_ns, core.st_size, version, str(torch)]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    place = cache / "bindings" / f"{torch_release(version)}-{digest}"
    file = place / f"lib{binding_name(version)}.so"
    try:
        make_private(place)
        if problem := untrusted(cache, place.parent, place, file):
            raise ImportError(f"{otherwise}; one for this torch is not built, since {problem}")
        with locked(place / "lock"):
            yield file
    except OSError as error:
        raise ImportError(
            f"{otherwise}, or let FTBERT_CACHE name a folder with room, where one for this torch is built ({error})"
        ) from error


def _compile(compiler: str, folder: Path, torch: Path, file: Path, otherwise: str) -> None:
    name = file.stem.removeprefix("lib")
    print(f"ftbert: building {name} with {compiler}, once; a minute or two ({file})", file=sys.stderr, flush=True)
    cuda = json.loads((folder / "build.json").read_text(encoding="utf-8"))["cuda"]
    includes = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        together, made = Path(scratch) / "binding.cpp", Path(scratch) / file.name
        sources = sorted((folder / "csrc" / "binding").glob("*.cpp"))
        together.write_text("".join(f'#include "binding/{source.name}"\n' for source in sources), encoding="utf-8")
        command = [
            *compiler.split(), "-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden",
            "-D_GLIBCXX_USE_CXX11_ABI=1", *["-DFTBERT_CUDA"] * bool(cuda), f"-I{folder / 'csrc'}",
            *(f"-isystem{include}" for include in includes), str(together), "-o", str(made), f"-L{folder}",
            f"-L{torch / 'lib'}", "-lftbert_core", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{folder}:{torch / 'lib'}",
            "-Wl,-s", "-Wl,--no-undefined", "-Wl,--allow-shlib-undefined",
        ]  # fmt: skip
        here = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=here)
        if (full := os.strerror(errno.ENOSPC)) in done.stderr:
            raise OSError(errno.ENOSPC, full, str(file.parent))  # `_place` says what to do
        if done.returncode:
            log = file.with_suffix(".log")
            log.write_text(f"{' '.join(command)}\n{done.stderr}", encoding="utf-8")
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise ImportError(f"{otherwise}; {compiler} builds none for this torch: {first} (all of it: {log})")
        os.replace(made, file)
