"""The result files as one page, as charts, and as the tables of README and docs.

    python benchmarks/report.py            writes benchmarks/results/index.html, *.svg, and the tables between marks
    python benchmarks/report.py --check    says whether the tables are what the results give

Reads benchmarks/results/{cuda,cpu}-*.json (bench_model; NAME-base.json, NAME-large.json, ... are parts of one run, on
several GPUs of one host), kernels-*.json, encode-*.json, optimize-*.json and gemm_table-*.json.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks")]

from charts import Series, bars, dots, stacks  # noqa: E402
from sections import (  # noqa: E402
    Table,
    encode_section,
    gemm_section,
    heading,
    html_table,
    machine,
    optimize_section,
    what_failed,
)

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "speed.md")
BASE = "transformers (sdpa)"
OTHER_TYPE = "ftbert, packed, bf16"  # in a run in fp16
LIMITS = {"fp32": 1e-3, "fp16": 64 * 2.0**-10, "bf16": 64 * 2.0**-7}  # of errors: those of peers.py, without torch
ALIKE = (  # facts of the parts of one run
    "commit", "cpu", "gpu", "driver", "cuda", "gemm_table", "dtype", "packages", "threads", "rest", "rounds",
)  # fmt: skip
MANY = 24  # points; of more, docs/benchmarks.md shows these, with the means over all, and the page draws dots
SHOWN_POINTS = (
    "base 1x128 full", "base 8x128 half", "base 32x128 full", "base 32x128 half", "base 32x512 full",
    "base 32x512 half", "base 128x128 half", "large 1x128 full", "large 32x128 half", "large 32x512 full",
    "minilm 1x128 full", "minilm 32x128 half", "minilm 32x512 full",
)  # fmt: skip
# README's two tables: rows and columns.
SUMMARY_POINTS = {
    "cuda": (
        "base 1x128 full", "base 32x128 half", "base 32x512 full", "large 32x512 full", "minilm 1x128 full",
        "minilm 32x128 half",
    ),
    "cpu": ("base 16x128 ragged", "minilm 32x128 full"),
}  # fmt: skip
SUMMARY_PEERS = {
    "cuda": ("ftbert, packed", BASE, "nn.TransformerEncoder fast path", "packed PyTorch, CUDA graph"),
    "cpu": ("ftbert", BASE, "torch.compile", "onnxruntime", "OpenVINO", "CTranslate2"),
}
STYLE = """
:root { color-scheme: light dark; --edge: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; margin: .5rem 0 1.5rem; }
td, th { border-bottom: 1px solid var(--edge); padding: .2rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.ours { font-weight: 650; } .note { opacity: .75; font-size: 13px; } .wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; color: CanvasText !important; margin: 1rem 0; }
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    differ = []
    for path in PAGES:
        old = path.read_text(encoding="utf-8")
        if (new := fill_marks(old, path)) != old:
            differ.append(path.name)
            if not options.check:
                path.write_text(new, encoding="utf-8")
    if options.check:
        print(f"{', '.join(differ)}: not what the results give: run benchmarks/report.py" if differ else "up to date")
        return int(bool(differ))
    (RESULTS / "index.html").write_text(page(), encoding="utf-8")
    print(f"wrote {RESULTS / 'index.html'}")
    return 0


