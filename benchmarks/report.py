"""The tables of README and docs from the result files.

    python benchmarks/report.py            writes the tables between marks
    python benchmarks/report.py --check    says whether the tables are what the results give

Reads benchmarks/results/{cuda,cpu}-*.json of bench_model; NAME-base.json, NAME-large.json, ... are parts of one run, on
several GPUs of one host. int8-accuracy.json is int8_accuracy.py's, norm-*.json bench_norm.py's, norm-training-*.json
bench_norm_training.py's, decode-*.json bench_decode.py's, tensor-parallel-*.json bench_tensor_parallel.py's,
replicas-*.json bench_replicas.py's, max-sim-*.json bench_max_sim.py's, serve-generation-*.json
bench_serve_generation.py's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import decode_report
import norm_tables
import norm_training_report
import replicas_report
import tensor_parallel_report
from result_pages import Table, markdown

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_DOCS = ("benchmarks.md", "embed.md", "speed.md", "serving.md", "norm.md", "generation.md", "several_gpus.md")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in _DOCS))
BASE = "transformers (sdpa)"
PACKED = "ftbert, packed"
# Ours in a run of another type, fp16, fp8 or int8, and what it is beside.
OTHER_TYPES = {
    f"{PACKED}, bf16": PACKED, f"{PACKED}, 16 bits": PACKED, "ftbert, fp32": "ftbert", "ftbert, bf16": "ftbert",
}  # fmt: skip
# Of errors: those of peers.py, without torch.
LIMITS = {"fp32": 1e-3, "fp16": 64 * 2.0**-10, "bf16": 64 * 2.0**-7, "fp8": 2.0, "int8": 2.0}
ALIKE = (  # facts of the parts of one run
    "commit", "cpu", "gpu", "driver", "cuda", "gemm_table", "dtype", "packages", "threads", "rest", "rounds",
)  # fmt: skip
MANY = 24  # points; of more, docs/benchmarks.md shows these, with the means over all
SHOWN_POINTS = (
    "base 1x128 full", "base 8x128 half", "base 32x128 full", "base 32x128 half", "base 32x512 full",
    "base 32x512 half", "base 128x128 half", "large 1x128 full", "large 32x128 half", "large 32x512 full",
    "minilm 1x128 full", "minilm 32x128 half", "minilm 32x512 full",
)  # fmt: skip
# README's rows: the run, a point where it is not the mean over all of them, our way.
HEADLINES = (
    ("cuda-fp16", None, PACKED),
    ("cuda-fp16-deberta", None, PACKED),
    ("cpu-fp32", "base 16x128 ragged", "ftbert"),
    ("cpu-fp32", "base 16x128 full", "ftbert"),
)
MODELS = {"deberta": "DeBERTa-v3-base"}
# Tables of chosen points: rows and columns, by the run where it has its own, else by the device.
SUMMARY_POINTS = {
    "cuda": (
        "base 1x128 full", "base 32x128 half", "base 32x512 full", "large 32x512 full", "minilm 1x128 full",
        "minilm 32x128 half",
    ),
    "cuda-bf16-modern": (
        "modernbert 1x128 full", "modernbert 32x128 half", "modernbert 32x512 full", "modernbert 8x2048 half",
        "modernbert 2x8192 full", "qwen3 1x128 full", "qwen3 32x128 half", "qwen3 32x512 full",
        "qwen3 8x2048 half",
    ),
    "cuda-fp8": (
        "base 1x128 full", "base 32x128 half", "base 32x512 full", "large 32x384 full", "large 32x384 half",
        "large 64x384 mlperf",
    ),
    "cpu": ("base 16x128 ragged", "minilm 32x128 full"),
}  # fmt: skip
SUMMARY_PEERS = {
    "cuda": ("ftbert, packed", BASE, "nn.TransformerEncoder fast path", "packed PyTorch, CUDA graph"),
    "cuda-bf16-modern": (
        "ftbert, packed, recorded", "packed PyTorch compiled as a whole, CUDA graph", "packed PyTorch, CUDA graph",
        "packed PyTorch, cuDNN attention, CUDA graph",
    ),
    "cuda-fp8": (
        PACKED, f"{PACKED}, 16 bits", "packed PyTorch, fp8 scales of tensors, CUDA graph",
        "packed PyTorch, fp8 scales of rows, CUDA graph", "packed PyTorch, 16 bits, CUDA graph",
    ),
    "cpu": ("ftbert", BASE, "torch.compile", "onnxruntime", "OpenVINO", "CTranslate2"),
}  # fmt: skip


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
    print(f"wrote the tables of {', '.join(differ)}" if differ else "up to date")
    return 0


def load_runs(pattern: str) -> dict[str, Any]:
    """Documents of bench_model by the name of the run, with the `files` that they came from. ValueError where parts of
    one run are of different commits, machines or packages, or were measured in another way."""
    runs: dict[str, Any] = {}
    for path in sorted(RESULTS.glob(pattern)):
        document = json.loads(path.read_text(encoding="utf-8"))
        name, facts = re.sub("-(minilm|base|large)$", "", path.stem), document["provenance"]
        run = runs.setdefault(name, {"provenance": facts, "results": [], "files": []})
        for key in ALIKE:
            mine, other = facts.get(key), run["provenance"].get(key)
            if mine != other:
                raise ValueError(f"{path.stem}: its {key} is {mine}, that of the run {other}")
        run["results"] += document["results"]
        run["files"].append(path.stem)
    return runs


def _paragraph(lines: Iterable[str]) -> str:
    return "\n\n" + "\n".join(lines)


# By mark, what follows the line about the machine.
OF_ONE_FILE: dict[str, Callable[[dict[str, Any]], str]] = {
    "served": lambda document: (
        f"; client processes: {document['provenance']['clients']}\n\n{markdown(serve_table(document))}"
    ),
    "accuracy": lambda document: f"\n\n{markdown(accuracy_table(document['models']))}",
    "norms": lambda document: f"\n\n{norm_tables.markdown_of(document, summary=True)}",
    "norm-training": lambda document: "".join(
        _paragraph(norm_training_report.lines_of(result)) for result in document["results"]
    ),
    "decode": lambda document: _paragraph(decode_report.of_page(document)),
    "max-sim": lambda document: f"\n\n{markdown(max_sim_table(document))}",
    "written": lambda document: _paragraph(decode_report.written_lines(document)),
    "ranks": lambda document: _paragraph(tensor_parallel_report.of_page(document)),
    "replicas": lambda document: _paragraph(replicas_report.lines_of(document)),
}


def fill_marks(text: str, page: Path = PAGES[0]) -> str:
    """`<!-- results: NAME -->` ... `<!-- end -->` is replaced by the table of results/NAME.json, between
    `<!-- headline -->` and the end come the means of HEADLINES, between `<!-- summary: NAME... -->` and the end chosen
    rows of several runs on one kind of device, and between
    `<!-- split: NAME -->` and the end comes where ftbert's time goes at the points that a profiler saw; OF_ONE_FILE has
    the marks of other benchmarks' results."""

    def table(match: re.Match[str]) -> str:
        document = load_runs(f"{match[1]}*.json")[match[1]]
        line, results = machine_line(document, page), document["results"]
        by_name = {point_name(result): result for result in results}
        shown = [by_name[name] for name in SHOWN_POINTS if name in by_name] if len(results) > MANY else results
        dtype = document["provenance"]["dtype"]
        tables = [model_table(document, shown)]
        tables += [means_table(document)] * (dtype == "fp8" or len(results) > MANY)
        tables += [errors_table(document), *energy_tables(document, shown)] if dtype in ("fp8", "int8") else []
        body = "\n\n".join(map(markdown, tables))
        return f"<!-- results: {match[1]} -->\n{line}\n\n{body}\n<!-- end -->"

    def split(match: re.Match[str]) -> str:
        document = load_runs(f"{match[1]}*.json")[match[1]]
        body = markdown(split_table(document["results"]))
        return f"<!-- split: {match[1]} -->\n{machine(document['provenance'])}.\n\n{body}\n<!-- end -->"

    def summary(match: re.Match[str]) -> str:
        runs = {name: load_runs(f"{name}*.json")[name] for name in match[1].split()}
        body = markdown(summary_table(runs))
        facts = next(iter(runs.values()))["provenance"]
        if facts["dtype"] == "fp8":
            body = f"One {facts['gpu']}, fp8: the layers' products in E4M3, everything else in 16 bits.\n\n{body}"
        return f"<!-- summary: {match[1]} -->\n{body}\n<!-- end -->"

    def one_file(match: re.Match[str]) -> str:
        document = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8")) | {"files": [match[2]]}
        body = f"{machine_line(document, page)}{OF_ONE_FILE[match[1]](document)}"
        return f"<!-- {match[1]}: {match[2]} -->\n{body}\n<!-- end -->"

    def headline(match: re.Match[str]) -> str:
        return f"<!-- headline -->\n{markdown(headline_table())}\n<!-- end -->"

    text = re.sub(rf"<!-- ({'|'.join(OF_ONE_FILE)}): (\S+) -->.*?<!-- end -->", one_file, text, flags=re.S)
    text = re.sub(r"<!-- headline -->.*?<!-- end -->", headline, text, flags=re.S)
    text = re.sub(r"<!-- summary: (.+?) -->.*?<!-- end -->", summary, text, flags=re.S)
    text = re.sub(r"<!-- results: (\S+) -->.*?<!-- end -->", table, text, flags=re.S)
    return re.sub(r"<!-- split: (\S+) -->.*?<!-- end -->", split, text, flags=re.S)


