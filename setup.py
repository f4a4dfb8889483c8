"""Builds the compiled library with CMake and puts it into the package. Everything else is in pyproject.toml.

pip install --no-build-isolation .         the binding must be compiled against the torch that will load it
pip install --no-build-isolation -e .

Environment: FTBERT_CUDA (AUTO, ON, OFF), FTBERT_CUDA_ARCHS ("80;90a").
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARIES = Path("ftbert", "lib")
OPTIONS = ("FTBERT_CUDA", "FTBERT_CUDA_ARCHS")


class CMakeBuild(build_ext):
    """One CMake build beside setuptools' own folders; it leaves the library in the source tree."""

    def run(self) -> None:
        build = ROOT / "build"
        # cmake and ninja installed by pip lie beside this Python, which need not be on the PATH.
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DPython3_EXECUTABLE={sys.executable}"]
        if not (build / "CMakeCache.txt").exists() and shutil.which("ninja", path=environment["PATH"]):
            configure += ["-G", "Ninja"]
        configure += [f"-D{name}={os.environ[name]}" for name in OPTIONS if name in os.environ]
        compile_ = ["cmake", "--build", str(build), "--parallel", str(os.cpu_count() or 1)]
        for command in (configure, compile_):
            subprocess.run(command, check=True, env=environment)
        if not self.editable_mode:
            target = Path(self.build_lib) / LIBRARIES
            target.mkdir(parents=True, exist_ok=True)
            for library in (ROOT / LIBRARIES).glob("*.so"):
                shutil.copy2(library, target)

    def get_outputs(self) -> list[str]:
        base = ROOT if self.editable_mode else Path(self.build_lib)
        return [str(base / LIBRARIES / library.name) for library in (ROOT / LIBRARIES).glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# The extension has no sources of its own: it tells setuptools that the wheel belongs to this platform.
setup(ext_modules=[Extension("ftbert.lib.libftbert", sources=[])], cmdclass={"build_ext": CMakeBuild})
