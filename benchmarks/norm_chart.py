"""The picture of a result of bench_norm.py: each peer's share of a copy's speed over the columns.

    python benchmarks/norm_chart.py benchmarks/results/norm-h200-bf16.json docs/norm.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from norm_tables import DIRECTIONS, shares
from result_pages import draw_file, figure, machine_of

OPS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
STYLES = {
    "ftbert": ("#1762a6", "-"), "ftbert, memory-efficient": ("#1762a6", "--"), "torch": ("#d9952b", "-"),
    "torch.compile": ("#c4452f", "-"), "Liger": ("#1f9d5c", "-"), "quack": ("#7350cf", "-"), "apex": ("#6b7280", "-"),
    "apex, memory-efficient": ("#6b7280", "--"), "copy of x": ("#b8bdc5", ":"),
}  # fmt: skip


def draw(document: dict[str, Any], path: Path) -> None:
    facts = document["provenance"]
    rows = {row["shape"][1]: row["shape"][0] for row in document["rows"] if row["op"] in OPS}
    most = max(rows.values(), default=0)
    fewer = "".join(f" ({count:,} of {n:,} columns)" for n, count in rows.items() if count < most)
    title = f"{most:,} rows{fewer}, {facts['dtype']}, {machine_of(facts)}"
    with figure(path, 2, 2, title, figsize=(9.5, 6.4), sharex=True, sharey=True) as (drawn, grid):
        for line, (op, name_of_op) in zip(grid, OPS.items(), strict=True):
            for axes, direction in zip(line, DIRECTIONS, strict=True):
                found = shares(document, op, direction)
                for name, (color, style) in STYLES.items():
                    if points := found.get(name):
                        columns = sorted(points)
                        axes.plot(
                            columns, [100 * points[n] for n in columns], style, color=color, marker=".", label=name
                        )
                axes.set_title(f"{name_of_op}, {direction}", fontsize=9.5)
                axes.axhline(100, color="#22262b", linewidth=0.7)
                axes.set(xscale="log", ylim=(0, 110))
                axes.minorticks_off()
                axes.grid(alpha=0.25)
        ticks = sorted({row["shape"][1] for row in document["rows"] if row["op"] in OPS})
        for axes in grid[1]:
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=7.5, rotation=30)
            axes.set_xlabel("columns")
        for axes in grid[:, 0]:
            axes.set_ylabel("% of a large copy's bytes/s")
        named = {
            line.get_label(): line for axes in grid.flat for line in axes.get_lines() if line.get_label() in STYLES
        }
        drawn.legend(named.values(), named, fontsize=8, loc="outside lower center", ncols=len(named))


if __name__ == "__main__":
    draw_file(draw)
