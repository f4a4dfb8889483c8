"""`ftbert serve`: HTTP in front of one engine a device. docs/serving.md says how it works.

Names are imported when first asked for: workers need no torch, and the command line none of the extra's packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbert.server.catalogue import models_in
    from ftbert.server.process import check_extra
    from ftbert.server.settings import FLAGS, Flag, Settings, from_environment
    from ftbert.server.supervisor import serve

__all__ = ["FLAGS", "Flag", "Settings", "check_extra", "from_environment", "models_in", "serve"]

_HOMES = {
    "FLAGS": "settings", "Flag": "settings", "Settings": "settings", "check_extra": "process",
    "from_environment": "settings", "models_in": "catalogue", "serve": "supervisor",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ftbert.server.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