def machine(facts: dict[str, Any]) -> str:
    packages = facts["packages"]
    if "gpu" in facts:
        count = len(facts.get("devices", ())) or facts.get("replicas", "").count("cuda:") or "One"
        where = f"{count} {facts['gpu']} (driver {facts['driver']}, CUDA {facts['cuda']})"
    else:
        where = f"{facts['threads']} threads of {facts['cpu']}"
    commit, _, changed = (facts["commit"] or "").partition("+")
    at = (commit[:7] or "an unknown commit") + " with uncommitted changes" * bool(changed)
    software = f"torch {packages['torch']}, transformers {packages['transformers']}, ftbert at {at}"
    return f"{where}, {facts['dtype']}, {software}"


def machine_line(document: dict[str, Any], page: Path) -> str:
    up = "../" * len(page.relative_to(ROOT).parent.parts)
    links = [f"[{file}.json]({up}benchmarks/results/{file}.json)" for file in document["files"]]
    return f"{machine(document['provenance'])}: {', '.join(links)}"


def headline_table() -> Table:
    """How many times as fast our way is, of the same type: as the strongest peer, and as transformers."""
    rows = []
    for name, point, ours in HEADLINES:
        document = load_runs(f"{name}*.json")[name]
        facts = document["provenance"]
        results = [result for result in document["results"] if point in (None, point_name(result))]

        def times(peer: str, results: list[Any] = results, ours: str = ours) -> str:
            return mean([ratio(result, peer, ours) for result in results])

        names = (peer for peer in peers_of(document) if not is_ours(peer) and not is_other_type(peer))
        right = [peer for peer in names if label(document, peer) == peer and times(peer)]
        strongest = min(right, key=lambda peer: float(times(peer).partition("x")[0]))
        where = facts.get("gpu") or f"{facts['threads']} threads of {instructions(name, facts)}"
        models = list(dict.fromkeys(result["model"] for result in results))
        of = f"{MODELS.get(models[0], models[0])}, " if len(models) == 1 else ""
        over = f"{of}mean of {len(results)} points" if point is None else point
        rows.append([f"{where}, {facts['dtype']}, {over}", f"{times(strongest)} {strongest}", times(BASE)])
    return ["times as fast as", "the strongest peer", BASE], rows


