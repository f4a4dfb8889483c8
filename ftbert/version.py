"""The release of ftbert, and what its compiled library was built from and for. Imports no torch."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_PACKAGE = Path(__file__).parent
_LIB = _PACKAGE / "lib"


def told() -> str:
    """The release, the commit of the sources and the build of the library, as `ftbert --version` prints them."""
    built = build_record()
    commit = _checked_out() or built.get("commit")
    facts = [f"commit {commit}"] * bool(commit)
    if "cuda" in built:
        gpus = f"CUDA {built['cuda']}, GPUs of capability {built.get('archs')}"
        facts.append(f"built for {gpus if built['cuda'] else 'the CPU'}")
    if torch := _bindings():
        facts.append(f"torch {', '.join(torch)}")
    elif not any(_LIB.glob("*.so")):
        facts.append("no compiled library")
    return f"{__version__} ({'; '.join(facts)})" if facts else __version__


def _bindings() -> list[str]:
    """The releases of torch that there is a library for, the oldest first."""
    releases = [path.stem.partition("_torch-")[2] for path in _LIB.glob("libftbert_torch-*.so")]
    return sorted(releases, key=lambda release: [int(number) for number in re.findall(r"\d+", release)])


def _checked_out() -> str:
    """The commit of the checkout that this package lies in, with "-dirty" where files differ; "" elsewhere."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def build_record() -> dict[str, Any]:
    """What CMake recorded beside the libraries: commit, cuda ("13.0" or ""), archs ("80 90a" or ""). Empty without a
    record."""
    try:
        found: dict[str, Any] = json.loads((_LIB / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
