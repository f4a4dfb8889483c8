"""A torch that the package has no binding for: it is compiled once, or a line says what to do."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftbert import _library, binding
from ftbert.torch_release import NO_TORCH

# Notes its arguments and leaves what it was asked for.
COMPILER = """#!/bin/sh
echo "$@" >> "{notes}"
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
BROKEN = """#!/bin/sh
echo "In file included from x.h:" >&2
echo "x.cpp:3: fatal error: {reason}" >&2
exit 1
"""
FULL = os.strerror(errno.ENOSPC)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed ftbert/lib, and an empty cache."""
    (tmp_path / "lib" / "csrc" / "binding").mkdir(parents=True)
    for name in ("libftbert_core.so", "csrc/binding/a.cpp", "csrc/binding/b.cpp"):
        (tmp_path / "lib" / name).write_text("")
    (tmp_path / "lib" / "build.json").write_text('{"cuda": "13.0"}')
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    compiler(tmp_path, monkeypatch, COMPILER)
    return tmp_path / "lib"


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str = "") -> None:
    (tmp_path / "compiler").write_text(program.format(notes=tmp_path / "notes", reason=reason))
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))


def compiled(folder: Path, version: str = "2.99.1+cu130", known: tuple[str, ...] = ("2.9", "2.13")) -> Path:
    return binding.compiled(folder, list(known), folder.parent / "torch", version)


def refused(folder: Path, version: str = "2.99.1+cu130") -> str:
    with pytest.raises(ImportError) as raised:
        compiled(folder, version)
    said = str(raised.value)
    assert "\n" not in said and said.startswith(f"ftbert has bindings for torch 2.9, 2.13, and this is torch {version}")
    assert "install torch 2.13 (`pip install 'torch==2.13.*'`)" in said
    return said


def test_it_is_compiled_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = compiled(folder), compiled(folder)
    assert first == second and first.name == "libftbert_torch-2.99.so" and first.read_text() == "made\n"
    assert first.is_relative_to(folder.parent / "cache")
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("ftbert: building ftbert_torch-2.99 with ") and str(first) in said[0]
    (notes,) = (folder.parent / "notes").read_text().splitlines()
    for word in ("-DFTBERT_CUDA", f"-I{folder}/csrc", f"-isystem{folder.parent}/torch/include", "-lftbert_core", "-std=c++20"):
        assert word in notes.split()
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == []  # no scratch is left


def test_another_core_or_torch_has_another(folder: Path) -> None:
    first = compiled(folder)
    assert compiled(folder, "2.99.2+cu130") != first
    os.utime(folder / "libftbert_core.so", ns=(1, 1))
    (folder / "build.json").write_text('{"cuda": ""}')
    assert compiled(folder) != first
    assert "-DFTBERT_CUDA" not in (folder.parent / "notes").read_text().splitlines()[-1].split()


def test_a_torch_that_is_too_old(folder: Path) -> None:
    assert "ftbert needs torch 2.9 or later" in refused(folder, "2.8.1")


def test_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(folder))
    assert "a C++ compiler would build one, and none is here" in refused(folder)


def test_a_compiler_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(folder.parent, monkeypatch, BROKEN, "no member named 'sizes'")
    said = refused(folder)
    assert "x.cpp:3: fatal error: no member named 'sizes'" in said
    log = next((folder.parent / "cache").rglob("*.log"))
    assert str(log) in said and "In file included from" in log.read_text()


def test_no_place_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTBERT_CACHE", "off")
    assert "let FTBERT_CACHE name a folder" in refused(folder)
    monkeypatch.setenv("FTBERT_CACHE", str(folder / "build.json" / "no folder"))
    assert "let FTBERT_CACHE name a folder with room" in refused(folder)
    monkeypatch.setenv("FTBERT_CACHE", str(folder.parent / "cache"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, FULL)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        said = refused(folder)
    assert "a folder with room" in said and FULL in said
    with monkeypatch.context() as patched:
        compiler(folder.parent, patched, BROKEN, FULL)
        said = refused(folder)
    assert "a folder with room" in said and FULL in said and str(folder.parent / "cache") in said
    (folder.parent / "cache").chmod(0o777)
    assert "others can write to" in refused(folder)


def test_a_checkout_says_make_build(folder: Path) -> None:
    for file in (folder / "csrc" / "binding").iterdir():
        file.unlink()
    (folder / "csrc" / "binding").rmdir()
    assert "build it beside this one (`make build`)" in refused(folder)
    assert "make build" not in refused(folder, "2.8.1")


def test_words_of_a_library_that_does_not_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "build_record", lambda: {"cuda": "13.0"})
    missing = "libcublasLt.so.13: cannot open shared object file: No such file or directory"
    monkeypatch.setattr("torch.version.cuda", "12.8")
    said = _library._why_not(folder / "libftbert_torch-2.9.so", missing)
    assert "this build of ftbert has CUDA 13.0" in said and "has CUDA 12.8" in said and "torch for CUDA 13" in said
    said = _library._why_not(folder / "x.so", "libstdc++.so.6: version `GLIBCXX_3.4.30' not found")
    assert said.startswith("this system is too old for this wheel of ftbert")


def test_the_loaders_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps them in an error that names the file alone."""
    (tmp_path / "broken.so").write_text("no library")
    monkeypatch.setattr(_library, "library_path", lambda: tmp_path / "broken.so")
    monkeypatch.setattr(_library, "_refuse_a_second", lambda _: None)
    with pytest.raises(ImportError, match="broken.so does not load with torch .*(file too short|invalid ELF header)"):
        _library.load_library.__wrapped__()


