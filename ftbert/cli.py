"""The command line: parses, loads a model where one is needed, prints. Exit codes: 0, 1 error, 2 usage."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from ftbert import __version__

_EXAMPLES = {
    "convert": "example: ftbert convert sentence-transformers/all-MiniLM-L6-v2 minilm --dtype bf16",
    "embed": (
        "examples: ftbert embed minilm reviews.jsonl.gz vectors.npy --column body --skip-bad\n"
        "          sort -u queries.txt | ftbert embed minilm - - > vectors.jsonl"
    ),
    "check": "example: ftbert check minilm --dtype bf16",
    "bench": "example: ftbert bench minilm --texts reviews.txt --batch 64",
    "tune": "example: ftbert tune minilm --dtype fp16 --minutes 30",
    "info": "example: ftbert info minilm --device cuda",
}
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` default to the process's own. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftbert", description="BERT-like encoders at the hardware's limit.")
    parser.add_argument("--version", action="version", version=f"ftbert {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Any, *, model: bool) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, epilog=_EXAMPLES[name], formatter_class=argparse.RawTextHelpFormatter
        )
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        if model:
            device, dtype = ("cuda", "fp16") if name == "tune" else ("cpu", "fp32")
            added.add_argument("--device", type=_device, help=f"cpu, cuda or cuda:N (default {device})")
            added.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), help=f"(default {dtype})")
        return added

    convert = command("convert", "HuggingFace folder, hub id or .onnx file to an ftbert folder.", _convert, model=False)
    convert.add_argument("source", metavar="SRC")
    convert.add_argument("target", metavar="DST")
    convert.add_argument(
        "--dtype", choices=("fp32", "fp16", "bf16"), help="of the stored weights (default: kept)"
    )
    convert.add_argument("--force", action="store_true", help="replace DST if it is a checkpoint folder of ftbert")

    embed = command(
        "embed", "Embed a file: .txt .jsonl .csv .tsv (also .gz) .parquet to .npy .jsonl .jsonl.gz .parquet.",
        _embed, model=True,
    )
    embed.add_argument("model", metavar="MODEL")
    embed.add_argument("source", metavar="IN", help="- is standard input, of lines as --input-format says")
    embed.add_argument("target", metavar="OUT", help="- is standard output, of JSON lines")
    embed.add_argument(
        "--input-format", choices=("txt", "jsonl", "csv", "tsv"), default="txt", help="of IN - (default txt)"
    )
    embed.add_argument("--column", help='field with the text (default "text")')
    embed.add_argument(
        "--skip-bad", action="store_true", help="leave out records that cannot be read; OUT.skipped.jsonl lists them"
    )
    embed.add_argument(
        "--pooling", choices=("cls", "mean", "max", "mean_sqrt_len", "last"), help="(default: the model's own)"
    )
    embed.add_argument("--prompt", metavar="TEXT", help="put before every text (default: the model's own, if any)")
    embed.add_argument("--prompt-name", metavar="NAME", help="one of the model's prompts, such as query")
    embed.add_argument("--max-length", type=_count, metavar="N", help="tokens of a text (default: the model's)")
    embed.add_argument("--truncate-dim", type=_count, metavar="N", help="entries kept of a vector (default: all)")
    embed.add_argument("--no-normalize", action="store_true", help="keep the length of the vectors")
    embed.add_argument("--max-tokens", type=_count, default=16384, help="computed at once (default 16384)")
    embed.add_argument("--batch-records", type=_count, help="put on the disk at once (default 8192)")
    embed.add_argument("--no-resume", action="store_true", help="start again after a kill")

    check = command("check", "Parity with transformers on this machine.", _check, model=True)
    check.add_argument("model", metavar="MODEL")

    bench = command("bench", "Speed against transformers on this machine.", _bench, model=True)
    bench.add_argument("model", metavar="MODEL")
    bench.add_argument("--texts", metavar="FILE", help=".txt .jsonl .csv .parquet for the ragged batch")
    bench.add_argument("--column", help='field with the text (default "text")')
    bench.add_argument("--batch", type=_count, default=32, help="texts (default 32)")
    bench.add_argument("--longest", type=_count, default=128, help="tokens (default 128)")
    bench.add_argument("--rounds", type=_count, default=7, help="repetitions (default 7)")

    tune = command("tune", "Choose GEMM algorithms by measurement, for this GPU.", _tune, model=True)
    tune.add_argument("model", metavar="MODEL", nargs="?")
    tune.add_argument("--hidden", type=_count, help="a shape instead of MODEL")
    tune.add_argument("--inter", type=_count, help="its feed-forward width (default 4 x hidden)")
    tune.add_argument(
        "--activation", choices=["gelu", "gelu_new", "relu", "silu", "tanh"], help="its activation (default gelu)"
    )
    tune.add_argument(
        "--tokens", type=_range, metavar="A..B", help="rows (default 1..16384, with --texts as many as those have)"
    )
    tune.add_argument("--texts", metavar="FILE", help="only the token counts that batches of these texts have")
    tune.add_argument("--column", help='field with the text (default "text")')
    tune.add_argument("--batch", type=_count, default=32, help="texts in a batch of --texts (default 32)")
    tune.add_argument("--minutes", type=_minutes, default=float("inf"), help="begin no further row after this")
    tune.add_argument("--out", type=Path, metavar="FILE", help="the table (default: where models look for it)")
    tune.add_argument("--picture", type=Path, metavar="FILE.svg", help="the gains as a picture")
    tune.add_argument("--force", action="store_true", help="measure again what the table has")
    tune.add_argument("--show", action="store_true", help="what is in force and where it comes from; tunes nothing")
    tune.set_defaults(usage_error=tune.error)

    info = command("info", "The build, and what a model runs on and why.", _info, model=True)
    info.add_argument("model", metavar="MODEL", nargs="?")
    return parser


def _convert(options: argparse.Namespace) -> int:
    from ftbert.converters.from_huggingface import convert
    from ftbert.model import parse_dtype

    dtype = None if options.dtype is None else parse_dtype(options.dtype)
    convert(options.source, options.target, dtype=dtype, force=options.force)
    _report(options, {"source": options.source, "target": options.target}, f"wrote {options.target}")
    return 0


def _embed(options: argparse.Namespace) -> int:
    from ftbert.embed import BATCH_RECORDS, check_request, embed_file
    from ftbert.part_area import part_folder
    from ftbert.records import skipped_file, stream_or_file

    how: dict[str, Any] = {
        "column": options.column,
        "skip_bad": options.skip_bad,
        "batch_records": options.batch_records or BATCH_RECORDS,
        "kind": f".{options.input_format}",
    }
    check_request(options.source, options.target, **how)
    model = _load(options, heads=False)
    try:
        stats = embed_file(
            model,
            options.source,
            options.target,
            normalize=not options.no_normalize,
            pooling=options.pooling,
            prompt=options.prompt,
            prompt_name=options.prompt_name,
            max_length=options.max_length,
            truncate_dim=options.truncate_dim,
            max_tokens=options.max_tokens,
            resume=not options.no_resume,
            **how,
        )
    except KeyboardInterrupt:
        kept = part_folder(stream_or_file(options.target))
        if kept.exists():
            print(f"ftbert: stopped; {kept} is kept, the same command goes on from there", file=sys.stderr)
        raise
    text = f"{stats.target}: {stats.records} records x {stats.hidden}"
    text += f", {stats.skipped} skipped" if stats.skipped else ""
    text += f" (see {skipped_file(stream_or_file(stats.target))})" if stats.skipped and stats.target != "-" else ""
    text += f", {stats.resumed} of them from an earlier run" if stats.resumed else ""
    text += f"; {stats.tokens} tokens in {stats.seconds:.1f} s, {stats.tokens_per_second:,.0f} tokens/s"
    # Where the vectors go to standard output, what there is to say goes to the other.
    _report(options, stats.as_dict(), text, sys.stderr if stats.target == "-" else sys.stdout)
    return 0


def _check(options: argparse.Namespace) -> int:
    from ftbert.check import check

    result = check(_load(options))
    _report(options, result.as_dict(), str(result))
    return 0 if result.passed else 1


def _bench(options: argparse.Namespace) -> int:
    from ftbert.records import Position, ReadOptions, open_source, stream_or_file

    texts = None
    if options.texts is not None:
        read = ReadOptions(options.column or "text", keep=False, batch_records=options.batch)
        chunk = next(iter(open_source(stream_or_file(options.texts), read).chunks(Position())), None)
        texts = chunk.texts if chunk is not None else []
    from ftbert.bench import bench

    # Without heads, like the peers: what is timed ends at last_hidden_state.
    result = bench(
        _load(options, heads=False), texts=texts, batch=options.batch, longest=options.longest, rounds=options.rounds
    )
    _report(options, result.as_dict(), str(result))
    return 0


def _tune(options: argparse.Namespace) -> int:
    import torch

    from ftbert import gains_picture, tune
    from ftbert.gemm_table import Machine

    device = options.device or "cuda"
    if device == "cpu":
        _report(options, {"nothing_to_tune": tune.NOTHING_ON_CPU}, tune.NOTHING_ON_CPU)
        return 0
    if wrong := _contradiction(options):
        options.usage_error(wrong)
    if options.show:
        values = tune.show(device)
        _report(options, values, tune.show_text(values))
        return 0
    wanted, folds = _products(options)
    lengths = _token_counts(options) if options.texts else None
    path = tune.table_path(Machine.of(torch.device(device)), options.out)
    if options.picture is not None:
        _expect_writable(options.picture)
    try:
        result = tune.tune(
            wanted,
            *(options.tokens or (1, 16384 if lengths is None else max(lengths, default=1))),
            lengths=lengths,
            device=device,
            minutes=options.minutes,
            path=path,
            force=options.force,
            whole_layers=folds,
        )
    except KeyboardInterrupt:
        same = "the same command without --force" if options.force else "the same command"
        print(f"ftbert: stopped; the rows made are in {path}, {same} goes on from there", file=sys.stderr)
        raise
    _report(options, result.as_dict(), str(result))
    if options.picture is not None and result.rows:
        options.picture.write_text(gains_picture.picture(result.rows), encoding="utf-8")
    elif options.picture is not None:
        warnings.warn(f"{options.picture} is not written: there are no rows to draw yet", stacklevel=1)
    return 0


def _expect_writable(path: Path) -> None:
    """OSError says why it is not, before hours of work."""
    existed = path.exists()
    path.open("a").close()
    if not existed:
        path.unlink()


def _products(options: argparse.Namespace) -> tuple[list[Any], bool]:
    """Those to tune, and whether whole layers are worth it."""
    from ftbert.cache import open_cached
    from ftbert.tuning import products, products_of_shape

    dtype = options.dtype or "fp16"
    if options.model is not None:
        config = open_cached(options.model).config.encoder
        return products(config, dtype), config.norm_place == "post" and not config.relative_span
    inter, activation = options.inter or 4 * options.hidden, options.activation or "gelu"
    return products_of_shape(options.hidden, inter, activation, dtype), True


def _contradiction(options: argparse.Namespace) -> str:
    """Between what was asked of `tune`, or ""."""
    if options.show:
        return "--show tunes nothing: it takes no --out and no --picture" if options.out or options.picture else ""
    if (options.model is None) == (options.hidden is None) or (options.texts and options.model is None):
        return "give a MODEL (--texts needs one), or --hidden for a shape"
    if options.model is not None and (options.inter or options.activation):
        return "a MODEL has its own sizes: --inter and --activation belong to --hidden"
    return ""


def _token_counts(options: argparse.Namespace) -> list[int]:
    """Of the batches that the texts make, in order."""
    from ftbert.cache import open_cached
    from ftbert.records import Position, ReadOptions, open_source, stream_or_file
    from ftbert.text_settings import TextSettings
    from ftbert.tokenizer import Tokenizer

    checkpoint = open_cached(options.model)
    if checkpoint.folder is None:
        raise ValueError("tune: --texts needs a model with a tokenizer")
    settings = TextSettings.from_folder(checkpoint.folder)
    tokenizer = Tokenizer(checkpoint.folder, settings, checkpoint.config.encoder.max_seq)
    read = ReadOptions(options.column or "text", keep=False, batch_records=options.batch)
    return [
        sum(map(len, tokenizer.encode_batch(chunk.texts, settings.default_prompt)))
        for chunk in open_source(stream_or_file(options.texts), read).chunks(Position())
    ]


def _info(options: argparse.Namespace) -> int:
    from ftbert._library import build_info

    values: dict[str, Any] = {"build": build_info()}
    if options.model is not None:
        values["model"] = _load(options).info()
    lines = []
    for part, entries in values.items():
        lines.append(part)
        lines += [f"  {key:<20} {_shown(value)}" for key, value in entries.items()]
    _report(options, values, "\n".join(lines))
    return 0


def _load(options: argparse.Namespace, **more: Any) -> Any:
    import ftbert

    # What is not given is left to load(), which knows the defaults.
    given = {name: value for name in ("device", "dtype") if (value := getattr(options, name)) is not None}
    return ftbert.load(options.model, **given, **more)


def _report(options: argparse.Namespace, values: dict[str, Any], text: str, where: TextIO | None = None) -> None:
    print(json.dumps(values, ensure_ascii=False, default=str) if options.json else text, file=where or sys.stdout)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"standard output: {error.strerror}"  # of all else the name is known
    text = " ".join(str(error).split())
    # Ours explain themselves; of anything else the type is needed to make sense of it.
    explained = isinstance(error, (ValueError, TypeError, OSError, RuntimeError)) and text
    return text if explained else f"{type(error).__name__}: {text} (FTBERT_DEBUG=1 shows where)"


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    text = " ".join(str(message).split())
    name = "" if category is UserWarning else f"{category.__name__}: "
    print(f"ftbert: warning: {name}{text}", file=sys.stderr)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return int(text)


def _range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal() or not 1 <= int(first) <= int(last):
        raise argparse.ArgumentTypeError(f"expected A..B with 1 <= A <= B; got {text!r}")
    return int(first), int(last)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1
    if not minutes >= 0:  # nor a NaN
        raise argparse.ArgumentTypeError(f"expected a number of minutes, not negative; got {text!r}")
    return minutes


def _device(text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (":" in text and (kind == "cpu" or not index.isdigit())):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N; got {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
