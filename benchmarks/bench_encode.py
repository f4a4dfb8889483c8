"""Texts to vectors, tokenizing included, against sentence-transformers on the same texts, device and dtype.

    python benchmarks/bench_encode.py --model FOLDER --texts FILE... --device cuda --dtype fp16

FILE: .txt with a text a line, or STS-B's .csv (both sentences of every line). All get the texts in the same order and
sort them as they like; they take turns, and their vectors are compared before they are timed. On a GPU the share of
the time is given in which at least one kernel runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from machine import DTYPES, gpu_events, log, provenance  # noqa: E402

import ftbert  # noqa: E402
from ftbert.token_batches import sequences_of  # noqa: E402

Encode = Callable[[list[str]], np.ndarray]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers folder")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--most", type=int, default=0, help="of the texts (default: all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/encode-DEVICE-DTYPE.json)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    texts = [text for path in options.texts for text in read(path)]
    texts = texts[: options.most or None]
    device = torch.device(options.device)
    model = ftbert.load(options.model, device=device, dtype=options.dtype)
    contestants: dict[str, Encode] = {"ftbert": lambda some: model.encode(some, show_progress_bar=False)}
    for batch_size in (32, 256):
        contestants[f"sentence-transformers, batch_size={batch_size}"] = peer(options, batch_size)

    sample = texts[:200]
    vectors = {name: encode(sample) for name, encode in contestants.items()}
    least = min(float((vectors["ftbert"] * other).sum(1).min()) for other in vectors.values())
    if not least > (0.9999 if options.dtype == "fp32" else 0.99):
        raise SystemExit(f"the vectors differ: least cosine {least:.5f}")
    tokens = sum(map(len, sequences_of(model, texts)))
    log(f"{len(texts)} texts, {tokens} tokens, least cosine to the others {least:.6f}")

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, encode in contestants.items():
            began = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - began)
    rows: list[dict[str, Any]] = []
    print("| | texts/s | tokens/s | against sentence-transformers |\n|---|---:|---:|---:|")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(took for name, took in medians.items() if name != "ftbert")
    for name, took in medians.items():
        rows.append({"name": name, "seconds": took, "texts_per_s": len(texts) / took, "tokens_per_s": tokens / took})
        print(f"| {name} | {len(texts) / took:,.0f} | {tokens / took:,.0f} | {best / took:.2f}x |")
    document: dict[str, Any] = {
        "provenance": provenance(device, options.dtype, rounds=options.rounds, model=options.model.name),
        "texts": len(texts), "tokens": tokens, "least_cosine": least, "rows": rows,
    }  # fmt: skip
    if device.type == "cuda":
        document["busy"] = {name: busy_share(encode, texts) for name, encode in contestants.items()}
        print("\n" + ", ".join(f"{name}: GPU busy {share:.0%}" for name, share in document["busy"].items()))
    out = options.out or ROOT / "benchmarks" / "results" / f"encode-{device.type}-{options.dtype}.json"
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


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
