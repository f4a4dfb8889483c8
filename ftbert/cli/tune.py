"""`ftbert tune`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbert.cli import command

if TYPE_CHECKING:
    from ftbert.checkpoint import Checkpoint

_NOTHING_ON_CPU = (
    "on the CPU there is nothing to tune: oneDNN picks its kernels when a product first runs, weights are repacked "
    "wherever that is possible, and the number of threads is torch's (torch.set_num_threads, OMP_NUM_THREADS)"
)


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "tune",
        "Choose GEMM algorithms by measurement, for this GPU.",
        _tune,
        "example: ftbert tune minilm --dtype fp16 --minutes 30",
        nargs="?",
        defaults=("cuda", "fp16; a quantized folder's own"),
        dtypes=("fp32", "fp16", "bf16", "fp8", "int8"),
    )
    parser.add_argument("--hidden", type=command.count, metavar="N", help="a width instead of MODEL")
    parser.add_argument("--inter", type=command.count, metavar="N", help="its feed-forward width (default 4 x hidden)")
    parser.add_argument("--activation", metavar="NAME", help="its activation, as HuggingFace spells it (default gelu)")
    parser.add_argument(
        "--tokens",
        type=_token_range,
        metavar="A..B",
        help="rows (default 1..16384, with --texts as many as those have)",
    )
    parser.add_argument("--texts", metavar="FILE", help="only the token counts that batches of these texts have")
    parser.add_argument("--column", metavar="NAME", help='field with the text (default "text")')
    parser.add_argument(
        "--batch", type=command.count, metavar="N", default=32, help="texts in a batch of --texts (default 32)"
    )
    parser.add_argument(
        "--minutes", type=float, metavar="N", default=float("inf"),
        help="begin no further row after so many (default: no limit)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="the table (default: where models look for it)")
    parser.add_argument("--force", action="store_true", help="measure again what the table has")
    parser.add_argument("--show", action="store_true", help="what is in force and where it comes from; tunes nothing")


def _tune(options: argparse.Namespace) -> int:
    import torch

    from ftbert import tuning
    from ftbert.converters import open_checkpoint

    device = options.device or "cuda"
    if device == "cpu":
        command.report(options, {"nothing_to_tune": _NOTHING_ON_CPU}, _NOTHING_ON_CPU)
        return 0
    if wrong := _contradiction(options):
        options.parser.error(wrong)
    if options.show:
        values = tuning.show(device)
        command.report(options, values, tuning.show_text(values))
        return 0
    model = None if options.model is None else open_checkpoint(options.model, revision=options.revision)
    wanted = _products(options, model)
    lengths = _token_counts(options, model) if model is not None and options.texts else None
    path = options.out or tuning.user_table(tuning.Machine.of(torch.device(device)))
    if path is None:
        raise ValueError("the cache is switched off (FTBERT_CACHE=off): say where the table shall go (--out)")
    try:
        result = tuning.tune(
            wanted,
            path,
            *(options.tokens or (1, 16384 if lengths is None else max(lengths, default=1))),
            lengths=lengths,
            device=device,
            minutes=options.minutes,
            force=options.force,
        )
    except KeyboardInterrupt:
        same = "the same command without --force" if options.force else "the same command"
        print(f"ftbert: stopped; the rows made are in {path}, {same} goes on from there", file=sys.stderr)
        raise
    command.report(options, result.as_dict(), str(result))
    return 0


def _products(options: argparse.Namespace, model: Checkpoint | None) -> list[Any]:
    from ftbert.tuning import products, products_of_shape, with_layers_in

    dtype = options.dtype or "fp16"
    word = {"fp8": "e4m3", "int8": "int8"}.get(dtype, "")
    if model is None:
        inter, activation = options.inter or 4 * options.hidden, options.activation or "gelu"
        return products_of_shape(options.hidden, inter, activation, "fp16" if word else dtype, word)
    encoder = model.config.encoder
    quantized = encoder.has_8_bits
    if quantized and word not in ("", encoder.eight_bits):
        raise ValueError(f"{model.source.where}: stored in {encoder.eight_bits}; tune the model that it was made from")
    if word or (quantized and options.dtype is None):
        return products(encoder if quantized else with_layers_in(word, encoder), _beside_8_bits(model))
    return products(encoder, dtype)


def _beside_8_bits(model: Checkpoint) -> str:
    """The type of the residual stream where matrices are in 8 bits."""
    import torch

    from ftbert.devices import stream_dtype
    from ftbert.dtypes import DTYPES, FP8

    stream = stream_dtype(torch.device("cuda"), FP8, model.stored_dtype, model.config.encoder.outgrows_fp16)
    return next(word for word, dtype in DTYPES.items() if dtype == stream)


def _contradiction(options: argparse.Namespace) -> str:
    """Between what was asked of `tune`, or ""."""
    if options.show:
        return "--show tunes nothing: it takes no --out" if options.out else ""
    if (options.model is None) == (options.hidden is None) or (options.texts and options.model is None):
        return "give a MODEL (--texts needs one), or --hidden for a shape"
    if options.model is not None and (options.inter or options.activation):
        return "a MODEL has its own sizes: --inter and --activation belong to --hidden"
    if not options.minutes >= 0:  # nor a NaN
        return f"--minutes: expected a number that is not negative; got {options.minutes}"
    return ""


def _token_counts(options: argparse.Namespace, model: Checkpoint) -> list[int]:
    """Of the batches that the texts make, in order."""
    from ftbert.files import Position, ReadOptions, open_source, stream_or_file
    from ftbert.text import TextSettings, Tokenizer

    if model.folder is None:
        raise ValueError("tune: --texts needs a model with a tokenizer")
    settings = TextSettings.from_folder(model.folder)
    tokenizer = Tokenizer(model.folder, settings, model.config.encoder.max_seq)
    read = ReadOptions(options.column or "text", keep="", batch_records=options.batch)
    return [
        sum(map(len, tokenizer.encode_batch(chunk.texts, settings.default_prompt)))
        for chunk in open_source(stream_or_file(options.texts), read).chunks(Position())
        if chunk.texts
    ]


def _token_range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"expected A..B with 1 <= A <= B; got {text!r}")
    return int(first), int(last)
