"""Embeds many files on many machines: Ray Data hands them out, `ftbert embed` does each.

    python examples/ray_embed.py MODEL vectors texts/*.jsonl.gz --address auto --num-gpus 1 --concurrency 16

texts/a.jsonl.gz becomes vectors/a.jsonl.gz.npy, whole or not at all. What is there already is skipped, so the same
command goes on after a stop. A file that was begun, be it on a machine that is lost, goes on from its last 8,192
records. The machines read and write the files themselves: MODEL, texts and vectors are paths that all of them have, or
MODEL is a hub id. ftbert is installed on each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import ray

import ftbert
from ftbert.files import embed_file


class Embedder:
    """What an actor holds: a model."""

    def __init__(
        self, model: str, device: str | list[str], dtype: str, column: str | None, parallel: str | None
    ) -> None:
        self.model, self.column = ftbert.load(model, device, dtype, parallel=parallel, heads=False), column

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """One file. A file that cannot be embedded is told of, and the others go on."""
        said = {"records": 0, "resumed": 0, "error": ""}
        if Path(row["target"]).exists():  # finished by an actor that died before it could say so
            return row | said
        try:
            stats = embed_file(
                self.model, row["source"], row["target"], column=self.column, show_progress_bar=False
            )
        except (OSError, ValueError) as error:
            return row | said | {"error": f"{type(error).__name__}: {error}"}
        return row | said | {"records": stats.records, "resumed": stats.resumed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder")
    parser.add_argument("sources", metavar="IN", type=Path, nargs="+", help=".txt .jsonl .csv .tsv .parquet, .gz")
    parser.add_argument("--address", help="of a Ray cluster: auto, HOST:PORT (default: this machine's, or a new one)")
    parser.add_argument("--concurrency", type=int, default=1, help="actors, each with a model (default 1)")
    parser.add_argument("--num-gpus", type=float, default=0.0, help="of an actor (default 0: the CPU)")
    parser.add_argument("--num-cpus", type=float, default=1.0, help="of an actor; its threads on the CPU (default 1)")
    parser.add_argument("--parallel", choices=("tensor", "pipeline"), help="one model over all GPUs of an actor")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16", "fp8"), help="(default fp16 on GPUs, fp32 on CPUs)")
    parser.add_argument("--column", help='field with the text (default "text")')
    parser.add_argument("--to", choices=(".npy", ".jsonl", ".jsonl.gz", ".parquet"), default=".npy")
    options = parser.parse_args()

    if options.parallel and options.num_gpus < 2:
        parser.error("--parallel shares a model among the GPUs of an actor: --num-gpus 2 or more")
    options.out.mkdir(parents=True, exist_ok=True)
    largest_first = sorted(options.sources, key=lambda path: -path.stat().st_size)  # no long file at the end
    pairs = {options.out.resolve() / (path.name + options.to): path.resolve() for path in largest_first}
    if len(pairs) < len(options.sources):
        parser.error("two files have one name, and would have one output")
    rows = [{"source": str(source), "target": str(target)} for target, source in pairs.items() if not target.exists()]
    print(f"{len(rows)} files to embed, {len(pairs) - len(rows)} are there", flush=True)
    if not rows:
        return 0

    ray.init(address=options.address)
    device: str | list[str] = "cuda" if options.num_gpus else "cpu"
    if options.parallel:
        device = [f"cuda:{gpu}" for gpu in range(int(options.num_gpus))]  # those that Ray lets the actor see
    files = ray.data.from_items(rows, override_num_blocks=len(rows))  # a file is what is handed out, and repeated
    done = files.map(
        Embedder,
        fn_constructor_args=(
            options.model, device, options.dtype or ("fp16" if options.num_gpus else "fp32"), options.column,
            options.parallel,
        ),
        compute=ray.data.ActorPoolStrategy(size=options.concurrency, max_tasks_in_flight_per_actor=1),
        num_gpus=options.num_gpus,
        num_cpus=options.num_cpus,
    )  # fmt: skip
    failed = 0
    for row in done.iter_rows():
        failed += bool(row["error"])
        what = row["error"] or f"{row['records']} records, {row['resumed']} of them from an earlier run"
        print(f"{row['target']}: {what}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
