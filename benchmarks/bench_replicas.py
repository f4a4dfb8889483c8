"""Texts to vectors on a single GPU and on several of the same process, in turns: what part of their joint speed is
reached.

    python benchmarks/bench_replicas.py                          BERT-base in fp16 on every GPU, texts of 200 tokens
    python benchmarks/bench_replicas.py --quick                  a small model, two replicas on the CPU, a few seconds

Weights and texts are random: nothing is read from a network. What the host tokenises in the same run is a row of its
own: GPUs cannot compute more than that. The exit status is 1 below --least of one GPU's texts/s for each GPU, or where
vectors differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import log, provenance, results_file, write  # noqa: E402
from replicas_report import lines_of  # noqa: E402

import ftbert  # noqa: E402
from ftbert.replicas import replicate  # noqa: E402
from ftbert.text import tokenizer_of  # noqa: E402
from ftbert.text.ahead import ahead  # noqa: E402
from ftbert.text.batching import windows_of  # noqa: E402
from ftbert.text.wordpiece import WordPiece  # noqa: E402

BASE: dict[str, Any] = {}  # transformers' own defaults
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 20000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:*", help="with commas (default: every GPU)")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16", "fp8"), default="fp16")
    parser.add_argument("--texts", type=int, default=40000)
    parser.add_argument("--tokens", type=int, default=200, help="of a text, special ones included (default 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.95, help="(default 0.95: of two GPUs 1.9 times one's)")
    parser.add_argument("--quick", action="store_true", help="two replicas of a small model on the CPU; no gate")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/replicas-cuda-DTYPE.json; "
                        "with --quick out/bench-replicas-cpu-fp32.json)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.quick:
        options.dtype, options.texts, options.rounds, options.least = "fp32", min(options.texts, 300), 2, 0.0
    with tempfile.TemporaryDirectory(prefix="ftbert-") as folder:
        make_folder(Path(folder), SMALL if options.quick else BASE)
        alone, together = load(Path(folder), options)
        return measure(alone, together, options)


def load(folder: Path, options: argparse.Namespace) -> tuple[Any, Any]:
    """The model on one device, and the same with all replicas."""
    if options.quick:
        return ftbert.load(folder), replicate(ftbert.load(folder), [torch.device("cpu")])
    places = options.devices if options.devices == "cuda:*" else options.devices.split(",")
    together = ftbert.load(folder, places, options.dtype)
    if len(together.devices) < 2:
        raise SystemExit(f"expected several GPUs, got {together.devices[0]}; --quick runs on the CPU")
    return together.to(together.device), together


def measure(alone: Any, together: Any, options: argparse.Namespace) -> int:
    texts = make_texts(options.texts, options.tokens)
    count, name = len(together.devices), together.device.type
    out = options.out or results_file(f"replicas-{name}-{options.dtype}", whole=not options.quick)
    where = together.info()["replicas"]
    document: dict[str, Any] = {
        "provenance": provenance(together.device, options.dtype, rounds=options.rounds, replicas=where),
        "texts": len(texts), "tokens": sum(map(len, tokenizer_of(alone).encode_batch(texts))),
        "tokenizer": tokenizer_name(alone),
    }  # fmt: skip
    log(f"{document['texts']} texts, {document['tokens']} tokens; {where}")
    one, all_of_them = (model.encode(texts, show_progress_bar=False) for model in (alone, together))
    document["least_cosine"] = float((one * all_of_them).sum(1).min())
    tokenizer = tokenizer_of(alone)
    ways: dict[str, Callable[[], Any]] = {
        "one": lambda: alone.encode(texts, show_progress_bar=False),
        f"all {count}": lambda: together.encode(texts, show_progress_bar=False),
        "the host's tokenizer alone": lambda: deque(
            ahead(windows_of(texts), lambda some: tokenizer.tokens(some, "", None)), maxlen=0
        ),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - began)
        medians = {way: statistics.median(taken) for way, taken in seconds.items()}
        document["rows"] = [
            {"name": way, "seconds": took, "texts_per_s": len(texts) / took, "tokens_per_s": document["tokens"] / took,
             "times_one": medians["one"] / took}
            for way, took in medians.items()
        ]  # fmt: skip
        write(out, document)
    document["batches"] = batches_of_each(together, texts)
    write(out, document)
    print("\n".join(lines_of(document)))
    log(f"wrote {out}")
    reached = document["rows"][1]["times_one"] >= options.least * count
    return int(not (reached and document["least_cosine"] > 0.999))


def tokenizer_name(model: Any) -> str:
    """The package."""
    return "tokenizers" if WordPiece.of(tokenizer_of(model).backend) is None else "nanotoken"


def batches_of_each(model: Any, texts: list[str]) -> dict[str, int]:
    """How many batches each replica computed in one more call."""
    found: Counter[str] = Counter()

    def counted(name: str, forward: Callable[..., Any], *given: Any, **more: Any) -> Any:
        found[name] += 1
        return forward(*given, **more)

    for place, replica in enumerate(model.replicas):
        replica.forward_packed = partial(counted, f"{replica.device} ({place})", replica.forward_packed)
    model.encode(texts, show_progress_bar=False)
    for replica in model.replicas:
        del replica.forward_packed
    return dict(sorted(found.items()))


def word(number: int) -> str:
    """Different ones of 2 to 7 letters."""
    letters = "".join(chr(97 + (number // 26**place) % 26) for place in range(4))
    return letters[: 2 + number % 3] + letters[::-1][: number % 4] + f"{'qzxvk'[number % 5]}"


def make_folder(folder: Path, sizes: dict[str, Any]) -> None:
    """A random BERT with a tokenizer whose words are made up."""
    from transformers import BertConfig, BertModel, BertTokenizerFast  # type: ignore[attr-defined]

    vocabulary = [*SPECIAL, *dict.fromkeys(word(number) for number in range(WORDS))]
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(vocabulary), initializer_range=0.1, **sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)


def make_texts(count: int, tokens: int) -> list[str]:
    rng = random.Random(0)
    known = [word(number) for number in range(WORDS)]
    return [" ".join(rng.choices(known, k=tokens - 2)) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
