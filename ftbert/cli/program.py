"""The program: parses, runs one command, turns errors into a line. Exit codes: 0, 1 error, 2 usage, 130
Ctrl-C, 143 SIGTERM."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from ftbert.cli import chat, command, embed, generate, models, serve, tune
from ftbert.cli.command import INTERRUPTED, TERMINATED
from ftbert.torch_release import NO_TORCH
from ftbert.version import told


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` default to the process's own. Returns the exit code."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        command.refuse(options.parser, unknown)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        return TERMINATED if isinstance(stop, command.Terminated) else INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; the interpreter must not fail again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the one place where errors become a line
        if os.environ.get("FTBERT_DEBUG") == "1":
            traceback.print_exc()
        print(f"ftbert: error: {_one_line(error)}", file=sys.stderr)
        return 1
    return code


class _Version(argparse.Action):
    """Looks only when it is asked: git takes a moment."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"ftbert {told()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = command.Parser(
        prog="ftbert", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Text encoders (BERT and its kin) and language models at the hardware's limit.",
        epilog="example: ftbert embed sentence-transformers/all-MiniLM-L6-v2 texts.txt vectors.npy\n"
        "ftbert COMMAND --help has the options of a command, and examples.",
    )  # fmt: skip
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the release, its commit and its build, and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (models, embed, generate, chat, serve, tune):
        group.add_to(commands)
    return parser


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"standard output: {error.strerror}"  # of all else the name is known
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return NO_TORCH
    text = " ".join(str(error).split())
    # Ours explain themselves; of anything else the type is needed to make sense of it. Python's own ImportErrors have a
    # module's name.
    ours = isinstance(error, ImportError) and error.name is None
    explained = (ours or isinstance(error, (ValueError, TypeError, OSError, RuntimeError))) and text
    return text if explained else f"{type(error).__name__}: {text} (FTBERT_DEBUG=1 shows where)"


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    text = " ".join(str(message).split())
    name = "" if category is UserWarning else f"{category.__name__}: "
    print(f"ftbert: warning: {name}{text}", file=sys.stderr)
