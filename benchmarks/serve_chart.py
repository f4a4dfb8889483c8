"""The chart of a result of bench_serve.py: tokens/s beside encode's, and p50 and p99 over the load.

    python benchmarks/serve_chart.py benchmarks/results/serve-cpu-fp32.json docs/serving-cpu.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from result_pages import draw_file, figure, machine_of


def draw(document: dict[str, Any], path: Path) -> None:
    names = list(dict.fromkeys(row["texts"] for row in document["closed"]))
    colors = ["#1762a6", "#d9952b", "#1f9d5c", "#7350cf"]
    sizes = sorted({row["texts_per_request"] for row in document["closed"]})
    facts = document["provenance"]
    title = f"{facts['model']}, {facts['dtype']}, {machine_of(facts)}"
    with figure(path, 1, 2, title, figsize=(9.5, 3.6)) as (_, (left, right)):
        for i, (name, color) in enumerate(zip(names, colors, strict=False)):
            rates = {
                row["texts_per_request"]: row["tokens_per_s"] for row in document["closed"] if row["texts"] == name
            }
            at = [sizes.index(size) + (i - (len(names) - 1) / 2) * 0.3 for size in rates]
            left.bar(at, list(rates.values()), 0.28, color=color, label=f"{name}, served")
            own = [row["tokens_per_s"] for row in document["encode"] if row["texts"] == name]
            left.axhline(sum(own) / len(own), color=color, linestyle=":", label=f"{name}, encode")
            points = [row for row in document["open"] if row["texts"] == name]
            for quantile, style in (("p50_ms", "-"), ("p99_ms", "--")):
                loads, times = [row["load"] for row in points], [row[quantile] for row in points]
                right.plot(loads, times, style, color=color, marker=".", label=f"{name}, {quantile[:3]}")
        left.set_xticks(range(len(sizes)), [f"{size} a request" for size in sizes])
        left.set_ylabel("tokens/s")
        left.legend(fontsize=7.5, loc="lower center")
        right.set(xscale="log", yscale="log", xlabel="load, 1: the maximum of single texts", ylabel="milliseconds")
        right.set_xticks(loads, [f"{load:g}" for load in loads])
        right.minorticks_off()
        right.grid(alpha=0.25)
        right.legend(fontsize=7.5)


if __name__ == "__main__":
    draw_file(draw)
