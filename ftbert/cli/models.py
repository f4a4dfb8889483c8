"""`ftbert convert`, `quantize`, `check`, `bench` and `info`: about a model as such."""

from __future__ import annotations

import argparse
from typing import Any

from ftbert.cli import command

_CHECKED = 512  # texts


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "convert",
        "Write a model as an ftbert folder: checked weights, config.json and the tokenizer.",
        _convert,
        "example: ftbert convert sentence-transformers/all-MiniLM-L6-v2 minilm --dtype bf16",
        model=False,
    )
    parser.add_argument("source", metavar="SRC", help=command.MODEL)
    parser.add_argument("target", metavar="DST", help="a new folder")
    types = ("fp32", "fp16", "bf16", "q8_0")
    parser.add_argument("--dtype", choices=types, help="of the stored weights (default: kept)")
    command.add_task(parser)
    parser.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder of ftbert")
    command.add_revision(parser)

    parser = command.add(
        commands,
        "quantize",
        "Write a model as a folder whose matrices are stored in 8 bits, with scales.\n"
        "Scales of activations come from texts that are like those the model will read.",
        _quantize,
        "examples: ftbert quantize minilm minilm-fp8 --texts reviews.txt\n"
        "          ftbert quantize minilm minilm-int8 --dtype int8",
        model=False,
    )
    parser.add_argument("model", metavar="MODEL", help=command.MODEL)
    parser.add_argument("target", metavar="DST", help="a new folder")
    read = "to calibrate on: .txt .jsonl .csv .parquet, 512 are read (default: built in)"
    parser.add_argument("--texts", metavar="FILE", help=read)
    parser.add_argument("--column", metavar="NAME", help='field with the text (default "text")')
    kinds = "fp8 for GPUs from 8.9 on, int8 for those from 8.0 on and CPUs (default fp8)"
    parser.add_argument("--dtype", choices=("fp8", "int8"), default="fp8", help=kinds)
    left = "matrices that stay as they are: layers.0, layers.3.ffn.down; may be repeated"
    parser.add_argument("--keep", metavar="NAME", action="append", default=[], help=left)
    loss = "leave no other matrix as it is, however far from float32 the vectors of texts come to be"
    parser.add_argument("--any-loss", action="store_true", help=loss)
    where = "that calibrates: cpu, cuda or cuda:N (default cpu)"
    parser.add_argument("--device", type=command.device, default="cpu", help=where)
    parser.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder of ftbert")
    command.add_revision(parser)

    parser = command.add(
        commands,
        "check",
        "Compare a model's numbers with transformers' on this machine.\n"
        "The exit status is 1 beyond what the dtype allows.",
        _check,
        "example: ftbert check minilm --device cuda --dtype fp8 --texts reviews.txt",
    )
    read = f"to compare: .txt .jsonl .csv .parquet, {_CHECKED} are read (default: built in)"
    parser.add_argument("--texts", metavar="FILE", help=read)
    parser.add_argument("--column", metavar="NAME", help='field with the text (default "text")')
    _add_against(parser)

    example = "example: ftbert bench minilm --texts reviews.txt --batch 64"
    text = "Compare the speed with transformers' on this machine; of several GPUs also what all compute together."
    parser = command.add(commands, "bench", text, _bench, example, several_devices=True)
    _add_against(parser)
    parser.add_argument("--texts", metavar="FILE", help="for the ragged batch: .txt .jsonl .csv .parquet")
    parser.add_argument("--column", metavar="NAME", help='field with the text (default "text")')
    parser.add_argument("--batch", type=command.count, metavar="N", default=32, help="texts of a batch (default 32)")
    parser.add_argument(
        "--longest", type=command.count, metavar="N", default=128, help="tokens of the longest text (default 128)"
    )
    parser.add_argument("--rounds", type=command.count, metavar="N", default=7, help="repetitions (default 7)")

    example = "example: ftbert info minilm --device cuda"
    text = "Show the build, and what a model runs on and why."
    command.add(commands, "info", text, _info, example, several_devices=True, nargs="?")


def _add_against(parser: argparse.ArgumentParser) -> None:
    text = "the plain model that MODEL was quantized from, where MODEL is a quantized folder"
    parser.add_argument("--against", metavar="PLAIN", help=text)


def _convert(options: argparse.Namespace) -> int:
    from ftbert.dtypes import parse_dtype

    dtype = None if options.dtype is None else parse_dtype(options.dtype)
    how = {"force": options.force, "revision": options.revision, "task": options.task}
    if isinstance(dtype, str):  # q8_0
        from ftbert.quantization import convert_to_q8_0

        convert_to_q8_0(options.source, options.target, **how)
    else:
        from ftbert.converters import convert

        convert(options.source, options.target, dtype=dtype, **how)
    command.report(options, {"source": options.source, "target": options.target}, f"wrote {options.target}")
    return 0


def _quantize(options: argparse.Namespace) -> int:
    from ftbert.quantization import MOST_TEXTS, quantize

    texts = None if options.texts is None else _texts(options, MOST_TEXTS)
    result = quantize(
        options.model, options.target, texts, dtype=options.dtype, keep=options.keep, any_loss=options.any_loss,
        force=options.force, revision=options.revision, device=options.device,
    )  # fmt: skip
    command.report(options, result.as_dict(), str(result))
    return 0


def _texts(options: argparse.Namespace, most: int) -> list[str]:
    """The first ones of the file that --texts names."""
    from ftbert.files import Position, ReadOptions, open_source, stream_or_file

    read = ReadOptions(options.column or "text", keep="", batch_records=most)
    chunk = next(iter(open_source(stream_or_file(options.texts), read).chunks(Position())), None)
    return chunk.texts if chunk is not None else []


def _check(options: argparse.Namespace) -> int:
    texts = None if options.texts is None else _texts(options, _CHECKED)
    from ftbert.evaluation import check

    result = check(command.load_model(options), texts=texts, against=options.against)
    command.report(options, result.as_dict(), str(result))
    return 0 if result.passed else 1


def _bench(options: argparse.Namespace) -> int:
    texts = None if options.texts is None else _texts(options, options.batch)
    from ftbert.evaluation import bench

    # Without heads, like the peers: what is timed ends at last_hidden_state.
    model = command.load_model(options, heads=False)
    sizes = {"batch": options.batch, "longest": options.longest, "rounds": options.rounds}
    result = bench(model, texts=texts, against=options.against, **sizes)
    command.report(options, result.as_dict(), str(result))
    return 0


def _info(options: argparse.Namespace) -> int:
    from ftbert._library import build_info
    from ftbert.gpus import told_gpus

    values: dict[str, Any] = {"build": build_info() | told_gpus()}
    if options.model is not None:
        values["model"] = _model_info(options)
    lines = []
    for part, entries in values.items():
        lines.append(part)
        lines += [f"  {key:<20} {value}" for key, value in entries.items()]
    command.report(options, values, "\n".join(lines))
    return 0


def _model_info(options: argparse.Namespace) -> dict[str, str]:
    """Of a quantized model that this machine cannot run, what is stored and why it does not run."""
    from ftbert.checkpoint import told_products
    from ftbert.converters import open_checkpoint

    checkpoint = open_checkpoint(options.model, revision=options.revision)
    opened = argparse.Namespace(**vars(options) | {"model": checkpoint, "revision": None})
    try:
        info: dict[str, str] = command.load_model(opened).info()
        return info
    except (RuntimeError, ValueError) as error:
        told = told_products(checkpoint.config)
        if not told:
            raise
        return {"architecture": checkpoint.config.architecture, **told, "runs": f"no: {' '.join(str(error).split())}"}
