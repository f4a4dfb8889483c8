"""Tables of a result of bench_norm.py: all of them for the terminal, by report.py a summary for docs.

    python benchmarks/norm_tables.py benchmarks/results/norm-h200-bf16.json

Needs no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result_pages import Table, markdown

MIB = 1 << 20
DIRECTIONS = ("forward", "backward")
ORDER = (
    "ftbert", "ftbert, memory-efficient", "torch", "torch.compile", "Liger", "quack", "apex", "apex, memory-efficient",
    "copy of x",
)  # fmt: skip
Row = dict[str, Any]


def lines_of(row: Row, copy_gbs: float) -> Iterator[str]:
    """One of the document's rows as it is printed during the run."""
    yield f"\n{row['op']} {'x'.join(map(str, row['shape']))} {row['dtype']}"
    for name, found in row["peers"].items():
        if "failed" in found:
            yield f"  {name:<26} failed: {found['failed']}"
            continue
        cells = [
            f"{direction} {found[f'{direction}_us']:8.2f} us {_speed(found, direction, copy_gbs)}"
            for direction in ("cold", *DIRECTIONS)
            if f"{direction}_us" in found
        ]
        cells += [f"{way} {found[f'{way}_us']:.2f} us" for way in ("warm", "flushed") if f"{way}_us" in found]
        if "kept_bytes" in found:
            kept = found["kept_bytes"] / row["tensor_bytes"]
            cells.append(f"kept {kept:.2f} x, peak {found['peak_bytes'] / MIB:,.0f} MiB")
        yield f"  {name:<26} " + "  ".join(cells)


def tables(document: dict[str, Any], summary: bool = False) -> Iterator[tuple[str, Table]]:
    """With their titles: norms of rows, each by itself or in a summary, BatchNorm, ReLU, and what is kept."""
    rows, copy = document["rows"], document["copy_gbs"]
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row["op"], []).append(row)
    norms = {op: found for op, found in by_op.items() if len(found[0]["shape"]) == 2}
    if norms and summary:
        title = f"Forward / backward, % of the {copy:,.0f} GB/s of a large copy"
        yield title, shares_table([row for found in norms.values() for row in found], copy)
    for op, found in norms.items():
        for direction in () if summary else DIRECTIONS:
            yield f"{op}, {direction}, GB/s (share of a large copy's)", speed_table(found, direction, copy)
    images = [row for row in rows if row["op"].startswith("batch_norm")]
    if images:
        yield "BatchNorm, forward / backward, microseconds", microseconds_table(images)
    for row in by_op.get("relu", []):
        yield "ReLU and its gradient in fp32, microseconds", relu_table(row)
    if any("kept_bytes" in found for row in rows for found in row["peers"].values()):
        yield "Held between the passes where nobody else holds x, in tensors like x", kept_table(by_op)


def speed_table(rows: list[Row], direction: str, copy_gbs: float) -> Table:
    """A line for each width; the fastest bold."""
    names = [name for name in _peers(rows) if any(f"{direction}_us" in row["peers"].get(name, {}) for row in rows)]
    body = []
    for row in rows:
        gbs = {name: row["peers"].get(name, {}).get(f"{direction}_gbs") for name in names}
        best = max((value for name, value in gbs.items() if value and not name.startswith("copy")), default=None)
        cells = []
        for value in gbs.values():
            text = "" if value is None else f"{value:,.0f} ({value / copy_gbs:.0%})"
            cells.append(f"**{text}**" if text and value == best else text)
        body.append(["x".join(map(str, row["shape"])), *cells])
    return ["rows x columns", *names], body


def shares_table(rows: list[Row], copy_gbs: float) -> Table:
    """In % of the copy's bandwidth."""
    return both_ways(rows, "gbs", 100 / copy_gbs)


def microseconds_table(rows: list[Row]) -> Table:
    header, body = both_ways(rows, "us")
    return header, [[f"{first} {row['dtype']}", *cells] for row, (first, *cells) in zip(rows, body, strict=True)]


def both_ways(rows: list[Row], unit: str, factor: float = 1.0) -> Table:
    """Forward and backward in a cell, of the peers that compute both."""
    names = [name for name in _peers(rows) if any(f"backward_{unit}" in row["peers"].get(name, {}) for row in rows)]
    body = []
    for row in rows:
        cells = []
        for name in names:
            found = row["peers"].get(name, {})
            ways = [f"{way}_{unit}" for way in DIRECTIONS if f"{way}_{unit}" in found]
            cells.append(" / ".join(f"{factor * found[way]:.0f}" for way in ways))
        body.append([f"{row['op']} {'x'.join(map(str, row['shape']))}", *cells])
    return ["", *names], body


def relu_table(row: Row) -> Table:
    ways = ("cold", "flushed", "warm")
    body = [[name, *(f"{found[f'{way}_us']:.1f}" for way in ways)] for name, found in row["peers"].items()]
    return ["x".join(map(str, row["shape"])), *ways], body


def kept_table(by_op: dict[str, list[Row]]) -> Table:
    """At the widest shape of each op, where statistics of rows weigh least."""
    widest = [max(rows, key=lambda row: row["shape"][1]) for rows in by_op.values()]
    names = [name for name in _peers(widest) if any("kept_bytes" in row["peers"].get(name, {}) for row in widest)]
    body = []
    for row in widest:
        kept = [row["peers"].get(name, {}).get("kept_bytes") for name in names]
        if any(kept):
            cells = ("" if value is None else f"{value / row['tensor_bytes']:.2f}" for value in kept)
            body.append([f"{row['op']} {'x'.join(map(str, row['shape']))}", *cells])
    return ["", *names], body


def shares(document: dict[str, Any], op: str, direction: str) -> dict[str, dict[int, float]]:
    """Of the copy, by peer and columns."""
    found: dict[str, dict[int, float]] = {}
    for row in document["rows"]:
        if row["op"] == op:
            for name, peer in row["peers"].items():
                if f"{direction}_gbs" in peer:
                    share = peer[f"{direction}_gbs"] / document["copy_gbs"]
                    found.setdefault(name, {})[row["shape"][1]] = share
    return found


def markdown_of(document: dict[str, Any], summary: bool = False) -> str:
    """The tables, each under its title."""
    parts = []
    for title, table in tables(document, summary):
        parts += [f"{title}:", markdown(table)]
    return "\n\n".join(parts)


def _peers(rows: list[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row["peers"])
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def _speed(found: dict[str, float], direction: str, copy_gbs: float) -> str:
    gbs = found[f"{direction}_gbs"]
    return f"{gbs:5,.0f} GB/s ({gbs / copy_gbs:4.0%})"


if __name__ == "__main__":
    print(markdown_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