def summary_table(runs: dict[str, Any]) -> Table:
    """Milliseconds of chosen points and peers; the fastest of each row bold. A column of peers of several types
    ("OpenVINO fp32", "OpenVINO bf16") has one name; what differs in its numbers is left out, so int8
    but in a run of that."""
    first = next(iter(runs))
    device = first.partition("-")[0]
    columns, rows = SUMMARY_PEERS.get(first, SUMMARY_PEERS[device]), []
    for run, document in runs.items():
        by_name = {point_name(result): result for result in document["results"]}
        facts = document["provenance"]
        where = f"{instructions(run, facts)}, {facts['dtype']}, " if device == "cpu" else ""
        points = SUMMARY_POINTS.get(run, SUMMARY_POINTS[device])
        for point in points if run != "cuda-fp8" else [name for name in points if name in by_name]:
            peers = {name: row["ms"] for name, row in by_name[point]["peers"].items() if "ms" in row}
            peers = {name: ms for name, ms in peers.items() if label(document, name) == name}
            types = ("int8",) if facts["dtype"] == "int8" else ("fp32", "bf16")
            column = [
                next((ms for name, ms in peers.items() if name in (peer, *(f"{peer} {type}" for type in types))), None)
                for peer in columns
            ]
            best = min(ms for ms in column if ms is not None)
            texts = ["" if ms is None else f"{ms:.3g}" if ms < 100 else f"{ms:.0f}" for ms in column]
            cells = [f"**{text}**" if ms == best else text for ms, text in zip(column, texts, strict=True)]
            rows.append([where + point, *cells])
    used = [0, *(i for i in range(1, len(columns) + 1) if any(row[i] for row in rows))]
    return [["milliseconds", *columns][i] for i in used], [[row[i] for i in used] for row in rows]


