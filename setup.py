"""Builds the compiled libraries with CMake and puts them into the package; build_backend.py checked what that needs.

pip install --no-build-isolation .         with a binding for the torch that is here
pip install --no-build-isolation -e .
python -m build --no-isolation

Environment: FTBERT_CUDA (AUTO, ON, OFF), FTBERT_CUDA_ARCHS ("80;90a"), FTBERT_CPU_ISAS (ALL in a wheel), and for
`make wheels` FTBERT_TORCHES (folders with torch/include and torch/lib: a binding for each), FTBERT_CUBLAS_DIR and
FTBERT_WHEEL_LABEL ("cpu": the wheel's version is 0.1.0+cpu). pip shows what is compiled with -v.
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
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

from build_backend import environment
from ftbert.cores import cores

ROOT = Path(__file__).resolve().parent
LIBRARIES = Path("ftbert", "lib")
OPTIONS = ("FTBERT_CUDA", "FTBERT_CUDA_ARCHS", "FTBERT_CPU_ISAS", "FTBERT_TORCHES", "FTBERT_CUBLAS_DIR")
LABEL = os.environ.get("FTBERT_WHEEL_LABEL", "")
# Where a wheel's libraries find torch and cuBLAS: beside ftbert. Paths of the machine that builds are not for others.
RPATH = ["$ORIGIN", "$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/cu13/lib", "$ORIGIN/../../nvidia/cublas/lib"]


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


class Wheel(bdist_wheel):
    """No file of it belongs to one version of Python: the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


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
            configure += [f"-DFTBERT_LIB_DIR={self._libraries().resolve()}", "-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-s"]
            if "FTBERT_CPU_ISAS" not in os.environ:
                configure += ["-DFTBERT_CPU_ISAS=ALL"]
            configure += ["-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", f"-DCMAKE_INSTALL_RPATH={';'.join(RPATH)}"]
        compile_ = ["cmake", "--build", str(folder), "--parallel", str(cores().number)]
        for command in (configure, compile_):
            if subprocess.run(command, check=False, env=environment()).returncode:
                raise SystemExit("ftbert: CMake failed; what it said stands above")
        if not self.editable_mode:
            self._copy_binding()

    def _copy_binding(self) -> None:
        """Its sources and the core's headers, of which ftbert/binding.py compiles a binding for another torch."""
        for file in sorted([*ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/binding/*.cpp")]):
            to = self._libraries() / file.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, to)

    def _libraries(self) -> Path:
        return (ROOT if self.editable_mode else Path(self.build_lib)) / LIBRARIES

    def get_outputs(self) -> list[str]:
        return [str(file) for file in self._libraries().glob("**/*") if file.is_file()]

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
    ext_modules=[Extension("ftbert.lib.libftbert_core", sources=[])],
    cmdclass={"bdist_wheel": Wheel, "build": Build, "build_ext": CMakeBuild, "sdist": SourceDistribution},
    options={"egg_info": {"tag_build": f"+{LABEL}"}} if LABEL else {},
)
