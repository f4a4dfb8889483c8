"""`ftbert convert`."""

from __future__ import annotations

import argparse

from ftbert.cli import command


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "convert",
        "HuggingFace folder, hub id or .onnx file to an ftbert folder.",
        _convert,
        "example: ftbert convert sentence-transformers/all-MiniLM-L6-v2 minilm --dtype bf16",
        model=False,
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), help="of the stored weights (default: kept)")
    parser.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder of ftbert")


def _convert(options: argparse.Namespace) -> int:
    from ftbert.converters import convert
    from ftbert.dtypes import parse_dtype

    dtype = None if options.dtype is None else parse_dtype(options.dtype)
    convert(options.source, options.target, dtype=dtype, force=options.force)
    command.report(options, {"source": options.source, "target": options.target}, f"wrote {options.target}")
    return 0
