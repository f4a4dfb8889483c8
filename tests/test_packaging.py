"""What pip and `python -m build` find: one line where something is missing, all sources, a wheel for any Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import ftbert
from ftbert import _library, binding
from ftbert.torch_release import binding_name, torch_release, version_in

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import build_backend  # noqa: E402

SETUPTOOLS = next(iter(metadata.distributions(name="setuptools")), None)
needs_setuptools = pytest.mark.skipif(
    SETUPTOOLS is None or build_backend._older(SETUPTOOLS.version, build_backend.SETUPTOOLS),
    reason=f"no setuptools >= {build_backend.SETUPTOOLS} is here",
)
# Calls a hook where the packages named first are not installed, or have the version that stands behind "==".
HOOK = """
import sys
from importlib import metadata

found, versions = metadata.version, dict(name.split("==") for name in sys.argv[1].split(","))
def version(name):
    if versions.get(name) == "":
        raise metadata.PackageNotFoundError(name)
    return versions.get(name) or found(name)
metadata.version = version
import build_backend
print("done", getattr(build_backend, sys.argv[2])(*sys.argv[3:]))
"""


def hook(
    name: str, *arguments: str, packages: str = "nothing==", root: Path = ROOT, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    # A Python outside bin/: the folder of sys.executable is searched before the PATH.
    environment = {**os.environ, "PYTHONPATH": str(root), **({"PATH": str(path)} if path else {})}
    program = f"import sys; sys.executable = '/nowhere/python'\n{HOOK}" if path else HOOK
    command = [sys.executable, "-c", program, packages, name, *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed hook leaves."""
    assert done.returncode == 1 and done.stdout == "", done.stdout
    assert done.stderr.startswith("ftbert: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what git knows, with a compiled library of some other build in it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if "build_backend.py" not in listed.stdout.split("\0"):
        pytest.skip("git does not know these sources")
    for name in listed.stdout.split("\0")[:-1]:
        if os.path.lexists(ROOT / name):
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "tree" / name, follow_symlinks=False)
    (tmp_path / "tree" / "ftbert" / "lib").mkdir()
    (tmp_path / "tree" / "ftbert" / "lib" / "libftbert_core.so").write_text("stale")
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("name", "packages", "problem", "command"),
    [
        ("get_requires_for_build_wheel", "torch==,setuptools==", "no torch >= ", "install --no-build-isolation ."),
        ("get_requires_for_build_editable", "torch==,setuptools==", "no torch >= ", "--no-build-isolation -e ."),
        ("get_requires_for_build_sdist", "setuptools==", "no setuptools >= ", "python -m build --no-isolation"),
        ("prepare_metadata_for_build_wheel", "torch==2.5.1+cu121", "torch 2.5.1+cu121 is too old", "."),
        ("prepare_metadata_for_build_editable", "setuptools==65.5.0", "setuptools 65.5.0 is too old", "-e ."),
    ],
)
def test_a_missing_package_is_one_line(name: str, packages: str, problem: str, command: str, tmp_path: Path) -> None:
    said = line(hook(name, *[str(tmp_path)] * name.startswith("prepare"), packages=packages))
    assert problem in said and said.endswith(command)
    if "no " in problem:
        pinned = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
        assert pinned and f"Type: pip install {pinned[0]} 'setuptools>=77' cmake ninja" in said


@pytest.mark.parametrize("name", ["HOST_GNU_TYPE", "SOABI"])
def test_musl_has_no_torch(name: str) -> None:
    """Of Alpine's Python and of one built by hand."""
    words = {"HOST_GNU_TYPE": "x86_64-alpine-linux-musl", "SOABI": "cpython-312-x86_64-linux-musl"}
    start = f"import sysconfig; sysconfig.get_config_var = lambda name: {{{name!r}: {words[name]!r}}}.get(name)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", start + HOOK, "torch==,setuptools==", "get_requires_for_build_wheel"]
    said = line(subprocess.run(command, env=environment, capture_output=True, text=True, check=False))
    assert said.startswith(f"ftbert: no torch >= {build_backend.TORCH} was found; this Python is linked with musl (Alpine)")
    assert "torch has no wheels" in said and "pip install" not in said


