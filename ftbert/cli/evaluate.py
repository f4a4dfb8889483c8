"""`ftbert check` and `ftbert bench`: a model against transformers."""

from __future__ import annotations

import argparse

from ftbert.cli import command


def add_to(commands: command.Commands) -> None:
    parser = command.add(
        commands,
        "check",
        "Parity with transformers on this machine.",
        _check,
        "example: ftbert check minilm --dtype bf16",
    )
    parser.add_argument("model", metavar="MODEL")

    parser = command.add(
        commands,
        "bench",
        "Speed against transformers on this machine.",
        _bench,
        "example: ftbert bench minilm --texts reviews.txt --batch 64",
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--texts", metavar="FILE", help=".txt .jsonl .csv .parquet for the ragged batch")
    parser.add_argument("--column", help='field with the text (default "text")')
    parser.add_argument("--batch", type=command.count, default=32, help="texts (default 32)")
    parser.add_argument("--longest", type=command.count, default=128, help="tokens (default 128)")
    parser.add_argument("--rounds", type=command.count, default=7, help="repetitions (default 7)")


def _check(options: argparse.Namespace) -> int:
    from ftbert.evaluation import check

    result = check(command.load_model(options))
    command.report(options, result.as_dict(), str(result))
    return 0 if result.passed else 1


def _bench(options: argparse.Namespace) -> int:
    from ftbert.files import Position, ReadOptions, open_source, stream_or_file

    texts = None
    if options.texts is not None:
        read = ReadOptions(options.column or "text", keep=False, batch_records=options.batch)
        chunk = next(iter(open_source(stream_or_file(options.texts), read).chunks(Position())), None)
        texts = chunk.texts if chunk is not None else []
    from ftbert.evaluation import bench

    # Without heads, like the peers: what is timed ends at last_hidden_state.
    model = command.load_model(options, heads=False)
    result = bench(model, texts=texts, batch=options.batch, longest=options.longest, rounds=options.rounds)
    command.report(options, result.as_dict(), str(result))
    return 0
