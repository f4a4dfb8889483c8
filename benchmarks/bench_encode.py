"""Texts to vectors, tokenizing included, against sentence-transformers on the same texts, device and dtype.

    python benchmarks/bench_encode.py --model FOLDER --texts FILE... --device cuda --dtype fp16

FILE: .txt with a text a line, or STS-B's .csv (both sentences of every line). All get the texts in the same order and
sort them as they like; they take turns, and their vectors are compared before they are timed: who differs from
sentence-transformers, or raises, is a row that says so, and the exit status is 1. On a GPU the share of the time is
given in which at least one kernel runs. Of a model2vec folder the package model2vec is a peer too, with which the
others are compared: sentence-transformers counts unknown tokens.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from machine import DTYPES, attempt, gpu_events, log, provenance, results_file, write  # noqa: E402

import ftbert  # noqa: E402
from ftbert.evaluation import sequences_of  # noqa: E402

Encode = Callable[[list[str]], np.ndarray]
PEERS = {f"sentence-transformers, batch_size={size}": size for size in (32, 256)}
REFERENCE = next(iter(PEERS))  # its default; with its vectors the others' are compared
MODEL2VEC = "model2vec"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--most", type=int, default=0, help="of the texts (default: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/encode-DEVICE-DTYPE.json; "
                        "with --most out/bench-encode-DEVICE-DTYPE.json)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    texts = [text for path in options.texts for text in read(path)]
    texts = texts[: options.most or None]
    device = torch.device(options.device)
    facts = provenance(device, options.dtype, rounds=options.rounds, model=options.model.name)
    out = options.out or results_file(f"encode-{device.type}-{options.dtype}", whole=not options.most)
    model = ftbert.load(options.model, device=device, dtype=options.dtype)
    contestants: dict[str, Encode] = {"ftbert": lambda some: model.encode(some, show_progress_bar=False)}
    contestants |= {name: peer(options, batch_size) for name, batch_size in PEERS.items()}
    if is_model2vec(options.model):
        contestants[MODEL2VEC] = model2vec(options.model)
    document: dict[str, Any] = {
        "provenance": facts, "texts": len(texts), "tokens": sum(map(len, sequences_of(model, texts))),
    }  # fmt: skip
    log(f"{document['texts']} texts, {document['tokens']} tokens")
    reference = MODEL2VEC if MODEL2VEC in contestants else REFERENCE
    rows = compared(contestants, reference, texts[:200], 0.9999 if options.dtype == "fp32" else 0.99)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, encode in contestants.items():
            took = rows[name].get("failed") or attempt(partial(seconds_of, encode, texts))
            if isinstance(took, str):
                rows[name] = {"name": name, "failed": took}
                continue
            seconds[name].append(took)
            median = statistics.median(seconds[name])
            speed = {"texts_per_s": document["texts"] / median, "tokens_per_s": document["tokens"] / median}
            rows[name] |= {"seconds": median} | speed
        document["rows"] = list(rows.values())
        write(out, document)
    print(table(document["rows"]))
    if device.type == "cuda":
        document["busy"] = {}
        for name in [name for name, row in rows.items() if "failed" not in row]:
            share = attempt(partial(busy_share, contestants[name], texts))
            if not isinstance(share, str):
                document["busy"][name] = share
            print(f"{name}: GPU busy {share if isinstance(share, str) else f'{share:.0%}'}")
        write(out, document)
    log(f"wrote {out}")
    return int(any("failed" in row for row in document["rows"]))


def compared(
    contestants: dict[str, Encode], reference: str, sample: list[str], least: float
) -> dict[str, dict[str, Any]]:
    """A row for each, with its least cosine to the reference, which must be at least that."""
    vectors = {name: attempt(partial(encode, sample)) for name, encode in contestants.items()}
    want = vectors[reference]
    rows: dict[str, dict[str, Any]] = {}
    for name, got in vectors.items():
        words = next((words for words in (got, want) if isinstance(words, str)), None)
        cosine = math.nan if words else float((got * want).sum(1).min())
        rows[name] = {"name": name, "least_cosine": cosine}
        if not cosine >= least:
            rows[name] = {"name": name, "failed": words or f"differs from {reference}: least cosine {cosine:.5f}"}
    return rows


def seconds_of(encode: Encode, texts: list[str]) -> float:
    began = time.perf_counter()
    encode(texts)
    return time.perf_counter() - began


def table(rows: list[dict[str, Any]]) -> str:
    best = min((row["seconds"] for row in rows if row["name"] != "ftbert" and "seconds" in row), default=math.nan)
    lines = ["| | texts/s | tokens/s | against the fastest peer |", "|---|---:|---:|---:|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['name']} | failed: {row['failed']} | | |")
        else:
            speed = f"{row['texts_per_s']:,.0f} | {row['tokens_per_s']:,.0f} | {best / row['seconds']:.2f}x"
            lines.append(f"| {row['name']} | {speed} |")
    return "\n".join(lines)


def read(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix != ".csv":
            return [line.strip() for line in file if line.strip()]
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row[column] for row in rows for column in (5, 6)]


def peer(options: argparse.Namespace, batch_size: int) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(options.model), device=options.device)
    model = model.to(DTYPES[options.dtype])
    # numpy has no bfloat16
    return lambda texts: np.asarray(
        model.encode(
            texts, batch_size=batch_size, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        ).float().cpu()
    )  # fmt: skip


def is_model2vec(folder: Path) -> bool:
    path = folder / "config.json"
    return path.exists() and json.loads(path.read_text(encoding="utf-8")).get("model_type") == MODEL2VEC


def model2vec(folder: Path) -> Encode:
    from model2vec import StaticModel

    model = StaticModel.from_pretrained(folder)
    return lambda texts: np.asarray(model.encode(texts, normalize=True))


def busy_share(encode: Encode, texts: list[str]) -> float:
    """Of the time between the first and the last kernel, that in which one runs."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in gpu_events(lambda: encode(texts)))
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return busy / (reached - spans[0][0])


if __name__ == "__main__":
    sys.exit(main())
