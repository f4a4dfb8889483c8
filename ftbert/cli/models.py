"""`ftbert convert`, `check`, `bench` and `info`: about a model as such."""

from __future__ import annotations

import argparse
from typing import Any

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
    command.add_revision(parser)

    example = "example: ftbert check minilm --dtype bf16"
    parser = command.add(commands, "check", "Parity with transformers on this machine.", _check, example)
    parser.add_argument("model", metavar="MODEL")

    example = "example: ftbert bench minilm --texts reviews.txt --batch 64"
    parser = command.add(commands, "bench", "Speed against transformers on this machine.", _bench, example)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--texts", metavar="FILE", help=".txt .jsonl .csv .parquet for the ragged batch")
    parser.add_argument("--column", help='field with the text (default "text")')
    parser.add_argument("--batch", type=command.count, default=32, help="texts (default 32)")
    parser.add_argument("--longest", type=command.count, default=128, help="tokens (default 128)")
    parser.add_argument("--rounds", type=command.count, default=7, help="repetitions (default 7)")

    example = "example: ftbert info minilm --device cuda"
    parser = command.add(commands, "info", "The build, and what a model runs on and why.", _info, example)
    parser.add_argument("model", metavar="MODEL", nargs="?")


def _convert(options: argparse.Namespace) -> int:
    from ftbert.converters import convert
    from ftbert.dtypes import parse_dtype

    dtype = None if options.dtype is None else parse_dtype(options.dtype)
    convert(options.source, options.target, dtype=dtype, force=options.force, revision=options.revision)
    command.report(options, {"source": options.source, "target": options.target}, f"wrote {options.target}")
    return 0


def _check(options: argparse.Namespace) -> int:
    from ftbert.evaluation import check

    result = check(command.load_model(options))
    command.report(options, result.as_dict(), str(result))
    return 0 if result.passed else 1


def _bench(options: argparse.Namespace) -> int:
    from ftbert.files import Position, ReadOptions, open_source, stream_or_file

    texts = None
    if options.texts is not None:
        read = ReadOptions(options.column or "text", keep="", batch_records=options.batch)
        chunk = next(iter(open_source(stream_or_file(options.texts), read).chunks(Position())), None)
        texts = chunk.texts if chunk is not None else []
    from ftbert.evaluation import bench

    # Without heads, like the peers: what is timed ends at last_hidden_state.
    model = command.load_model(options, heads=False)
    result = bench(model, texts=texts, batch=options.batch, longest=options.longest, rounds=options.rounds)
    command.report(options, result.as_dict(), str(result))
    return 0


def _info(options: argparse.Namespace) -> int:
    from ftbert._library import build_info

    values: dict[str, Any] = {"build": build_info()}
    if options.model is not None:
        values["model"] = command.load_model(options).info()
    lines = []
    for part, entries in values.items():
        lines.append(part)
        lines += [f"  {key:<20} {value}" for key, value in entries.items()]
    command.report(options, values, "\n".join(lines))
    return 0
