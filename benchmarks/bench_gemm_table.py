"""What the tuned GEMM table in force brings: to layers, to whole models, and between the m that were measured.

    python benchmarks/bench_gemm_table.py --model base --model large --dtype fp16 [--out FILE]

Layer: for each number of tokens the sum of one layer's four products, two of them with the LayerNorm behind them, with
cuBLASLt's first proposals and with the table, measured here in turns. Whole models, packed calls: with cuBLASLt's first
proposals everywhere, without a table, and with it, in turns. Between: random m; what the encoder runs for it (m rounded
up, with the table's choice) against the best of tuning for just that m, in turns too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import provenance, seconds, write  # noqa: E402
from points import SHAPES, make_batch, reference_model  # noqa: E402

import ftbert  # noqa: E402
from ftbert.tuning import (  # noqa: E402
    Algorithm,
    Bench,
    Machine,
    Product,
    Row,
    gemm_table,
    in_force,
    in_turns,
    products_of_shape,
    put_in_force,
    search,
    without_norm,
)

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
    rows = in_force(Machine.of(device))
    put_in_force(device.index, rows)
    results: dict[str, Any] = {
        "provenance": provenance(device, options.dtype), "layers": [], "models": [], "between": [],
    }  # fmt: skip

    def add(kind: str, entry: dict[str, Any], text: str) -> None:
        results[kind].append(entry)
        print(text, flush=True)
        if options.out:
            write(options.out, results)

    models, draw = options.model or ["base", "large"], random.Random(1)
    wanted = {
        name: products_of_shape(SHAPES[name]["hidden_size"], SHAPES[name]["intermediate_size"], "gelu", options.dtype)
        for name in models
    }
    for name in models:
        for m in [t for t in TOKENS if t <= options.last]:
            benches = [Bench(product, m) for product in wanted[name]]
            pairs = [compare(bench, [bench.first_proposal(), bench.chosen()]) for bench in benches]
            first, tuned = (sum(column) for column in zip(*pairs, strict=True))
            each = [pair[0] / pair[1] for pair in pairs]
            shown = " ".join(f"{ratio:.3f}" for ratio in each)
            add("layers", {"model": name, "m": m, "default_us": first, "tuned_us": tuned, "each": each},
                f"{name} m={m}: {first:.1f} -> {tuned:.1f} us, {first / tuned:.3f}x ({shown})")  # fmt: skip
    for i in range(options.between):
        name = models[i % len(models)]
        product, m = draw.choice(wanted[name]), min(round(2 ** draw.uniform(4, 14)), options.last)
        entry = between_products(product, m)
        add("between", entry, f"{entry['product']} m={m}: table {entry['table_us']:.2f}, "
            f"own {entry['own_us']:.2f}: {entry['table_us'] / entry['own_us']:.3f}")  # fmt: skip
    for name in models:
        for entry in whole_models(name, wanted[name], options.dtype, options.last, rows, device):
            add("models", entry, f"{name}, {entry['tokens']} tokens: first proposals {entry['first_ms']:.3f}, "
                f"no table {entry['guess_ms']:.3f}, table {entry['table_ms']:.3f} ms")  # fmt: skip
    behind = [entry["table_us"] / entry["own_us"] for entry in results["between"]]
    if behind:
        print(f"table behind tuning for the very m: median {statistics.median(behind):.3f}, worst {max(behind):.3f}")
    return 0


def compare(bench: Bench, algorithms: list[Algorithm]) -> list[float]:
    """Median microseconds of each, in turns."""
    return [statistics.median(times) for times in bench.times(algorithms, 9)]


def between_products(product: Product, m: int) -> dict[str, Any]:
    bench, runs = Bench(product, m), Bench(product, gemm_table.tuner_module().rows(m))
    own = [bench.first_proposal(), bench.chosen(), *search(bench)[:4]]
    recordings = [*(bench.record(algorithm) for algorithm in own), runs.record(runs.chosen())]
    times = [statistics.median(of_one) for of_one in in_turns(recordings, 27)]
    return {"product": str(product), "m": m, "default_us": times[0], "table_us": times[-1], "own_us": min(times)}


def whole_models(
    name: str, products: list[Product], dtype: str, last: int, table: list[Row], device: torch.device
) -> list[dict[str, Any]]:
    """Milliseconds of a packed call: with cuBLASLt's first proposals, with no table, with the table."""
    plain = [without_norm(product) for product in products]
    own = [row for row in table if row.product in {*plain, *products}]
    tables = {"first": [Row(product, 1, last, None) for product in {*plain, *products}], "guess": [], "table": own}
    reference = reference_model(name, None, device)
    models = {kind: ftbert.load(reference, device=device, dtype=dtype) for kind in tables}
    found = []
    for tokens in [t for t in TOKENS if 128 <= t <= last]:
        batch = make_batch(reference.config.vocab_size, tokens // 128, 128, "full", device)
        ids, cu_seqlens = batch.packed, batch.cu_seqlens
        times: dict[str, list[float]] = {kind: [] for kind in tables}
        repeats = 1
        for _ in range(6):
            for kind, model in models.items():
                put_in_force(device.index, tables[kind])  # a call that is not recorded asks for its products anew
                for _ in range(max(3, repeats)):
                    model.forward_packed(ids, cu_seqlens, 128)
                times[kind].append(seconds(partial(model.forward_packed, ids, cu_seqlens, 128), device, repeats))
            repeats = max(1, min(40, round(0.04 / times["table"][-1])))
        each = {f"{kind}_ms": 1e3 * statistics.median(of_one[1:]) for kind, of_one in times.items()}
        found.append({"model": name, "tokens": tokens} | each)
    put_in_force(device.index, table)
    return found


if __name__ == "__main__":
    sys.exit(main())
