"""From which common prefix on rerank is faster with it computed once.

    python benchmarks/bench_shared_prefix.py --device cuda --dtype bf16
    python benchmarks/bench_shared_prefix.py --texts 4 --texts 64 --own 100 --threads 2
    python benchmarks/bench_shared_prefix.py --quick          a tiny model, seconds

Batches of texts of random tokens, as many of their own behind a prefix, through random weights in Qwen3-0.6B's shapes:
token ids on the device in, scores out, whole texts and the prefix once in turns; the median over rounds. On a GPU calls
follow each other, so that the host works ahead. "saved": of the tokens of whole texts. Scores are compared first. The
last lines say what of LEAST (ftbert/text/shared_prefix.py) agrees: where sharing is faster by 2 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from machine import log, provenance, results_file, seconds, write  # noqa: E402

import ftbert  # noqa: E402
from ftbert.text import next_logits  # noqa: E402
from ftbert.text.batching import Batch, pack  # noqa: E402
from ftbert.text.shared_prefix import LEAST, apart  # noqa: E402
from ftbert.text.tokens import tokens_of  # noqa: E402

PREFIXES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 100, 150, 200)
FASTER = 1.02
VOCAB = 4096  # two rows of the table are all that the scores read
IDS = [7, 9]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="as of ftbert.load (default: bf16 on a GPU, fp32 on the CPU)")
    parser.add_argument("--texts", action="append", type=int, help="of a batch, repeatable (default: 2, 8, 64)")
    parser.add_argument("--own", type=int, default=100, help="tokens of a text behind the prefix")
    parser.add_argument("--prefix", action="append", type=int, help="tokens, repeatable (default: 14 from 0 to 200)")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file (default: out/bench-shared-prefix-DEVICE.json)")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("bf16" if torch.device(options.device).type == "cuda" else "fp32")
    options.texts = options.texts or ([3] if options.quick else [2, 8, 64])
    options.prefix = options.prefix or ([0, 9] if options.quick else PREFIXES)
    return options


def random_model(options: argparse.Namespace) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, inter, heads, kv_heads = (64, 96, 2, 1) if options.quick else (1024, 3072, 16, 8)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=inter, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=128, num_hidden_layers=1 if options.quick else options.layers,
        max_position_embeddings=max(options.prefix) + options.own, tie_word_embeddings=True,
    )  # fmt: skip
    return ftbert.load(Qwen3ForCausalLM(config).eval(), device=options.device, dtype=options.dtype)


class Scores:
    """of: a batch whose ids are put on the model's device once. shared: tokens of its first sequence, if it is none."""

    def __init__(self, model: Any, of: Batch, shared: int) -> None:
        ids, cu_seqlens = (torch.from_numpy(one).to(model.device) for one in (of.ids, of.cu_seqlens))
        self.model, self.packed, self.shared = model, (ids, cu_seqlens, of.longest, None), shared

    def __call__(self) -> torch.Tensor:
        with torch.inference_mode():
            return next_logits(self.model, self.packed, IDS, self.shared)


def measure(model: Any, texts: int, prefix: int, options: argparse.Namespace) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, VOCAB, (texts, prefix + options.own))
    ids[:, :prefix] = ids[0, :prefix]
    batch = pack(tokens_of(ids.tolist()), np.arange(texts))
    whole = Scores(model, batch, 0)
    once = Scores(model, apart(batch, prefix), prefix) if prefix else whole
    difference = float((whole() - once()).abs().max() / whole().abs().max())
    repeats = 10 if model.device.type == "cuda" else 1
    times = [[seconds(one, model.device, repeats) for one in (whole, once)] for _ in range(options.rounds)]
    whole_s, once_s = np.median(times, axis=0).tolist()
    tokens = (texts - 1) * prefix
    return {
        "texts": texts, "prefix": prefix, "saved_tokens": tokens, "saved": tokens / batch.ids.size,
        "whole_ms": 1e3 * whole_s, "shared_ms": 1e3 * once_s, "difference": difference,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    model = random_model(options)
    out = options.out or results_file(f"shared-prefix-{model.device.type}", whole=False)
    document: dict[str, Any] = {"provenance": provenance(model.device, options.dtype), "own": options.own, "points": []}
    least = LEAST[model.device.type]
    log("| texts | prefix | saved | whole, ms | once, ms | faster | difference | shared by rerank |")
    for texts in options.texts:
        faster = None
        for prefix in sorted(options.prefix):
            one = measure(model, texts, prefix, options)
            document["points"].append(one)
            write(out, document)
            ratio = one["whole_ms"] / one["shared_ms"]
            chosen = 0 < one["saved_tokens"] >= max(least.tokens, least.part * texts * (prefix + options.own))
            times = f"{one['whole_ms']:.3f} | {one['shared_ms']:.3f} | {ratio:.2f}"
            saved = f"{one['saved_tokens']} ({one['saved']:.1%})"
            log(f"| {texts} | {prefix} | {saved} | {times} | {one['difference']:.1e} | {'yes' if chosen else ''} |")
            faster = (faster or one) if prefix and ratio > FASTER else None
        said = f"from {faster['saved_tokens']} tokens ({faster['saved']:.1%}) on" if faster else "nowhere"
        asked = f"LEAST has {least.tokens} tokens and {least.part:.0%}"
        print(f"{texts} texts: the prefix once is faster {said}; {asked}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