def instructions(run: str, facts: dict[str, Any]) -> str:
    """The CPU with the instructions that its run had: the run's name says tiles, the file AVX2 or AVX-512."""
    cpu = re.sub(r"\(R\)| Processor", "", facts["cpu"]).replace("Intel ", "")
    return f"{cpu}, {'AMX' if 'amx' in run else facts['cpu_capability'].replace('AVX512', 'AVX-512')}"


def serve_table(document: dict[str, Any]) -> Table:
    """Of bench_serve. A share of `encode` where clients send as fast as they are answered, milliseconds from the time
    that a request was due where they come at random; "answered": not refused with 429."""
    rows = []
    for row in [*document["closed"], *document["open"]]:
        load = f", {row['load']:g} of the maximum" if "load" in row else ""
        answered = 100 * row["statuses"].get("200", 0) / max(1, sum(row["statuses"].values()))
        rows.append([
            f"{row['texts']}, {row['texts_per_request']} a request{load}", f"{row['texts_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}", f"{row['of_encode']:.2f}" if "of_encode" in row else "",
            f"{row['p50_ms']:.1f}", f"{row['p99_ms']:.1f}", f"{answered:.0f} %",
        ])  # fmt: skip
    return ["", "texts/s", "tokens/s", "of encode", "p50 ms", "p99 ms", "answered"], rows


def max_sim_table(document: dict[str, Any]) -> Table:
    """Of bench_max_sim: ours as in the turns with the first peer, and each peer's time by ours in its own turns."""
    by_point: dict[str, dict[str, Any]] = {}
    for row in document["rows"]:
        by_point.setdefault(f"{row['queries']} x {row['documents']:,}", {})[row["peer"]] = row
    peers = list(dict.fromkeys(row["peer"] for row in document["rows"]))
    rows = []
    for point, found in by_point.items():
        times = [f"{found[peer]['ratio']:.2f}x" if "ratio" in found.get(peer, {}) else "" for peer in peers]
        rows.append([point, f"{1e3 * found[peers[0]]['ours_ms']:,.0f}", *times])
    return ["queries x documents", "ftbert, us", *peers], rows


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
    return peer.startswith("ftbert") and peer not in OTHER_TYPES


def is_other_type(peer: str) -> bool:
    return peer in OTHER_TYPES or "16 bits" in peer


def has_rested(document: dict[str, Any]) -> bool:
    return any("rested_ms" in row for result in document["results"] for row in result["peers"].values())


def is_replayed(peer: str) -> bool:
    """What the host launches kernel by kernel takes longer after a rest: the host's, not the GPU's."""
    return peer.startswith("ftbert") or "CUDA graph" in peer


def our_ms(result: dict[str, Any]) -> float:
    """The least of our ways; 0 where none ran."""
    return min((row["ms"] for name, row in result["peers"].items() if is_ours(name) and "ms" in row), default=0.0)


