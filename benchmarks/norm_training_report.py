"""What a result of bench_norm_training.py says, and what it must not say. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from result_pages import markdown

BEFORE, AFTER, EFFICIENT = "before", "after patch", "after patch, memory-efficient"
COLUMNS = {
    "step_ms": "step ms", "kernels_ms": "kernels ms", "saved_bytes": "saved MiB", "kept_bytes": "kept MiB",
    "peak_bytes": "peak MiB",
}  # fmt: skip
MIB = 1 << 20


def saving(result: dict[str, Any]) -> dict[str, float]:
    """Of the memory-efficient mode, as a share of what it promises, by way of counting."""
    plain, efficient = (result["ways"][way] for way in (AFTER, EFFICIENT))
    keys = [key for key in ("saved_bytes", "kept_bytes") if key in plain and key in efficient]
    return {key: (plain[key] - efficient[key]) / result["promised_bytes"] for key in keys}


def failures(result: dict[str, Any]) -> Iterator[str]:
    """What this result must not say: a way that failed, other losses, another saving than promised."""
    for way, row in result["ways"].items():
        if "failed" in row:
            yield f"{way}: {row['failed']}"
    want = result["ways"][BEFORE].get("losses")
    for way, row in result["ways"].items():
        off = [abs(a / b - 1) for a, b in zip(row.get("losses", []), want or [], strict=False)]
        if not all(by <= 0.02 for by in off):  # a step in bf16 is off by as much as a few of its roundings
            yield f"{way}: losses differ from those before: {', '.join(f'{by:.1%}' for by in off)}"
    if "promised_bytes" in result:
        for key, share in saving(result).items():
            if not abs(share - 1) <= 0.02:
                yield f"the memory-efficient mode saves {share:.1%} of what it promises ({key})"


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """A Markdown table."""
    shown = [key for key in COLUMNS if any(key in row for row in result["ways"].values())]
    rows = []
    for way, row in result["ways"].items():
        if "failed" in row:
            rows.append([way, f"failed: {row['failed']}", *[""] * len(shown)])
            continue
        cells = []
        for key in shown:
            value = row.get(key, "")
            unit, form = (MIB, ",.1f") if key.endswith("bytes") else (1, ".2f")
            cells.append(value if isinstance(value, str) else format(value / unit, form))
        rows.append([way, *cells, f"{row['losses'][-1]:.4f}"])
    head = [result["name"], *(COLUMNS[key] for key in shown), "last loss"]
    yield from markdown((head, rows)).splitlines()
    if "promised_bytes" in result and (found := saving(result)):
        shares = ", ".join(f"{share:.1%} ({key.removesuffix('_bytes')})" for key, share in found.items())
        yield f"\nThe memory-efficient mode promises {result['promised_bytes'] / MIB:,.1f} MiB and saves {shares}."