def load(pattern: str) -> dict[str, Any]:
    """Result documents by file name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))}


def load_runs(pattern: str) -> dict[str, Any]:
    """Documents of bench_model by the name of the run, with the `files` that they came from. ValueError where parts of
    one run are of different commits, machines or packages, or were measured in another way."""
    runs: dict[str, Any] = {}
    for stem, document in load(pattern).items():
        name, facts = re.sub("-(minilm|base|large)$", "", stem), document["provenance"]
        run = runs.setdefault(name, {"provenance": facts, "results": [], "files": []})
        for key in ALIKE:
            if facts.get(key) != run["provenance"].get(key):
                raise ValueError(f"{stem}: its {key} is {facts.get(key)}, that of the run {run['provenance'].get(key)}")
        run["results"] += document["results"]
        run["files"].append(stem)
    return runs


# ---- README and docs -----------------------------------------------------------------------------------------------


def fill_marks(text: str, page: Path = PAGES[0]) -> str:
    """`<!-- results: NAME -->` ... `<!-- end -->` is replaced by the table of results/NAME.json, between
    `<!-- summary: NAME... -->` and the end come chosen rows of several runs on one kind of device, and between
    `<!-- split: NAME -->` and the end comes where ftbert's time goes at the points that a profiler saw."""

    def table(match: re.Match[str]) -> str:
        document = load_runs(f"{match[1]}*.json")[match[1]]
        line, results = machine_line(document, page), document["results"]
        tables = [model_table(document, results)]
        if len(results) > MANY:
            by_name = {point_name(result): result for result in results}
            shown = [by_name[name] for name in SHOWN_POINTS if name in by_name]
            tables = [model_table(document, shown), means_table(document)]
        body = "\n\n".join(map(markdown, tables))
        return f"<!-- results: {match[1]} -->\n{line}\n\n{body}\n<!-- end -->"

    def split(match: re.Match[str]) -> str:
        document = load_runs(f"{match[1]}*.json")[match[1]]
        body = markdown(split_table(document["results"]))
        return f"<!-- split: {match[1]} -->\n{machine(document['provenance'])}.\n\n{body}\n<!-- end -->"

    def summary(match: re.Match[str]) -> str:
        names = match[1].split()
        body = markdown(summary_table({name: load_runs(f"{name}*.json")[name] for name in names}))
        return f"<!-- summary: {match[1]} -->\n{body}\n<!-- end -->"

    text = re.sub(r"<!-- summary: (.+?) -->.*?<!-- end -->", summary, text, flags=re.S)
    text = re.sub(r"<!-- results: (\S+) -->.*?<!-- end -->", table, text, flags=re.S)
    return re.sub(r"<!-- split: (\S+) -->.*?<!-- end -->", split, text, flags=re.S)


