"""The picture of a result of bench_decode.py: tokens a second by context and texts, and of prompts.

    python benchmarks/decode_chart.py benchmarks/results/decode-cuda-llama-2-7b.json docs/decode.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decode_report import label
from result_pages import draw_file, figure, machine_of

COLORS = {
    "ftbert q8_0": "#1762a6", "ftbert bf16": "#6ea3d0", "ftbert fp32": "#6ea3d0", "llama.cpp q8_0": "#c4452f",
    "PyTorch, compiled": "#d9952b", "PyTorch": "#d9952b", "transformers": "#6b7280",
}  # fmt: skip


def draw(document: dict[str, Any], path: Path) -> None:
    parts = [[row for row in document["rows"] if row["generate"] is generate] for generate in (True, False)]
    names = [name for name in COLORS if any(name in row["peers"] for row in document["rows"])]
    facts = document["provenance"]
    where = machine_of(facts) + ("" if "gpu" in facts else f", {facts['threads']} threads")
    title = f"{document['model']}, {where}, a copy moves {document['copy_gbs']:,.0f} GB/s"
    widths = [max(1, len(rows)) for rows in parts]
    with figure(path, 1, 2, title, figsize=(10.5, 4.2), width_ratios=widths) as (drawn, grid):
        width = 0.84 / max(1, len(names))
        for axes, rows in zip(grid, parts, strict=True):
            for place, name in enumerate(names):
                for at, row in enumerate(rows):
                    if found := row["peers"].get(name):
                        x = at + (place - (len(names) - 1) / 2) * width
                        axes.bar(x, found["tokens_s"], width, color=COLORS[name], label=name)
                        share = f"\n{found['share']:.0%}" if "share" in found else ""
                        words = f"{found['tokens_s']:,.0f}{share}"
                        axes.annotate(words, (x, found["tokens_s"]), ha="center", va="bottom", fontsize=6.5)
            axes.set_xticks(range(len(rows)), [label(row) for row in rows], fontsize=8)
            axes.margins(y=0.14)
            axes.grid(axis="y", alpha=0.25)
        grid[0].set_ylabel("tokens/s; % of a copy's bandwidth")
        named = {bar.get_label(): bar for axes in grid for bar in axes.containers}
        drawn.legend(named.values(), named, fontsize=8, loc="outside lower center", ncols=max(1, len(named)))


if __name__ == "__main__":
    draw_file(draw)
