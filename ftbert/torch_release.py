"""Which versions of torch are binary compatible. Imports nothing: setup.py uses it too."""

from __future__ import annotations

import re


def torch_release(version: str) -> str:
    """The versions that run what was compiled against this one, as they stand behind "torch==": "2.13.*" for
    2.13.1+cpu, whatever its CUDA. A build between releases is compatible with itself alone."""
    public = version.partition("+")[0]
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", public)
    return f"{release[1]}.*" if release else public
