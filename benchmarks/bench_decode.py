"""Prompts and generation of Llama-shaped decoders: ftbert, llama.cpp, transformers, and compiled PyTorch.

    python benchmarks/bench_decode.py --device cuda --llama-cpp FOLDER [--out FILE]
    python benchmarks/bench_decode.py --threads 2 --llama-cpp FOLDER --gguf SmolLM2-135M-Instruct.Q8_0.gguf
    python benchmarks/bench_decode.py --quick                 a tiny model on the CPU, a few seconds

Every peer computes the same GGUF file in Q8_0, that of --gguf or random weights in Llama-2-7B's shapes (written to
--folder); peers in 16 or 32 bits its dequantised weights. llama.cpp: the programs of build_llama_cpp.sh. All peers take
turns in every round; a time is the median over rounds. A step gives each text one more token; llama.cpp's chooses none,
compiled PyTorch's host reads none, ftbert's ids are read after each. "share": of the bandwidth of a large copy in this
run, for the bytes that a step must read, weights and cache. Logits behind a prompt and behind a further token are
compared with transformers' first; llama-bench shows none. The file is written after every round. Gates are printed as
met or missed; the picture is decode_chart.py's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from decode_models import SHAPES, Shape, shape_of, transformers_model, write_random  # noqa: E402
from decode_peers import Q8_0_BYTES, Ftbert, Peer, PlainTorch, Texts, Transformers  # noqa: E402
from decode_report import failures, gates, lines_of  # noqa: E402
from llama_cpp import NAME as LLAMA_CPP  # noqa: E402
from llama_cpp import Case, LlamaCpp  # noqa: E402
from machine import (  # noqa: E402
    attempt,
    bandwidth,
    log,
    median_seconds,
    provenance,
    results_file,
    seconds,
    write,
)

WARM = 2  # steps
# Of logits, normalised mean squares against transformers' in the run's type.
LIMITS = {"fp32": 1e-6, "bf16": 1e-2, "q8_0": 1e-2}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of the CPU (default: torch's)")
    parser.add_argument("--shape", choices=SHAPES, help="of random weights (default: llama-2-7b on a GPU, smollm2-135m "
                        "on the CPU, tiny with --quick)")  # fmt: skip
    parser.add_argument("--gguf", type=Path, help="a model of the architecture llama in Q8_0 instead")
    parser.add_argument("--folder", type=Path, default=ROOT / "out", help="where random weights are written")
    parser.add_argument("--llama-cpp", type=Path, help="folder of llama-bench and llama-batched-bench")
    parser.add_argument("--dtype", action="append", help="of ftbert, repeatable (default: q8_0, bf16; CPU: q8_0, fp32)")
    parser.add_argument("--context", action="append", type=int, help="repeatable (default: 0, 448, 3968; CPU: 0, 448)")
    parser.add_argument("--prompt", action="append", type=int, help="repeatable (default: 512, 2048; CPU: 512)")
    parser.add_argument("--batch", type=int, default=8, help="texts of the case of several")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/decode-DEVICE-SHAPE.json, "
                        "with --quick or without llama.cpp out/bench-decode-...)")  # fmt: skip
    options = parser.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    options.shape = options.shape or ("tiny" if options.quick else "llama-2-7b" if on_gpu else "smollm2-135m")
    small, many = ([0, 24], [16]), ([0, 448, 3968], [512, 2048]) if on_gpu else ([0, 448], [512])
    contexts, prompts = small if options.quick else many
    options.context, options.prompt = options.context or contexts, options.prompt or prompts
    options.dtype = options.dtype or ["q8_0", "bf16" if on_gpu else "fp32"]
    if options.quick:
        options.rounds, options.steps, options.batch = 2, 4, min(options.batch, 3)
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The context of several texts is the largest below 1,024."""
    middle = max((one for one in options.context if one < 1024), default=0)
    return [
        *(Case(True, 1, context) for context in options.context), Case(True, options.batch, middle),
        *(Case(False, 1, prompt) for prompt in options.prompt),
    ]  # fmt: skip


