"""What a result of bench_tensor_parallel.py says: its table, and which rows miss their gates. Needs no torch."""

from __future__ import annotations

from typing import Any

# The most that sum, residual and norm of 128 rows of BERT-large may take, in microseconds.
SUM_GATE, SUM_CASE = 8.0, "bert-large fp16 1x128"
MOST_DIFFERENCE = 0.02  # of results, relative: rounding of 16-bit sums through all layers


def lines_of(document: dict[str, Any]) -> list[str]:
    count = len(document["provenance"]["devices"])
    heads = ("", "one GPU, ms", f"{count}, ms", "times as fast", "gate", "a sum with its norm, us", "the fastest")
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * 6}"]
    for row in document["rows"]:
        times = f"{row['one_ms']:.3g} | {row['several_ms']:.3g} | {row['times_as_fast']:.2f} | {row['gate'] or ''}"
        sums = f"{row['sum_us']:.1f} | {row['least_sum_us']:.1f}" if "sum_us" in row else " | "
        lines.append(f"| {row['case']} | {times} | {sums} |")
    return lines


def misses(row: dict[str, Any]) -> list[str]:
    """In words."""
    found = []
    if row["times_as_fast"] < row["gate"]:
        found.append(f"{row['case']}: {row['times_as_fast']:.2f} times as fast, its gate is {row['gate']}")
    if row["difference"] >= MOST_DIFFERENCE:
        found.append(f"{row['case']}: results differ by {row['difference']:.1e}")
    if row["case"] == SUM_CASE and row["sum_us"] > SUM_GATE:
        found.append(f"{row['case']}: a sum takes {row['sum_us']:.1f} us, its gate is {SUM_GATE}")
    return found
