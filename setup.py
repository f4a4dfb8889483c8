"""Builds the compiled library with CMake and puts it into the package; build_backend.py has checked what that needs.

pip install --no-build-isolation .         the binding must be compiled against the torch that will load it
pip install --no-build-isolation -e .
python -m build --no-isolation

Environment: FTBERT_CUDA (AUTO, ON, OFF), FTBERT_CUDA_ARCHS ("80;90a"). pip shows what is compiled with -v.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zlib
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

from build_backend import TORCH, environment
from ftbert.cores import cores
from ftbert.torch_release import torch_release

ROOT = Path(__file__).resolve().parent
LIBRARIES = Path("ftbert", "lib")
OPTIONS = ("FTBERT_CUDA", "FTBERT_CUDA_ARCHS")
DEPENDENCIES = [
    "transformers>=4.48",
    "safetensors",
    "tokenizers",
    "numpy",
    "tqdm",
    "pyarrow",
    "huggingface_hub",
]
# Where a wheel's libraries find torch and cuBLAS: beside ftbert. Paths of the machine that builds are not for others.
RPATH = ["$ORIGIN", "$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/cu13/lib", "$ORIGIN/../../nvidia/cublas/lib"]


def torch_requirement() -> str:
    """Sources can be built for any torch that is new enough. What is compiled belongs to one release."""
    if {"sdist", "egg_info"} & set(sys.argv):
        return f"torch>={TORCH}"
    return f"torch=={torch_release(metadata.version('torch'))}"


class Build(build):
    """A wheel's files start from an empty folder: what another Python or other options left behind is not packed."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = "build/wheel"

    def run(self) -> None:
        shutil.rmtree(self.build_base, ignore_errors=True)
        super().run()


def objects_folder() -> Path:
    """Where a wheel is compiled: kept, so that the next one (with an extra, say) compiles only what has changed.
    Another Python, torch or option has another folder."""
    options = [f"{name}={os.environ.get(name, '')}" for name in (*OPTIONS, "CC", "CXX", "CUDACXX")]
    facts = [sys.executable, metadata.version("torch"), *options]
    return ROOT / "build" / f"wheel-{zlib.crc32(chr(0).join(facts).encode()):08x}"


class CMakeBuild(build_ext):
    """An editable install shares `make build`'s folder and leaves the library in the source tree. A wheel touches
    neither."""

    def run(self) -> None:
        folder = ROOT / "build" if self.editable_mode else objects_folder()
        configure = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}"]
        if not (folder / "CMakeCache.txt").exists() and shutil.which("ninja", path=environment()["PATH"]):
            configure += ["-G", "Ninja"]
        configure += [f"-D{name}={os.environ[name]}" for name in OPTIONS if name in os.environ]
        if not self.editable_mode:
            configure += [f"-DFTBERT_LIB_DIR={self._libraries().resolve()}"]
            configure += ["-DFTBERT_TEST_OPS=OFF"]  # none is installed
            configure += ["-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", f"-DCMAKE_INSTALL_RPATH={';'.join(RPATH)}"]
        compile_ = ["cmake", "--build", str(folder), "--parallel", str(cores().number)]
        for command in (configure, compile_):
            if subprocess.run(command, check=False, env=environment()).returncode:
                raise SystemExit("ftbert: CMake failed; what it said stands above")

    def _libraries(self) -> Path:
        return (ROOT if self.editable_mode else Path(self.build_lib)) / LIBRARIES

    def get_outputs(self) -> list[str]:
        return [str(file) for file in self._libraries().glob("*")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class SourceDistribution(sdist):
    """ftbert/converters is a link in the repository, and here too: setuptools would copy the files behind it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        link = Path("ftbert", "converters")
        if link.is_symlink():
            shutil.rmtree(Path(base_dir) / link)
            (Path(base_dir) / link).symlink_to(link.readlink())


# The extension has no sources of its own: it tells setuptools that the wheel belongs to this platform.
setup(
    install_requires=[torch_requirement(), *DEPENDENCIES],
    ext_modules=[Extension("ftbert.lib.libftbert", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "sdist": SourceDistribution},
)