class Bench:
    def __init__(self, options: argparse.Namespace, path: Path, shape: Shape) -> None:
        self.options, self.shape, self.device = options, shape, torch.device(options.device)
        self.cases, self.times = cases_of(options), dict[tuple[str, Case], list[float]]()
        self.peers: dict[str, Peer] = {}
        self.rows: dict[str, dict[str, Any]] = {}  # by peer
        self.generator = torch.Generator().manual_seed(0)
        base = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = transformers_model(path, self.device, base)
        makers: dict[str, Callable[[], Peer]] = {"transformers": lambda: Transformers(model, self.device)}
        if self.device.type == "cuda" or options.quick:
            name = "PyTorch, compiled" if self.device.type == "cuda" else "PyTorch"
            makers[name] = lambda: PlainTorch(model, self.device)
        for dtype in options.dtype:
            source = path if dtype == "q8_0" else model
            makers[f"ftbert {dtype}"] = partial(Ftbert, source, self.device, dtype)
        for name, make in makers.items():
            log(f"making {name}")
            self.add(name, attempt(make))
        self.llama = self.llama_cpp(path)

    def llama_cpp(self, path: Path) -> LlamaCpp | None:
        folder = self.options.llama_cpp
        if folder is None:
            self.rows[LLAMA_CPP] = {"left_out": "no --llama-cpp"}
            return None
        self.rows[LLAMA_CPP] = {}
        return LlamaCpp(folder, path, self.device.type, torch.get_num_threads())

    def add(self, name: str, peer: Peer | str) -> None:
        """Where its logits are transformers'."""
        if isinstance(peer, str):
            self.rows[name] = {"failed": peer}
            return
        *prompt, token = torch.randint(self.shape.vocab, (6,), generator=torch.Generator().manual_seed(1)).tolist()
        positions = self.room(self.cases[0].tokens)  # as of a case: nothing is compiled for this alone
        found = attempt(lambda: peer.logits(prompt, token, positions).double())
        if isinstance(found, str):
            self.rows[name] = {"failed": found}
            return
        if not self.peers:
            self.want = found
        error = float((found - self.want).square().mean() / self.want.square().mean())
        limit = LIMITS.get(name.split()[-1], LIMITS["bf16" if self.device.type == "cuda" else "fp32"])
        self.rows[name] = {"weight_bytes": peer.weight, "cached_bytes": peer.cached, "error": error}
        if error <= limit:
            self.peers[name] = peer
        else:
            self.rows[name]["failed"] = f"logits differ from transformers': {error:.1e}, at most {limit:.0e}"

    def room(self, tokens: int) -> int:
        """Positions of a cache: for the step that `start` takes too, and one that ftbert has launched and not read, so
        that as many are launched between the clock's two readings as are counted."""
        return max(tokens, 1) + WARM + self.options.steps + 2

    def prompts(self, case: Case) -> list[list[int]]:
        """No text is empty: behind 0 tokens a text begins with its first."""
        size = (case.batch, max(case.tokens, 1))
        return torch.randint(self.shape.vocab, size, generator=self.generator).tolist()

    def round(self) -> None:
        """Everyone once through all cases."""
        if self.llama is not None:
            found = attempt(partial(self.llama.seconds, self.cases, self.options.steps))
            if isinstance(found, str):
                self.rows[LLAMA_CPP], self.llama = {"failed": found}, None
            else:
                for case, taken in found.items():
                    self.times.setdefault((LLAMA_CPP, case), []).append(taken)
                self.rows[LLAMA_CPP] = {"weight_bytes": Q8_0_BYTES, "cached_bytes": 2, **self.llama.facts}
        for case in self.cases:
            prompts = self.prompts(case)
            for name in list(self.peers):
                taken = attempt(partial(self.time, self.peers[name], case, prompts))
                if isinstance(taken, str):
                    self.rows[name]["failed"] = f"{case.label}: {taken}"
                    del self.peers[name]
                else:
                    self.times.setdefault((name, case), []).append(taken)

    def time(self, peer: Peer, case: Case, prompts: list[list[int]]) -> float:
        """Seconds of a prompt, or of a step. A cache is made for the case alone: those of all would fill a GPU."""
        steps = self.options.steps
        texts: Texts = peer.texts(case.batch, self.room(case.tokens))
        texts.start(prompts, alone=not case.generate)
        if not case.generate:
            return seconds(lambda: texts.start(prompts, alone=True), self.device)
        for _ in range(WARM):
            texts.step()

        def all_steps() -> None:
            for _ in range(steps):
                texts.step()

        return seconds(all_steps, self.device) / steps

    def products(self) -> dict[str, float]:
        """Milliseconds of a prompt's products in 16 bits alone, the head's for one row not counted."""
        found, dtype = {}, torch.bfloat16
        for rows in self.options.prompt if self.device.type == "cuda" else ():
            layer = 0.0
            for n, k in self.shape.matrices:
                x, *weights = (torch.randn(m, k, device=self.device, dtype=dtype) for m in (rows, n, n, n, n))
                layer += median_seconds(partial(_products, x, weights), self.device) / len(weights)
            found[str(rows)] = 1e3 * layer * self.shape.layers
        return found

    def document(self, facts: dict[str, Any], copy: float, products: dict[str, float]) -> dict[str, Any]:
        rows = [
            {"generate": case.generate, "batch": case.batch, "tokens": case.tokens, "peers": self.found(case, copy)}
            for case in self.cases
        ]
        names = [name for name, shape in SHAPES.items() if shape == self.shape]
        return {
            "provenance": facts, "copy_gbs": copy / 1e9, "model": names[0] if names else self.options.gguf.name,
            "shape": asdict(self.shape), "steps": self.options.steps, "products_ms": products, "peers": self.rows,
            "rows": rows,
        }  # fmt: skip

    def found(self, case: Case, copy: float) -> dict[str, dict[str, float]]:
        """By peer."""
        cells = {}
        for name, facts in self.rows.items():
            if not (times := self.times.get((name, case))) or "failed" in facts:
                continue
            taken, tokens = statistics.median(times), case.batch * (1 if case.generate else case.tokens)
            cells[name] = {"ms": 1e3 * taken, "tokens_s": tokens / taken, "spread": max(times) / min(times) - 1}
            if case.generate:
                context = case.tokens + self.options.steps / 2
                read = self.shape.step_bytes(context, case.batch, facts["weight_bytes"], facts["cached_bytes"])
                cells[name]["share"] = read / taken / copy
        return cells


def _products(x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for one in weights:
        x @ one.T  # noqa: B018


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device, path = torch.device(options.device), options.gguf
    shape = shape_of(path) if path else SHAPES[options.shape]
    if path is None:
        options.folder.mkdir(parents=True, exist_ok=True)
        path = write_random(options.folder / f"{options.shape}.Q8_0.gguf", shape)
    name = f"decode-{device.type}-{'real' if options.gguf else options.shape}"
    out = options.out or results_file(name, not options.quick and options.llama_cpp is not None)
    facts, copy = provenance(device, "+".join(options.dtype)), bandwidth(device)
    log(f"copy {copy / 1e9:,.0f} GB/s")
    bench = Bench(options, path, shape)
    products = bench.products()
    for count in range(options.rounds):
        bench.round()
        facts["rounds"] = count + 1  # done: the run may be ended before the last
        write(out, bench.document(facts, copy, products))
        log(f"round {count + 1} of {options.rounds}")
    document = bench.document(facts, copy, products)
    print("\n".join(("", *lines_of(document), "", *gates(document))))
    words = list(failures(document))
    for word in words:
        print(f"FAILED {word}")
    log(f"wrote {out}")
    return int(bool(words))


if __name__ == "__main__":
    sys.exit(main())
