"""What a command is made of: its parser with the usual options, the model that it names, its report."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn, TextIO

import ftbert

MODEL = "a folder, a hub id, an .onnx or .gguf file"
INTERRUPTED, TERMINATED = 130, 143  # the exit codes that a shell reports for Ctrl-C and for SIGTERM
Commands = Any  # what add_subparsers returns; its class is private to argparse


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` meanwhile, where this is the main thread: no other gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _terminate(*_: Any) -> NoReturn:
    raise Terminated


class Parser(argparse.ArgumentParser):
    """Says which command or choice is nearest to one that is not there."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = get_close_matches(str(value), list(map(str, action.choices or ())), 1)
            told = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentError(action, error.message + told) from None


def add(
    commands: Commands,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
    example: str,
    *,
    model: bool = True,
    nargs: str | None = None,
    defaults: tuple[str, str] = ("cpu", "fp32"),
    several_devices: bool = False,
    reports: bool = True,
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16", "fp8", "int8", "q8_0", "auto"),
) -> argparse.ArgumentParser:
    """A command with --json, unless it reports nothing, and MODEL, --device and --dtype where it computes with one
    model. text: what it does. nargs: of MODEL."""
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=example, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    added.set_defaults(run=run, parser=added)
    if reports:
        added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    if model:
        added.add_argument("model", metavar="MODEL", nargs=nargs, help=MODEL)
        usual, dtype = defaults
        more = "; several GPUs, with commas or cuda:* for all, share the work" if several_devices else ""
        kind = devices if several_devices else device
        added.add_argument("--device", type=kind, help=f"cpu, cuda or cuda:N{more} (default {usual})")
        own = "; a quantized or converted model's own" if "auto" in dtypes else ""
        added.add_argument("--dtype", choices=dtypes, help=f"to compute in (default {dtype}{own})")
        if several_devices:
            add_parallel(added)
        add_revision(added)
    return added


class _Answer(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string}: {self.const}")


def add_answers(parser: argparse.ArgumentParser, answers: Mapping[tuple[str, ...], str]) -> None:
    """Flags of other programs, which end with usage and the answer: what to write instead."""
    for flags, answer in answers.items():
        parser.add_argument(
            *flags, action=_Answer, const=answer, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Ends with the usage of the command, the arguments that it does not know and the flags nearest to them."""
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    told = []
    for flag in (one.partition("=")[0] for one in unknown if one.startswith("-")):
        for near in get_close_matches(flag.replace("_", "-"), known, 1):
            answer = known[near].const if isinstance(known[near], _Answer) else f"did you mean {near}?"
            told.append(f"; {flag}: {answer}")
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(told)}")


def add_parallel(parser: argparse.ArgumentParser) -> None:
    text = "one model over all devices: each has a share of every layer (tensor), or some of the layers (pipeline)"
    parser.add_argument("--parallel", choices=("tensor", "pipeline"), help=text)


def add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--revision", metavar="NAME",
        help="of a hub id: branch, tag or commit (default: its main branch); a token is that of $HF_TOKEN",
    )  # fmt: skip


def add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", metavar="NAME", help="of a model with an adapter for each (jina-embeddings-v3, v5)")


def load_model(options: argparse.Namespace, **more: Any) -> Any:
    """The model that a command names, where and in which dtype it says."""
    # What is not given is left to load(), which knows the defaults.
    names = ("device", "dtype", "parallel", "revision", "task")
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if getattr(options, "against", None):
        given.setdefault("dtype", "auto")  # a quantized folder: in the types that it is stored in
    return ftbert.load(options.model, **given, **more)


def report(options: argparse.Namespace, values: dict[str, Any], text: str, where: TextIO | None = None) -> None:
    """Prints `values` as JSON where --json is given, else `text`."""
    print(json.dumps(values, ensure_ascii=False, default=str) if options.json else text, file=where or sys.stdout)


def count(text: str) -> int:
    """An argument that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """An argument that is a whole number of at least 0."""
    return 0 if text.isdecimal() and not int(text) else count(text)


def device(text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (":" in text and (kind == "cpu" or not index.isdigit())):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N; got {text!r}")
    return text


def devices(text: str) -> str | list[str]:
    """One, or several with commas between them, as `ftbert.load` takes them."""
    if text == "cuda:*":
        return text
    several = [device(one) for one in text.split(",")]
    return several if len(several) > 1 else several[0]
