"""`ftbert embed`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ftbert.cli import command

_AS_IN_ENCODE = (
    "pooling", "prompt", "prompt_name", "max_length", "truncate_dim", "max_tokens", "long_texts", "vectors",
    "chunk_tokens",
)  # fmt: skip


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "embed",
        "Embed the texts of files: .txt .jsonl .csv .tsv (also .gz) .parquet to .npy .jsonl .jsonl.gz .parquet.",
        _embed,
        "examples: ftbert embed minilm 'texts/*.txt' vectors.npy --device 'cuda:*' --dtype fp16\n"
        "          ftbert embed minilm reviews.jsonl.gz vectors.npy --column body --skip-bad\n"
        "          sort -u queries.txt | ftbert embed minilm - - > vectors.jsonl",
        several_devices=True,
    )
    parser.add_argument(
        "source", metavar="IN", nargs="+",
        help="files, read in turn; patterns in quotes; - is standard input, of lines as --input-format says",
    )  # fmt: skip
    parser.add_argument("target", metavar="OUT", help="one file; - is standard output, of JSON lines")
    parser.add_argument(
        "--input-format", choices=("txt", "jsonl", "csv", "tsv"), default="txt", help="of IN - (default txt)"
    )
    parser.add_argument("--column", metavar="NAME", help='field with the text (default "text")')
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out records that cannot be read; OUT.skipped.jsonl lists them"
    )
    parser.add_argument(
        "--pooling", type=_pooling, metavar="MODE",
        help="as in encode: cls, mean, last, ..., or several as cls+mean (default: the model's own)",
    )  # fmt: skip
    parser.add_argument("--prompt", metavar="TEXT", help="put before every text (default: the model's own, if any)")
    parser.add_argument("--prompt-name", metavar="NAME", help="one of the model's prompts, such as query")
    command.add_task(parser)
    parser.add_argument("--max-length", type=command.count, metavar="N", help="tokens of a text (default: the model's)")
    parser.add_argument(
        "--long-texts", choices=("truncate", "mean"), default="truncate",
        help="longer ones are truncated (default), or read window by window and averaged",
    )  # fmt: skip
    parser.add_argument(
        "--truncate-dim", type=command.count, metavar="N", help="entries kept of a vector (default: the model's own)"
    )
    parser.add_argument(
        "--vectors", choices=("dense", "sparse", "multi"),
        help="one a text, sparse ones (SPLADE, BGE-M3), or one a token (ColBERT, BGE-M3)\n"
        "(default: what the model is for); the last two to .jsonl or .parquet",
    )  # fmt: skip
    parser.add_argument(
        "--chunk-tokens", type=command.count, metavar="N",
        help="late chunking: a vector for each span of so many tokens, which see the whole text; to .jsonl or .parquet",
    )  # fmt: skip
    parser.add_argument("--no-normalize", action="store_true", help="keep the length of vectors (default: 1)")
    parser.add_argument(
        "--precision", choices=("float32", "int8", "uint8", "binary", "ubinary"), default="float32",
        help="of the entries (default float32); binary ones are signs, eight a byte\n"
        "(faiss takes uint8 and ubinary, usearch int8 and binary)",
    )  # fmt: skip
    parser.add_argument(
        "--ranges", metavar="FILE",
        help=".npy for int8 and uint8; if missing, that of the first 8192 texts, encoded twice",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=command.count, metavar="N", default=16384, help="computed at once (default 16384)"
    )
    parser.add_argument(
        "--batch-records", type=command.count, metavar="N", help="put on the disk at once (default 8192)"
    )
    parser.add_argument("--no-resume", action="store_true", help="start again, and throw an earlier run's work away")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction,
        help="a bar, or nothing (default: a bar on a terminal, elsewhere a line every 30 s)",
    )  # fmt: skip


def _pooling(text: str) -> str:
    from ftbert.text import check_pooling

    try:
        return check_pooling(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _embed(options: argparse.Namespace) -> int:
    from ftbert.files import BATCH_RECORDS, CALIBRATION_TEXTS, check_request, output_file, staging_path

    how: dict[str, Any] = {
        "column": options.column,
        "skip_bad": options.skip_bad,
        "batch_records": options.batch_records or BATCH_RECORDS,
        "kind": f".{options.input_format}",
        "precision": options.precision,
        "ranges": options.ranges,
    }
    check_request(options.source, options.target, **how)
    if options.ranges is not None and not output_file(options.ranges).exists():
        print(
            f"ftbert: {options.ranges} does not exist: it is measured over the first {CALIBRATION_TEXTS} texts, which "
            "are encoded once more for the vectors",
            file=sys.stderr,
        )
    try:
        with command.terminable():
            return _run(options, how)
    except KeyboardInterrupt:
        kept = staging_path(output_file(options.target))
        if kept.exists():
            again = "the same command" + (" without --no-resume" if options.no_resume else "")
            print(f"ftbert: stopped; {kept} is kept, {again} goes on from there", file=sys.stderr)
        raise


def _run(options: argparse.Namespace, how: dict[str, Any]) -> int:
    from ftbert.files import embed_file, output_file, skipped_file

    stats = embed_file(
        command.load_model(options, heads=False),
        options.source,
        options.target,
        normalize=not options.no_normalize,
        resume=not options.no_resume,
        show_progress_bar=options.progress,
        **{name: getattr(options, name) for name in _AS_IN_ENCODE},
        **how,
    )
    text = f"{stats.target}: {stats.records} records x {stats.hidden}"
    text += f", {stats.skipped} skipped" if stats.skipped else ""
    text += f" (see {skipped_file(output_file(stats.target))})" if stats.skipped and stats.target != "-" else ""
    text += f", {stats.resumed} of them from an earlier run" if stats.resumed else ""
    done = "truncated" if options.long_texts == "truncate" else "read in windows"
    text += f", {stats.cut} longer than the maximum length and {done}" if stats.cut else ""
    text += f"; {stats.tokens} tokens in {stats.seconds:.1f} s, {stats.tokens_per_second:,.0f} tokens/s"
    # Where the vectors go to standard output, what there is to say goes to the other.
    command.report(options, stats.as_dict(), text, sys.stderr if stats.target == "-" else sys.stdout)
    return 0
