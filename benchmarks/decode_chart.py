"""The picture of a result of bench_decode.py: tokens a second by context and texts, and of prompts.

    python benchmarks/decode_chart.py benchmarks/results/decode-cuda-llama-2-7b.json docs/decode.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from decode_report import label

COLORS = {
    "ftbert q8_0": "#1762a6", "ftbert bf16": "#6ea3d0", "ftbert fp32": "#6ea3d0", "llama.cpp q8_0": "#c4452f",
    "PyTorch, compiled": "#d9952b", "PyTorch": "#d9952b", "transformers": "#6b7280",
}  # fmt: skip


def draw(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [[row for row in document["rows"] if row["generate"] is generate] for generate in (True, False)]
    figure, grid = plt.subplots(
        1, 2, figsize=(10.5, 4.2), layout="constrained", width_ratios=[max(1, len(rows)) for rows in parts]
    )
    names = [name for name in COLORS if any(name in row["peers"] for row in document["rows"])]
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
    figure.legend(named.values(), named, fontsize=8, loc="outside lower center", ncols=max(1, len(named)))
    facts = document["provenance"]
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['threads']} threads"
    figure.suptitle(f"{document['model']}, {where}, a copy moves {document['copy_gbs']:,.0f} GB/s", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
