"""The build backend that pip and `python -m build` call: checks what a build needs, then hands over to setuptools.

[build-system] of pyproject.toml requires nothing. pip would fetch torch, which is gigabytes, and then build against a
torch that is not the one beside the package. So an isolated build finds an empty environment here, and ends at once.
Every complaint is a SystemExit: pip and build show its line without a traceback.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent
# The oldest that do. CMake's is in CMakeLists.txt, Python's in pyproject.toml.
SETUPTOOLS = "77"  # `license` as an SPDX expression
TORCH = "2.9"
NINJA = "1.3"  # what CMake's generator asks for

INSTALL = "pip install --no-build-isolation ."
INSTALL_EDITABLE = "pip install --no-build-isolation -e ."
BUILD = "python -m build --no-isolation"
NO_MUSL = (
    "this Python is linked with musl (Alpine), for which torch has no wheels, and so ftbert none. "
    "Take a Python with glibc, as in Debian, Ubuntu or the image python:3.12-slim"
)


def environment() -> dict[str, str]:
    """For cmake: it and ninja, installed by pip, lie beside this Python, which need not be on the PATH."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def _stop(problem: str, command: str) -> NoReturn:
    raise SystemExit(f"ftbert: {problem}. Type: {command}")


def _older(version: str, least: str) -> bool:
    numbers, wanted = ([int(number) for number in re.findall(r"\d+", text)] for text in (version, least))
    return numbers < wanted


def _has_musl() -> bool:
    """Whether this Python's C library is musl, as on Alpine."""
    return "musl" in f"{sysconfig.get_config_var('HOST_GNU_TYPE')} {sysconfig.get_config_var('SOABI')}"


def _check_package(name: str, least: str, command: str) -> None:
    pinned = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    everything = f"pip install {pinned[0]} 'setuptools>={SETUPTOOLS}' cmake ninja{' build' if command == BUILD else ''}"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "torch" and _has_musl():
            raise SystemExit(f"ftbert: no torch >= {least} was found; {NO_MUSL}") from None
        _stop(f"no {name} >= {least} was found; an isolated build sees none", f"{everything} && {command}")
    if _older(found, least):
        newer = pinned[0] if name == "torch" else f"-U {name}"
        _stop(f"{name} {found} is too old, {least} or later is needed", f"pip install {newer} && {command}")


def _check_tool(name: str, least: str, command: str) -> None:
    program = shutil.which(name, path=environment()["PATH"])
    if program is None:
        _stop(f"{name} was not found, {least} or later is needed", f"pip install {name} && {command}")
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+(\.\d+)+", answer)
    if found is None or _older(found[0], least):
        problem = f"{name} {found[0]} is too old" if found else f"{name} does not tell its version"
        _stop(f"{problem} ({program}), {least} or later is needed", f"pip install -U {name} && {command}")


def _check_tools(command: str) -> None:
    least = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)\)", (ROOT / "CMakeLists.txt").read_text())
    assert least is not None
    _check_tool("cmake", least[1], command)
    path = environment()["PATH"]
    if shutil.which("ninja", path=path) or not shutil.which("make", path=path):  # make does without ninja
        _check_tool("ninja", NINJA, command)


def _setuptools(command: str, *, torch: bool = True) -> Any:
    if torch:
        _check_package("torch", TORCH, command)
    _check_package("setuptools", SETUPTOOLS, command)
    from setuptools import build_meta

    return build_meta


# ---- the hooks of PEP 517 and PEP 660 -------------------------------------------------------------------------------


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    _setuptools(BUILD, torch=False)
    return []


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    _setuptools(INSTALL)
    return []


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    _setuptools(INSTALL_EDITABLE)
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    backend = _setuptools(INSTALL)
    return str(backend.prepare_metadata_for_build_wheel(metadata_directory, config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    backend = _setuptools(INSTALL_EDITABLE)
    return str(backend.prepare_metadata_for_build_editable(metadata_directory, config_settings))


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    return str(_setuptools(BUILD, torch=False).build_sdist(sdist_directory, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    backend = _setuptools(INSTALL)
    _check_tools(INSTALL)
    return str(backend.build_wheel(wheel_directory, config_settings, metadata_directory))


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    backend = _setuptools(INSTALL_EDITABLE)
    _check_tools(INSTALL_EDITABLE)
    return str(backend.build_editable(wheel_directory, config_settings, metadata_directory))