def model_table(document: dict[str, Any], results: Iterable[dict[str, Any]]) -> Table:
    """Milliseconds at these points, in brackets the times of a rested GPU where they were measured. Bold: the fastest
    of each row among peers that compute the same."""
    names = peers_of(document)
    labels = {name: label(document, name) for name in names}
    rows = []
    for result in results:
        times = {name: result["peers"].get(name, {}).get("ms") for name in names}
        same = (name for name in names if labels[name] == name and not is_other_type(name))
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
    """How many times as fast as each peer ours are: geometric means over the points where both ran. The number of
    points stands beside a mean that leaves some out."""
    results = document["results"]
    half = [result for result in results if result["fill_name"] == "half"]
    alone = [result for result in results if result["batch"] == 1]
    rows, names = [], peers_of(document)
    pairs = [(one, peer) for one in names if is_ours(one) for peer in names if not peer.startswith("ftbert")]
    for other, mine in OTHER_TYPES.items():
        pairs += [(other, mine) if document["provenance"]["dtype"] == "fp16" else (mine, other)] * (other in names)
    for one, peer in pairs:
        for rested in (False, True) if has_rested(document) and is_replayed(peer) else (False,):
            cells = []
            for some in (results, half, alone):
                cells.append(mean([ratio(result, peer, one, rested) for result in some]))
            rows.append([f"{one}, against {label(document, peer)}" + ", rested" * rested, *cells])
    counts = f"all {len(results)} points", f"{len(half)} half full", f"{len(alone)} of batch 1"
    return ["times as fast, geometric means", *counts], rows


def errors_table(document: dict[str, Any]) -> Table:
    """What each peer is off by from transformers in float32, at the worst of a model's points."""
    names, results, rows = peers_of(document), document["results"], []
    for model in dict.fromkeys(result["model"] for result in results):
        cells = []
        for name in names:
            found = [r["peers"][name] for r in results if r["model"] == model and "ms" in r["peers"].get(name, {})]
            worst = [max((row[key] for row in found), default=None) for key in ("rms_diff", "max_abs_diff")]
            cells.append("" if worst[0] is None else f"{worst[0]:.2g} ({worst[1]:.2g})")
        rows.append([model, *cells])
    return ["root mean square of differences (largest)", *names], rows


def energy_tables(document: dict[str, Any], results: Iterable[dict[str, Any]]) -> list[Table]:
    """Millijoules a token, where a run measured them."""
    names, rows = peers_of(document), []
    for result in results:
        spent = [result["peers"].get(name, {}).get("sustained", {}).get("mj_per_token") for name in names]
        if any(spent):
            rows.append([point_name(result), *("" if mj is None else f"{mj:.3g}" for mj in spent)])
    return [(["millijoules a token", *names], rows)] if rows else []


def accuracy_table(models: Iterable[dict[str, Any]]) -> Table:
    """Of int8_accuracy: vectors of sentences beside those of float32, and what that does to their order."""
    rows = []
    for model in models:
        for name, row in model["rows"].items():
            if "failed" not in row:
                cells = f"{row['mean_cosine']:.5f}", f"{row['worst_cosine']:.4f}", f"{row['spearman_delta']:+.4f}"
                rows.append([f"{model['name']}, {name}", *cells])
    return ["vectors of STS-B's sentences", "mean cosine", "worst", "Spearman, from float32"], rows


def mean(ratios: Sequence[float | None]) -> str:
    """The geometric one of those that there are, with their number where that is not all; "" where there is none."""
    logs = [math.log(value) for value in ratios if value]
    count = f" ({len(logs)} ran)" if len(logs) < len(ratios) else ""
    return f"{math.exp(sum(logs) / len(logs)):.2f}x{count}" if logs else ""


def ratio(result: dict[str, Any], slow: str, fast: str, rested: bool = False) -> float | None:
    """Time by time; None where one did not run. rested: of the rested GPU where that was timed, which is where it is
    another."""
    pair = [result["peers"].get(name, {}) for name in (slow, fast)]
    times = [row.get("rested_ms", row.get("ms")) if rested else row.get("ms") for row in pair]
    return times[0] / times[1] if all(times) else None


def label(document: dict[str, Any], peer: str) -> str:
    """The peer's name, with its error where it was timed and does not compute what the others do."""
    limit = LIMITS["bf16" if is_other_type(peer) else document["provenance"]["dtype"]]
    rows = [r["peers"].get(peer, {}) for r in document["results"]]
    off = [error for row in rows if "ms" in row and not (error := row.get("max_abs_diff", 0.0)) <= limit]
    return f"{peer} (off by {max(off):.2g})" if off else peer


if __name__ == "__main__":
    sys.exit(main())
