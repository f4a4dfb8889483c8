"""Writes command-line.md from the parsers of ftbert/cli: python docs/make_command_line.py"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "command-line.md"
sys.path.insert(0, str(ROOT))

_HEAD = """\
# Command line

Written by `docs/make_command_line.py` from the parsers in `ftbert/cli/`; do not edit.

```bash
ftbert COMMAND --help    # the same in the terminal, with examples
ftbert --version         # the release, its commit and its build
```

- MODEL is a folder, a hub id, an .onnx or a .gguf file.
- A command that reports takes `--json`: one JSON object on standard output.
- An error is one line on standard error; `FTBERT_DEBUG=1` shows the traceback. Exit codes: 0, 1 error, 2 usage,
  130 Ctrl-C, 143 SIGTERM.
- A flag that does not exist is answered with the nearest one; flags of llama.cpp and vLLM with what to write instead.
"""
# Variables that Python or the core reads, with the page that has more.
ENVIRONMENT = {
    "FTBERT_CACHE": "the cache folder: tuned tables, models in 8 bits, compiled bindings; `off`: none (default: "
    "`$XDG_CACHE_HOME/ftbert`, else `~/.cache/ftbert`)",
    "FTBERT_COMPARE_RANKS": "`off`, `contents`: how ranks compare calls ([several_gpus.md](several_gpus.md))",
    "FTBERT_CUDA_GRAPHS": "`off`: small calls on a GPU are not recorded ([speed.md](speed.md))",
    "FTBERT_DEBUG": "`1`: a traceback behind an error",
    "FTBERT_DEFERRED_NORM": "`off`, `on`, or the most tokens for which norms are deferred "
    "([speed.md](speed.md#deferred-norms))",
    "FTBERT_GEMM_TABLE": "a table of products; `off`: none ([tuning.md](tuning.md))",
    "FTBERT_MAX_CPU_ISA": "the most that the CPU's kernels may use ([install.md](install.md))",
    "FTBERT_MAX_GPU": "the most that the kernels for GPUs may use: 75, 80, 86, 89, 90 ([install.md](install.md#gpus))",
    "FTBERT_PEER_MEMORY": "`off`: sums over GPUs go through NCCL ([several_gpus.md](several_gpus.md))",
    "FTBERT_TOKENIZER": "`tokenizers`: leaves the faster tokenizer out ([install.md](install.md))",
    "FTBERT_VERIFY": "`off`: weights are not compared with their checksums",
    "HF_HOME, HF_TOKEN": "where the hub's files are kept; the token of a private model",
    "OMP_NUM_THREADS": "threads of the CPU (default: the cores that the process may use)",
}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _name(action: argparse.Action) -> str:
    """A positional by its metavar, an option with all its spellings and what stands behind them."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return ", ".join(f"`{flag}`" for flag in action.option_strings)
    value = "" if action.choices else str(action.metavar or action.dest.upper())
    value = f"[{value}]" if action.nargs == "?" and value else value
    return ", ".join(f"`{flag} {value}`".replace(" `", "`") for flag in action.option_strings)


def _rows(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in sorted(parser._actions, key=lambda one: bool(one.option_strings)):
        if action.help == argparse.SUPPRESS or action.dest == "help":
            continue
        said = _cell(action.help or "")
        if action.choices and action.option_strings:
            said = f"{', '.join(f'`{one}`' for one in action.choices)}: {said}"
        rows.append(f"| {_name(action)} | {said} |")
    return rows


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [parser.prog]
    for action in parser._actions:
        if not action.option_strings and action.help != argparse.SUPPRESS:
            word = str(action.metavar or action.dest)
            word = f"[{word}]" if action.nargs == "?" and not word.startswith("[") else word
            words.append(f"{word} ..." if action.nargs in ("+", "*") else word)
    return " ".join([*words, "[options]"])


def render() -> str:
    from ftbert.cli.program import _parser
    from ftbert.server import FLAGS

    commands = next(action for action in _parser()._actions if action.dest == "command").choices
    assert isinstance(commands, dict)
    lines = [_HEAD, "| command | |", "| --- | --- |"]
    lines += [f"| [{name}](#{name}) | {_cell(parser.description or '')} |" for name, parser in commands.items()]
    for name, parser in commands.items():
        lines += ["", f"## {name}", "", _cell(parser.description or ""), "", "```text", _usage(parser), "```", ""]
        lines += ["| | |", "| --- | --- |", *_rows(parser)]
        if parser.epilog:
            lines += ["", "```bash", *(line.partition(":")[2].strip() if ":" in line[:10] else line.strip()
                                   for line in parser.epilog.splitlines()), "```"]  # fmt: skip
        if name == "serve":
            names = ", ".join(f"`{flag.field.upper()}`" for flag in FLAGS if flag.in_environment)
            lines += ["", f"As variables of the environment, behind the command line: {names}, `SERVED_MODEL_NAME`."]
    lines += ["", "## Environment", "", "| variable | |", "| --- | --- |"]
    lines += [f"| {', '.join(f'`{one}`' for one in name.split(', '))} | {said} |" for name, said in ENVIRONMENT.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(TARGET)