def test_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import ftbert; print(ftbert.__version__); ftbert.load"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout
    assert done.stderr.splitlines()[-1] == f"ImportError: {NO_TORCH}"
    program = "import sys; sys.modules['torch'] = None; from ftbert.cli import main; sys.exit(main(['info', 'x']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"ftbert: error: {NO_TORCH}\n")


def test_a_command_with_a_torch_that_does_not_fit() -> None:
    """One line, without the name of an exception."""
    program = "import sys, torch; torch.__version__ = '2.8.1'; from ftbert.cli import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith("ftbert: error: ftbert has bindings for torch ")
    assert "and this is torch 2.8.1; ftbert needs torch 2.9 or later: install torch" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_FOLDER", tmp_path)
    with pytest.raises(ImportError, match="compiled libraries are missing .*`make build`"):
        _library.library_path()


# Another version in site-packages, then a new file where the first one lies, as `pip install -U` leaves it.
TWICE = """
import os, shutil, sys

def loaded(folder):
    for name in [name for name in sys.modules if name.split(".")[0] == "ftbert"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    import ftbert
    try:
        ftbert.load_library()
    except ImportError as error:
        print(error)
    else:
        print("loaded", ftbert.library_path())
    return ftbert.library_path()

first, second = sys.argv[1:]
loaded(first)
loaded(second)
library = loaded(first)
shutil.copy(library, f"{library}.new")
os.replace(f"{library}.new", library)
loaded(first)
"""


def test_a_second_copy_in_a_process(tmp_path: Path) -> None:
    """Torch ends a process that registers the same classes twice."""
    package = Path(_library.__file__).parent
    copies = [tmp_path / "one", tmp_path / "two"]
    for copy in copies:
        shutil.copytree(package, copy / "ftbert", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", TWICE, *map(str, copies)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=alone)
    assert done.returncode == 0, done.stderr
    one, two = (copy / "ftbert" / "lib" / _library.library_path().name for copy in copies)
    start = "start a new process (in a notebook, restart the kernel)"
    begins = f"this process has loaded {one}, and torch takes one ftbert in a process;"
    assert done.stdout.splitlines() == [
        f"loaded {one}",
        f"{begins} ftbert of {two} is the second; {start}",
        f"loaded {one}",
        f"{begins} its file was replaced since; {start}",
    ]


# Loads a model and computes; fails where the package's folder is written to. (Python's own .pyc files aside.)
READ_ONLY = """
import os, sys

sys.dont_write_bytecode = True
import ftbert

package = os.path.dirname(ftbert.__file__)

def audit(event, arguments):
    path = arguments[0] if arguments else None
    writes = event in ("os.mkdir", "os.remove", "os.rename", "os.chmod", "shutil.copyfile") or (
        event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    )
    if writes and isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(package):
        print(event, path, flush=True)

sys.addaudithook(audit)
print(ftbert.load(sys.argv[1]).encode(["a text", "another"]).shape[0])
"""


def test_the_package_is_not_written_to(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    """It may be on a read-only disk."""
    environment = {**os.environ, "FTBERT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", READ_ONLY, str(tiny_bert(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["2"]), done.stderr