@needs_setuptools
def test_an_old_or_missing_tool_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()

    def tool(name: str, version: str) -> None:
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho '{version}'\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def said() -> str:
        return line(hook("build_wheel", str(tmp_path), path=tmp_path / "bin"))

    tool("make", "GNU Make 4.3")
    assert re.search(r"cmake was not found, [\d.]+ or later is needed\. Type: pip install cmake && pip ", said())
    tool("cmake", "cmake version 3.9.6")
    least = re.search(r"VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert least and re.search(rf"cmake 3\.9\.6 is too old \(.*/bin/cmake\), {least[1]} or later", said())
    tool("cmake", f"cmake version {least[1]}.0")
    tool("ninja", "1.2")
    assert "ninja 1.2 is too old" in said()
    tool("ninja", "")
    assert "ninja does not tell its version" in said()
    for name in ("ninja", "make"):
        (tmp_path / "bin" / name).unlink()
    assert "ninja was not found" in said()


@needs_setuptools
def test_the_sdist_holds_all_sources(sources: Path, tmp_path: Path) -> None:
    """Torch and cmake are not needed for it."""
    (tmp_path / "bin").mkdir()
    done = hook("build_sdist", str(tmp_path), packages="torch==", root=sources, path=tmp_path / "bin")
    assert done.returncode == 0, done.stderr
    folder = f"ftbert-{ftbert.__version__}"
    with tarfile.open(tmp_path / f"{folder}.tar.gz") as archive:
        members = {member.name.removeprefix(f"{folder}/"): member for member in archive if not member.isdir()}
        requires = archive.extractfile(f"{folder}/PKG-INFO")
        assert requires is not None and re.search(rb"^Requires-Dist: torch>=[\d.]+$", requires.read(), re.MULTILINE)
    files = {str(file.relative_to(sources)) for file in sources.rglob("*") if file.is_file() or file.is_symlink()}
    made = ("ftbert/lib/", "ftbert.egg-info/")
    want = {name for name in files if not name.startswith(made) and "__pycache__" not in name}
    assert {"csrc/encoder.cpp", "CMakeLists.txt", "build_backend.py", "converters/family.py"} < want
    assert want - members.keys() == set()
    assert members.keys() - want == {"PKG-INFO", "setup.cfg"} | {n for n in members if n.startswith("ftbert.egg-info/")}
    assert members["ftbert/converters"].linkname == "../converters"


@needs_setuptools
def test_metadata_name_the_torches_that_can_be_built_for(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTBERT_WHEEL_LABEL", "cpu")
    done = hook("prepare_metadata_for_build_wheel", str(tmp_path), root=sources)
    assert done.returncode == 0, done.stderr
    (info,) = tmp_path.glob("*.dist-info")
    assert info.name == f"ftbert-{ftbert.__version__}+cpu.dist-info"
    requires = metadata.PathDistribution(info).requires or []
    oldest = ".".join(map(str, binding._OLDEST))
    assert [text for text in requires if text.startswith("torch")] == [f"torch>={oldest}"]
    assert oldest == build_backend.TORCH
    assert [re.sub("[>= ].*; *", "; ", text) for text in requires if text.startswith("onnx")] == ['onnx; extra == "onnx"']


# Leaves a core in the folder of the build. The file says whether an earlier build was found there, and for which CPUs it is.
CMAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo "cmake version 4.0.0"; exit; fi
if [ "$1" = -S ]; then
  [ -e "$4/CMakeCache.txt" ] && found=kept || found=new
  mkdir -p "$4" && : > "$4/CMakeCache.txt"
  for option in "$@"; do case "$option" in -DFTBERT_CPU_ISAS=*) isas="${option#*=}";; esac; done
  for option in "$@"; do case "$option" in -DFTBERT_LIB_DIR=*)
    mkdir -p "${option#*=}" && printf "$found $isas" > "${option#*=}/libftbert_core.so";; esac; done
fi
"""


@needs_setuptools
def test_a_second_wheel_finds_what_was_compiled_for_the_first(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name, program in {"cmake": CMAKE, "ninja": "#!/bin/sh\necho 1.12.0\n"}.items():
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    for tool in ("sh", "mkdir", "printf"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))

    def library() -> str:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        done = hook("build_wheel", str(out), root=sources, path=tmp_path / "bin")
        assert done.returncode == 0, done.stderr
        (made,) = out.glob("*.whl")
        assert re.fullmatch(rf"ftbert-{re.escape(ftbert.__version__)}-py3-none-linux_\w+\.whl", made.name)
        with zipfile.ZipFile(made) as wheel:
            names = {name.removeprefix("ftbert/lib/") for name in wheel.namelist() if name.startswith("ftbert/lib/")}
            # Of which ftbert/binding.py compiles a binding for another torch.
            assert {"csrc/binding/ops.cpp", "csrc/binding/tensors.h", "csrc/encoder.h"} < names
            assert {name for name in names if not name.startswith("csrc/")} == {"libftbert_core.so"}
            return wheel.read("ftbert/lib/libftbert_core.so").decode()

    monkeypatch.delenv("FTBERT_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("FTBERT_CPU_ISAS", raising=False)
    assert [library(), library()] == ["new ALL", "kept ALL"]
    monkeypatch.setenv("FTBERT_CUDA_ARCHS", "90a")
    monkeypatch.setenv("FTBERT_CPU_ISAS", "avx2")
    assert [library(), library()] == ["new avx2", "kept avx2"]


def test_releases_of_torch() -> None:
    assert torch_release("2.13.0+cpu") == torch_release("2.13.1") == "2.13"
    assert torch_release("2.13.0") != torch_release("2.1.3")
    assert torch_release("2.14.0.dev20260101+cu130") == "2.14.0.dev20260101"
    assert torch_release("2.11.0a0+eb65b36914.nv26.02") == "2.11.0a0"
    assert version_in(torch.__path__[0]) == torch.__version__
    assert _library.library_path().name == f"lib{binding_name(torch.__version__)}.so"
    assert torch_release(torch.__version__) in _library.known_releases()
