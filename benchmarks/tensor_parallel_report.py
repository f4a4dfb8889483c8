"""What a result of bench_tensor_parallel.py says: its table, and which rows miss their gates. Needs no torch."""

from __future__ import annotations

from typing import Any

from result_pages import markdown

# The most that sum, residual and norm of 128 rows of BERT-large may take, in microseconds, in the model.
SUM_GATE, SUM_CASE = 8.0, "bert-large fp16 1x128"
_SUMS = {
    "sum_us": "a sum with its norm, us", "least_sum_us": "the fastest",
    "sum_in_a_row_us": "one behind another",
}  # fmt: skip
MOST_DIFFERENCE = 0.02  # of results, relative: rounding of 16-bit sums through all layers


def lines_of(document: dict[str, Any]) -> list[str]:
    count, rows = len(document["provenance"]["devices"]), document["rows"]
    sums = {key: words for key, words in _SUMS.items() if any(key in row for row in rows)}
    heads = ("", "one GPU, ms", f"{count}, ms", "times as fast", "gate", *sums.values())
    cells = []
    for row in rows:
        times = [f"{row['one_ms']:.3g}", f"{row['several_ms']:.3g}", f"{row['times_as_fast']:.2f}", row["gate"] or ""]
        cells.append([row["case"], *map(str, times), *(f"{row[key]:.1f}" for key in sums)])
    return markdown((heads, cells)).splitlines()


def misses(row: dict[str, Any]) -> list[str]:
    """In words."""
    found = []
    if row["times_as_fast"] < row["gate"]:
        found.append(f"{row['case']}: {row['times_as_fast']:.3f} times as fast, its gate is {row['gate']}")
    if row["difference"] >= MOST_DIFFERENCE:
        found.append(f"{row['case']}: results differ by {row['difference']:.1e}")
    if row["case"] == SUM_CASE and row["sum_us"] > SUM_GATE:
        found.append(f"{row['case']}: a sum takes {row['sum_us']:.1f} us, its gate is {SUM_GATE}")
    return found


def of_page(document: dict[str, Any]) -> list[str]:
    missed = [f"- missed: {words}" for row in document["rows"] for words in misses(row)]
    return [*lines_of(document), "", *missed]
