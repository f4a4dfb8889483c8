"""`ftbert info`."""

from __future__ import annotations

import argparse
from typing import Any

from ftbert.cli import command


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "info",
        "The build, and what a model runs on and why.",
        _info,
        "example: ftbert info minilm --device cuda",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?")


def _info(options: argparse.Namespace) -> int:
    from ftbert._library import build_info

    values: dict[str, Any] = {"build": build_info()}
    if options.model is not None:
        values["model"] = command.load_model(options).info()
    lines = []
    for part, entries in values.items():
        lines.append(part)
        lines += [f"  {key:<20} {_shown(value)}" for key, value in entries.items()]
    command.report(options, values, "\n".join(lines))
    return 0


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
