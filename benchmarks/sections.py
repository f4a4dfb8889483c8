"""Parts of the report's page, from tables and from the smaller result files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Table = tuple[Sequence[str], list[list[str]]]  # head, rows


def machine(facts: dict[str, Any]) -> str:
    packages = facts["packages"]
    if "gpu" in facts:
        where = f"One {facts['gpu']} (driver {facts['driver']}, CUDA {facts['cuda']})"
    else:
        where = f"{facts['threads']} threads of {facts['cpu']}"
    commit, _, changed = (facts["commit"] or "").partition("+")
    at = (commit[:7] or "an unknown commit") + " with uncommitted changes" * bool(changed)
    software = f"torch {packages['torch']}, transformers {packages['transformers']}, ftbert at {at}"
    return f"{where}, {facts['dtype']}, {software}"


def heading(title: str, document: dict[str, Any]) -> list[str]:
    facts = document["provenance"]
    kept = {k: v for k, v in facts.items() if k not in ("packages", "clocks")}
    kept |= {name: v for name, v in facts["packages"].items() if v}
    kept |= {f"clock {name}": v for name, v in facts.get("clocks", {}).items()}
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in kept.items())
    return [
        f"<h2>{escape(title)}</h2><p>{escape(machine(facts))}.</p>"
        f"<details><summary>Where these numbers come from</summary><table>{rows}</table></details>"
    ]


def html_table(table: Table) -> str:
    head, rows = table
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(cell_html(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{first}</tr>{body}</table></div>'


def cell_html(cell: str) -> str:
    bold = cell.startswith("**")
    return f"<td{' class=ours' if bold else ''}>{escape(cell.strip('*'))}</td>"


def what_failed(lines: Iterable[str]) -> list[str]:
    items = "".join(f"<li>{escape(line)}</li>" for line in sorted(lines))
    return [f'<details><summary>What could not run</summary><ul class="note">{items}</ul></details>'] if items else []


def encode_section(name: str, document: dict[str, Any]) -> list[str]:
    rows = [
        [r["name"], *("fails" if "failed" in r else f"{r[key]:,.0f}" for key in ("texts_per_s", "tokens_per_s"))]
        for r in document["rows"]
    ]
    busy = document.get("busy", {})
    head = ["", "texts/s", "tokens/s"]
    if busy:
        head.append("GPU busy")
        for row in rows:
            row.append(f"{busy[row[0]]:.0%}" if row[0] in busy else "")
    note = f"{document['texts']:,} texts of {document['tokens']:,} tokens, tokenizing included."
    failed = [f"{r['name']}: {r['failed']}" for r in document["rows"] if "failed" in r]
    parts = heading(f"Texts to vectors: {name}", document)
    return [*parts, f'<p class="note">{note}</p>', html_table((head, rows)), *what_failed(failed)]


def optimize_section(name: str, document: dict[str, Any]) -> list[str]:
    rows = []
    for r in document["rows"]:
        before, after = r["original_ms"], r["optimized_ms"]
        times, off = f"{before / after:.2f}x", f"{r['max_abs_diff']:.0e}"
        rows.append([r["name"], f"{before:,.0f}", f"**{after:,.0f}**", times, off])
    head = ["milliseconds", "original", "optimized", "times as fast", "largest difference"]
    note = f"{document['texts']} ragged texts, one word to two hundred, text to result."
    parts = heading(f"ftbert.optimize: {name}", document)
    return [*parts, f'<p class="note">{note}</p>', html_table((head, rows))]


def gemm_section(name: str, document: dict[str, Any]) -> list[str]:
    rows = []
    for r in document["layers"]:
        first, tuned = r["default_us"], r["tuned_us"]
        rows.append([f"{r['model']}, m={r['m']}", f"{first:.1f}", f"**{tuned:.1f}**", f"{first / tuned:.3f}x"])
    head = ["one layer's products", "cuBLASLt's first, us", "tuned, us", "gain"]
    parts = [*heading(f"Tuned matrix products: {name}", document), html_table((head, rows))]
    whole = []
    for r in document.get("models", []):
        first, guess, table = r["first_ms"], r["guess_ms"], r["table_ms"]
        point = f"{r['model']}, {r['tokens']} tokens"
        whole.append([point, f"{first:.3f}", f"{guess:.3f}", f"**{table:.3f}**", f"{first / table:.3f}x"])
    if whole:
        head = ["the whole model, packed", "cuBLASLt's first, ms", "no table, ms", "table, ms", "gain over the first"]
        parts.append(html_table((head, whole)))
    behind = sorted(r["table_us"] / r["own_us"] for r in document["between"])
    if behind:
        parts.append(
            f'<p class="note">What runs at {len(behind)} random m takes {statistics.median(behind):.3f} (median), '
            f"{behind[-1]:.3f} (worst) of the time that tuning for just that m gives; "
            f"{sum(ratio <= 1.02 for ratio in behind)} are within 2 %.</p>"
        )
    return parts
