"""What the tuned GEMM table in force brings: layer sums, and m between the measured ones against tuning of their own.

    python benchmarks/bench_gemm_table.py --model base --model large --dtype fp16 [--out FILE]

Layer: for each number of tokens the sum of one layer's four products, two of them with the LayerNorm behind them, with
cuBLASLt's first proposals and with the table, measured here in turns. Between: random m; what the encoder runs for it
(m rounded up, with the table's algorithm) against the best of a search for just that m, in turns too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_model import SHAPES  # noqa: E402
from machine import provenance  # noqa: E402

from ftbert import gemm_table  # noqa: E402
from ftbert.tuning import Algorithm, Bench, in_turns, products_of_shape, search  # noqa: E402

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(SHAPES))
    parser.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="fp16")
    parser.add_argument("--between", type=int, default=24, help="how many random m (default 24)")
    parser.add_argument("--last", type=int, default=16384, help="largest m (default 16384)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    gemm_table.install(device)
    results: dict[str, Any] = {"provenance": provenance(device, options.dtype), "layers": [], "between": []}

    def write() -> None:
        """After every measurement: a run that is cut off keeps what it has."""
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")

    draw = random.Random(1)
    for model in options.model or ["base", "large"]:
        shape = SHAPES[model]
        wanted = products_of_shape(shape["hidden_size"], shape["intermediate_size"], "gelu", options.dtype)
        for m in [t for t in TOKENS if t <= options.last]:
            benches = [Bench(product, m) for product in wanted]
            pairs = [compare(bench, [bench.heuristics(1)[0], bench.chosen()]) for bench in benches]
            first, tuned = (sum(column) for column in zip(*pairs, strict=True))
            each = [pair[0] / pair[1] for pair in pairs]
            results["layers"].append({"model": model, "m": m, "default_us": first, "tuned_us": tuned, "each": each})
            shown = " ".join(f"{ratio:.3f}" for ratio in each)
            print(f"{model} m={m}: {first:.1f} -> {tuned:.1f} us, {first / tuned:.3f}x ({shown})", flush=True)
            write()
    for i in range(options.between):
        model = (options.model or ["base", "large"])[i % len(options.model or ["base", "large"])]
        shape = SHAPES[model]
        wanted = products_of_shape(shape["hidden_size"], shape["intermediate_size"], "gelu", options.dtype)
        product, m = draw.choice(wanted), round(2 ** draw.uniform(4, 14))
        m = min(m, options.last)
        bench, runs = Bench(product, m), Bench(product, gemm_table.tuner_module().rows(m))
        own = search(bench, [bench.chosen()])[:4]
        recordings = [bench.record(algorithm) for algorithm in (bench.heuristics(1)[0], *own)]
        times = [statistics.median(of_one) for of_one in in_turns([*recordings, runs.record(runs.chosen())], 27)]
        best = min(times)
        entry = {"product": str(product), "m": m, "default_us": times[0], "table_us": times[-1], "own_us": best}
        results["between"].append(entry)
        shown = f"first {times[0]:.2f}, table {times[-1]:.2f}, own {best:.2f}: {times[-1] / best:.3f}"
        print(f"{product} m={m}: {shown}", flush=True)
        write()
    behind = [entry["table_us"] / entry["own_us"] for entry in results["between"]]
    if behind:
        print(f"table behind tuning for the very m: median {statistics.median(behind):.3f}, worst {max(behind):.3f}")
    return 0


def compare(bench: Bench, algorithms: list[Algorithm]) -> list[float]:
    """Median microseconds of each, in turns."""
    return [statistics.median(times) for times in bench.times(algorithms, 9)]


if __name__ == "__main__":
    sys.exit(main())
