"""Whether generation's memory stays: 1,000 prompts, then 10,000 tokens.

    python benchmarks/soak_generation.py [--device cuda] [--gguf FILE] [--prompts 1000] [--tokens 10000]

A random Llama, or a GGUF file's model. Prompts of 1 to 64 ids come in calls of ten, greedy and drawn, with room for
four at a time; then texts are as long as the model's context allows. After each call, and every 100 tokens of a text,
the process' resident memory is read, on a GPU also what its allocator has given out and what the GPU holds. From a
quarter of the readings on none may grow by more than --most MiB. A text's cache is one allocation, of which a CPU's
system gives a page when it is first written. The pages that the text has written so far are not counted.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from decode_models import Shape, shape_of, write_random  # noqa: E402

import ftbert  # noqa: E402
from ftbert.decoding.options import Options  # noqa: E402
from ftbert.decoding.texts import Started  # noqa: E402

MIB = 1 << 20
RANDOM = Shape(layers=4, hidden=256, heads=4, kv_heads=2, inter=512, vocab=2048, context=16384)
PER_CALL, LONGEST, ROOM = 10, 64, 4


def memory(device: torch.device) -> dict[str, int]:
    """Bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    found = {"resident": pages * 4096}
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info(device)
        found |= {"allocated": torch.cuda.memory_allocated(device), "GPU": whole - free}
    return found


def growth(seen: Sequence[dict[str, int]]) -> dict[str, int]:
    """From a quarter of the readings on: the most above the first of them."""
    first, *rest = seen[len(seen) // 4 :]
    return {key: max([one[key] - value for one in rest], default=0) for key, value in first.items()}


def prompts(model: Any, vocab: int, count: int) -> Iterator[dict[str, int]]:
    """Memory after each call."""
    for call in range(-(-count // PER_CALL)):
        random.seed(call)
        ids = [[random.randrange(vocab) for _ in range(random.randint(1, LONGEST))] for _ in range(PER_CALL)]
        drawn = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": call} if call % 2 else {}
        model.generate_ids(ids, max_new_tokens=random.randint(1, 12), batch_size=ROOM, **drawn)
        gc.collect()
        yield memory(model.device)


def text(model: Any, shape: Shape, tokens: int) -> tuple[int, list[dict[str, int]]]:
    """How many tokens came, and the memory every 100 of them and when the text has ended and its cache is gone."""
    seen, count = list[dict[str, int]](), 0
    written = 2 * 4 * shape.layers * shape.kv_width if model.device.type == "cpu" else 0  # a token
    for _ in Started(model, [[1]], Options(max_new_tokens=tokens)).tokens():
        if count % 100 == 0:
            seen.append(memory(model.device))
            seen[-1]["resident"] -= count * written
        count += 1
    gc.collect()
    return count, [*seen, memory(model.device)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--most", type=float, default=16, help="MiB of growth")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = options.gguf or write_random(Path(folder, "random.gguf"), RANDOM)
        shape, model = shape_of(path), ftbert.load(path, device=options.device, dtype=options.dtype)
    most = options.most * MIB
    words = list(_judge(f"{options.prompts} prompts", growth(list(prompts(model, shape.vocab, options.prompts))), most))
    left, after = options.tokens, list[dict[str, int]]()
    while left > 0:
        tokens = min(left, shape.context - 1)
        count, (*within, ended) = text(model, shape, tokens)
        words += _judge(f"a text of {count} tokens", growth(within), most)
        left, after = left - max(count, 1), [*after, ended]
    if len(after) > 1:
        words += _judge(f"after {len(after)} texts", growth(after), most)
    for word in words:
        print(f"FAILED {word}")
    return int(bool(words))


def _judge(what: str, grown: dict[str, int], most: float) -> Iterator[str]:
    print(f"{what}: " + ", ".join(f"{key} {size / MIB:+.1f} MiB" for key, size in grown.items()), flush=True)
    yield from (f"{what}: {key} grew by {size / MIB:.1f} MiB" for key, size in grown.items() if size > most)


if __name__ == "__main__":
    sys.exit(main())