def machine_line(document: dict[str, Any], page: Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    links = [f"[{file}.json]({up}benchmarks/results/{file}.json)" for file in document["files"]]
    return f"{machine(document['provenance'])}: {', '.join(links)}"


def summary_table(runs: dict[str, Any]) -> Table:
    """Milliseconds of chosen points and peers; the fastest of each row bold. A column of peers of several types
    ("OpenVINO fp32", "OpenVINO bf16") has one name; what differs in its numbers (int8) is left out."""
    device = next(iter(runs)).partition("-")[0]
    rows = []
    for run, document in runs.items():
        by_name = {point_name(result): result for result in document["results"]}
        facts = document["provenance"]
        where = f"{instructions(run, facts)}, {facts['dtype']}, " if device == "cpu" else ""
        for point in SUMMARY_POINTS[device]:
            peers = {name: row["ms"] for name, row in by_name[point]["peers"].items() if "ms" in row}
            peers = {name: ms for name, ms in peers.items() if label(document, name) == name}
            column = [
                next((ms for name, ms in peers.items() if name in (peer, f"{peer} fp32", f"{peer} bf16")), None)
                for peer in SUMMARY_PEERS[device]
            ]
            best = min(ms for ms in column if ms is not None)
            texts = ["" if ms is None else f"{ms:.3g}" if ms < 100 else f"{ms:.0f}" for ms in column]
            cells = [f"**{text}**" if ms == best else text for ms, text in zip(column, texts, strict=True)]
            rows.append([where + point, *cells])
    return ["milliseconds", *SUMMARY_PEERS[device]], rows


def instructions(run: str, facts: dict[str, Any]) -> str:
    """The CPU with the instructions that its run had: the run's name says tiles, the file AVX2 or AVX-512."""
    cpu = re.sub(r"\(R\)| Processor", "", facts["cpu"]).replace("Intel ", "")
    return f"{cpu}, {'AMX' if 'amx' in run else facts['cpu_capability'].replace('AVX512', 'AVX-512')}"


def markdown(table: Table) -> str:
    head, rows = table
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def point_name(result: dict[str, Any]) -> str:
    return f"{result['model']} {shape_name(result)}"


def shape_name(result: dict[str, Any]) -> str:
    return f"{result['batch']}x{result['longest']} {result['fill_name']}"


def peers_of(document: dict[str, Any]) -> list[str]:
    """Those that ran at some point, ours first."""
    names = dict.fromkeys(n for r in document["results"] for n, row in r["peers"].items() if "ms" in row)
    return list(names)


def is_ours(peer: str) -> bool:
    """In the run's type."""
    return peer.startswith("ftbert") and peer != OTHER_TYPE


def has_rested(document: dict[str, Any]) -> bool:
    return any("rested_ms" in row for result in document["results"] for row in result["peers"].values())


def is_replayed(peer: str) -> bool:
    """What the host launches kernel by kernel takes longer after a rest: the host's, not the GPU's."""
    return peer.startswith("ftbert") or "CUDA graph" in peer


def our_ms(result: dict[str, Any]) -> float:
    """The least of our ways; 0 where none ran."""
    return min((row["ms"] for name, row in result["peers"].items() if is_ours(name) and "ms" in row), default=0.0)


def model_table(document: dict[str, Any], results: Iterable[dict[str, Any]]) -> Table:
    """Milliseconds at these points, in brackets those of a rested GPU where that is what counts; the fastest of each
    row bold, among those that compute the same."""
    names = peers_of(document)
    labels = {name: label(document, name) for name in names}
    rows = []
    for result in results:
        times = {name: result["peers"].get(name, {}).get("ms") for name in names}
        same = (name for name in names if labels[name] == name and name != OTHER_TYPE)
        best = min((ms for name in same if (ms := times[name])), default=None)
        cells = []
        for name, ms in times.items():
            none = "fails" if name in result["peers"] else ""  # a part of the run may be without that peer
            text = none if ms is None else f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"
            text = f"**{text}**" if ms is not None and ms == best else text
            rested = result["peers"].get(name, {}).get("rested_ms")
            cells.append(f"{text} ({rested:.3g})" if rested and is_replayed(name) else text)
        rows.append([point_name(result), f"{result['tokens']:,}", *cells])
    return [f"milliseconds{' (rested)' * has_rested(document)}", "tokens", *labels.values()], rows


def split_table(results: Iterable[dict[str, Any]]) -> Table:
    """Where ftbert's time goes and what its products could not go below."""
    some = [result for result in results if "split_ms" in result]
    kinds = [kind for kind in dict.fromkeys(k for r in some for k in r["split_ms"]) if kind != "gemm"]
    rows = []
    for result in some:
        parts, floor, ms = result["split_ms"], result.get("gemm_floor_ms"), our_ms(result)
        times = f"{ms / floor:.2f}" if ms and floor else ""
        cells = [ms or None, floor, parts["gemm"], *(parts.get(kind, 0.0) for kind in kinds)]
        rows.append([point_name(result), times, *("" if cell is None else f"{cell:.3f}" for cell in cells)])
    return ["milliseconds", "times the floor", "all", "floor: products alone", "products", *kinds], rows


def means_table(document: dict[str, Any]) -> Table:
    """How many times as fast as each peer ours are: geometric means over the points where both ran, with their number
    where one did not."""
    results = document["results"]
    half = [result for result in results if result["fill_name"] == "half"]
    alone = [result for result in results if result["batch"] == 1]
    rows, names = [], peers_of(document)
    pairs = [(one, peer) for one in names if is_ours(one) for peer in names if not peer.startswith("ftbert")]
    pairs += [(OTHER_TYPE, "ftbert, packed")] if OTHER_TYPE in names else []
    for one, peer in pairs:
        for rested in (False, True) if has_rested(document) and is_replayed(peer) else (False,):
            cells = []
            for some in (results, half, alone):
                cells.append(mean([ratio(result, peer, one, rested) for result in some]))
            rows.append([f"{one}, against {label(document, peer)}" + ", rested" * rested, *cells])
    counts = f"all {len(results)} points", f"{len(half)} half full", f"{len(alone)} of batch 1"
    return ["times as fast, geometric means", *counts], rows


def host_table(document: dict[str, Any]) -> Table:
    """What a call keeps the host busy for, medians over the points where it was measured."""
    rows, names = [], peers_of(document)
    for model in dict.fromkeys(result["model"] for result in document["results"]):
        some = [result["peers"] for result in document["results"] if result["model"] == model]
        found = [[peers[name]["host_us"] for peers in some if "host_us" in peers.get(name, {})] for name in names]
        rows.append([model, *(f"{statistics.median(us):.0f}" if us else "" for us in found)])
    return ["", *names], rows


def ratio(result: dict[str, Any], slow: str, fast: str, rested: bool = False) -> float | None:
    """Time by time; None where one did not run. rested: of the rested GPU where that was timed, which is where it is
    another."""
    pair = [result["peers"].get(name, {}) for name in (slow, fast)]
    times = [row.get("rested_ms", row.get("ms")) if rested else row.get("ms") for row in pair]
    return times[0] / times[1] if all(times) else None


def label(document: dict[str, Any], peer: str) -> str:
    """The peer's name, with its error where it was timed and does not compute what the others do."""
    limit = LIMITS["bf16" if peer == OTHER_TYPE else document["provenance"]["dtype"]]
    rows = [r["peers"].get(peer, {}) for r in document["results"]]
    off = [error for row in rows if "ms" in row and not (error := row.get("max_abs_diff", 0.0)) <= limit]
    return f"{peer} (off by {max(off):.2g})" if off else peer


# ---- the page ------------------------------------------------------------------------------------------------------


def page() -> str:
    parts = ["<h1>ftbert, measured</h1>", "<p>Generated from the files beside it by <code>benchmarks/report.py</code>. "
             "Times are medians; peers take turns in one process; every output is compared with float32 transformers "
             "before it is timed; tokens are valid tokens.</p>"]  # fmt: skip
    for name, document in (load_runs("cuda-*.json") | load_runs("cpu-*.json")).items():
        parts += model_section(name, document)
    for name, document in load("kernels-*.json").items():
        parts += kernel_section(name, document)
    for name, document in load("encode-*.json").items():
        parts += encode_section(name, document)
    for name, document in load("optimize-*.json").items():
        parts += optimize_section(name, document)
    for name, document in load("gemm_table-*.json").items():
        parts += gemm_section(name, document)
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ftbert, measured</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def chart(name: str, svg: str) -> str:
    (RESULTS / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
    return svg


def model_section(name: str, document: dict[str, Any]) -> list[str]:
    results, names = document["results"], peers_of(document)
    parts = heading(f"The whole model: {name}", document)
    for model in dict.fromkeys(result["model"] for result in results):
        some = [result for result in results if result["model"] == model]
        if len(some) > MANY:
            some.sort(key=lambda r: (r["batch"], r["fill_name"], r["longest"]))
        speed = {label(document, peer): [ratio(r, BASE, peer) for r in some] for peer in names if peer != BASE}
        title = f"{model}: times as fast as transformers (sdpa)"
        parts.append(chart(f"{name}-{model}-speed", points_chart(title, some, speed, "x", 1.0)))
        means = [f"{peer} {mean(values)}" for peer, values in speed.items() if any(values)]
        parts.append(f'<p class="note">Geometric means over these points: {escape(", ".join(means))}.</p>')
        split = [r for r in some if "split_ms" in r]
        if split:
            kinds = list(dict.fromkeys(kind for r in split for kind in r["split_ms"]))
            shares = {kind: [r["split_ms"].get(kind) for r in split] for kind in kinds}
            title = f"{model}: where ftbert's time goes"
            parts.append(chart(f"{name}-{model}-split", stacks(title, [shape_name(r) for r in split], shares)))
        if all("gemm_floor_ms" in r and "byte_floor_ms" in r for r in some):
            ours = [our_ms(r) for r in some]
            floors = {
                "matrix products alone": [
                    100 * r["gemm_floor_ms"] / t if t else None for r, t in zip(some, ours, strict=True)
                ],
                "bytes alone": [100 * r["byte_floor_ms"] / t if t else None for r, t in zip(some, ours, strict=True)],
            }
            title = f"{model}: floors as a share of ftbert's time (100 %: nothing left to gain)"
            parts.append(chart(f"{name}-{model}-floor", points_chart(title, some, floors, " %")))
    table = html_table(model_table(document, results))
    if len(results) > MANY:
        table = f"{html_table(means_table(document))}<details><summary>Every point</summary>{table}</details>"
    parts.append(table)
    if any("host_us" in row for r in results for row in r["peers"].values()):
        parts.append("<p>Host time of a call, microseconds, where the GPU takes less than a millisecond:</p>")
        parts.append(html_table(host_table(document)))
    failed = {
        f"{point_name(r)}: {peer}: {row['failed']}"
        for r in results
        for peer, row in r["peers"].items()
        if "failed" in row
    }
    failed |= {f"{point_name(r)}: {r['failed']}" for r in results if "failed" in r}
    return [*parts, *what_failed(failed)]


def points_chart(
    title: str, results: Sequence[dict[str, Any]], series: Series, unit: str, line_at: float | None = None
) -> str:
    """Bars; dots where there are many points, which then are in order."""
    if len(results) <= MANY:
        return bars(title, [shape_name(r) for r in results], series, unit, line_at)
    groups = groupby(results, lambda r: (r["batch"], r["fill_name"]))
    named = [(f"batch {batch}, {fill}", [str(r["longest"]) for r in some]) for (batch, fill), some in groups]
    return dots(f"{title}, by batch, fill and longest sequence", named, series, unit, line_at)


def mean(ratios: Sequence[float | None]) -> str:
    """The geometric one of those that there are, with their number where that is not all; "" where there is none."""
    logs = [math.log(value) for value in ratios if value]
    count = f" ({len(logs)} ran)" if len(logs) < len(ratios) else ""
    return f"{math.exp(sum(logs) / len(logs)):.2f}x{count}" if logs else ""


def kernel_section(name: str, document: dict[str, Any]) -> list[str]:
    found, speed = document["rows"], document["speed"]
    groups = [f"{r['name']}, {r['batch']}x{r['seq']}" for r in found]
    gains = [None if "failed" in r else r["torch_cold"] / r["cold"] for r in found]
    rows = []
    for group, gain, r in zip(groups, gains, found, strict=True):
        if gain is None:
            rows.append([group, "fails", "", "", "", f"{r['floor_us']:.1f}", ""])
            continue
        cold, torch_cold, warm, torch_warm, floor = (
            f"{r[key]:.1f}" for key in ("cold", "torch_cold", "warm", "torch_warm", "floor_us")
        )
        rows.append([group, f"**{cold}**", torch_cold, f"**{warm}**", torch_warm, floor, f"{gain:.2f}x"])
    note = (
        f"A copy moves {speed['bytes'] / 1e9:,.0f} GB/s here, torch's best large product makes "
        f"{speed['flops'] / 1e12:.1f} TFLOP/s; the floor is the larger of the two times. Cold: operands in no cache."
    )
    head = ["microseconds", "cold", "torch, cold", "warm", "torch, warm", "floor", "times torch"]
    svg = bars("Kernels: times as fast as torch, cold", groups, {"ftbert": gains}, "x", 1.0)
    parts = heading(f"Kernels: {name}", document)
    failed = [f"{group}: {r['failed']}" for group, r in zip(groups, found, strict=True) if "failed" in r]
    return [*parts, f'<p class="note">{note}</p>', chart(name, svg), html_table((head, rows)), *what_failed(failed)]


if __name__ == "__main__":
    sys.exit(main())
