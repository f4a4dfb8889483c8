"""What results of bench_decode.py and bench_serve_generation.py say: tables, which gates are met, what is a failure.
Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from result_pages import markdown

LLAMA_CPP, OURS = "llama.cpp q8_0", "ftbert "
Q8_0 = f"{OURS}q8_0"
FTBERT, SERVER = "ftbert serve", "llama.cpp's server"
Document = dict[str, Any]


def label(row: dict[str, Any]) -> str:
    texts = f", {row['batch']} texts" if row["batch"] > 1 else ""
    return f"{'tokens behind' if row['generate'] else 'prompt of'} {row['tokens']:,}{texts}"


def lines_of(document: Document) -> Iterator[str]:
    """A Markdown table of tokens/s; in brackets the share of a copy's bandwidth."""
    names = [name for name, facts in document["peers"].items() if not {"failed", "left_out"} & facts.keys()]
    rows = []
    for row in document["rows"]:
        cells = []
        for name in names:
            found = row["peers"].get(name)
            share = f" ({found['share']:.0%})" if found and "share" in found else ""
            cells.append(f"{found['tokens_s']:,.1f}{share}" if found else "")
        rows.append([label(row), *cells])
    head = [f"{document['model']}, tokens/s (share of {document['copy_gbs']:,.0f} GB/s)", *names]
    yield from markdown((head, rows)).splitlines()
    for name, facts in document["peers"].items():
        for key, words in (("failed", "failed"), ("left_out", "left out")):
            if key in facts:
                yield f"{name} {words}: {facts[key]}"


def gates(document: Document) -> Iterator[str]:
    """Each as met or missed, where the run has both of its sides."""
    for words, value, limit, at_least in _gates(document):
        met = value >= limit if at_least else value <= limit
        yield f"{'met' if met else 'missed'}: {words}: {value:.4g}, {'at least' if at_least else 'at most'} {limit:g}"


def failures(document: Document) -> Iterator[str]:
    """Of our own: what others cannot do is no failure of the run."""
    for name, facts in document["peers"].items():
        if name.startswith(OURS) and "failed" in facts:
            yield f"{name}: {facts['failed']}"


def _gates(document: Document) -> Iterator[tuple[str, float, float, bool]]:
    """(what is compared, its value, the limit, whether the value has to reach it)."""
    on_gpu, model = document["provenance"]["device"] == "cuda", document["model"]
    alone = {row["tokens"]: row["peers"] for row in document["rows"] if row["generate"] and row["batch"] == 1}
    for tokens, peers in alone.items():
        for words, ratio in _ratio(peers, f"{model}, tokens behind {tokens:,}"):
            yield words, ratio, 1.3 if on_gpu else 0.9, True
    if not on_gpu:
        return
    if model.startswith("smollm2") and alone:
        for name, cells in min(alone.items())[1].items():
            if name.startswith(OURS):
                yield f"{model}, {name}, ms a token", cells["ms"], 0.35, False
        return
    for name, cells in alone.get(448, {}).items():
        if name.startswith(OURS):
            yield f"{name}, share of copy bandwidth behind 448", cells["share"], 0.75 if name == Q8_0 else 0.8, True
    for row in document["rows"]:
        mine = {name: cells for name, cells in row["peers"].items() if name.startswith(OURS)}
        if row["generate"] and row["batch"] > 1:
            for name, cells in mine.items():
                if single := alone.get(row["tokens"], {}).get(name):
                    words = f"{name}, step of {row['batch']} texts to that of one"
                    yield words, cells["ms"] / single["ms"], 1.5, False
        if not row["generate"] and row["tokens"] == 512:
            for name, cells in mine.items():
                if products := document["products_ms"].get("512"):
                    yield f"{name}, prompt of 512 to its products", cells["ms"] / products, 1.25, False
            for words, ratio in _ratio(row["peers"], "prompt of 512"):
                yield words, ratio, 2.5, True


def _ratio(peers: dict[str, Any], where: str) -> Iterator[tuple[str, float]]:
    """Ours in Q8_0 to llama.cpp's."""
    if Q8_0 in peers and LLAMA_CPP in peers:
        yield f"{where}, {Q8_0} to {LLAMA_CPP}", peers[Q8_0]["tokens_s"] / peers[LLAMA_CPP]["tokens_s"]


def of_page(document: dict[str, Any]) -> list[str]:
    return [*lines_of(document), "", *(f"- {line}" for line in gates(document))]


def written_lines(document: Document) -> Iterator[str]:
    """Of bench_serve_generation: tokens/s of all streams, and the longest of a hundred waits for a token."""
    rows = []
    for row in document["rows"]:
        ours, theirs = row[FTBERT], row[SERVER]
        speeds, gaps = ([f"{one[name]:,.0f}" for one in (ours, theirs)] for name in ("tokens_per_s", "gap_p99_ms"))
        rows.append([str(row["streams"]), *speeds, f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f}x", *gaps])
    head = [f"{name}, {what}" for what in ("tokens/s", "p99 ms a token") for name in (FTBERT, SERVER)]
    yield markdown((["streams", *head[:2], "times as fast", *head[2:]], rows))
    first = ", ".join(f"{name} {value:,.0f} ms" for name, value in document["first_ms"].items())
    yield f"\nFirst token behind {document['provenance']['first']} tokens: {first}."
