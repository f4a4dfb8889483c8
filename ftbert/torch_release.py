"""Which releases of torch a compiled binding belongs to. Imports nothing: the build uses it too."""

from __future__ import annotations

import re

NO_TORCH = "ftbert runs on torch, and none is here: `pip install torch`"


def torch_release(version: str) -> str:
    """The versions that run what was compiled against this one: "2.13" for 2.13.1+cpu, whatever its CUDA. A build
    between releases is compatible with itself alone."""
    public = version.partition("+")[0]
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", public)
    return release[1] if release else public


def binding_name(version: str) -> str:
    """The binding's file for this torch, without lib and .so: "ftbert_torch-2.13"."""
    return f"ftbert_torch-{torch_release(version)}"


def version_in(folder: str) -> str:
    """Of the torch in this folder, which need not run here: what its version.py says."""
    with open(f"{folder}/version.py", encoding="utf-8") as file:
        found = re.search(r"^__version__ = ['\"](.+?)['\"]", file.read(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{folder}/version.py names no __version__")
    return found[1]
