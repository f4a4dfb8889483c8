"""The packages of the extra `ftbert[serve]`, and what to type where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("httptools", "msgspec", "orjson", "uvloop")


def check_extra() -> None:
    """RuntimeError that names what is missing and what to type."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise RuntimeError(
            f"ftbert serve needs {', '.join(missing)}. Type: pip install {' '.join(missing)}, or install ftbert[serve]"
        )
