"""Models on one GPU and shared by several (parallel="tensor"), in turns, and what their sums over GPUs take.

    python benchmarks/bench_tensor_parallel.py                   Qwen3-8B and BERT-large on every GPU
    python benchmarks/bench_tensor_parallel.py --quick           small models, two ranks on the CPU, a few seconds

Weights and ids are random. A time is that of a call with packed ids on the first GPU, of many in a row. The exit status
is 1 where a case misses its gate (docs/several_gpus.md), or results differ by more than rounding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine  # noqa: F401 - finds ftbert
import torch
from machine import log, provenance, results_file, write
from tensor_parallel_report import lines_of, misses

import ftbert
from ftbert.checkpoint import Checkpoint, CheckpointConfig, ModelConfig, TensorSource
from ftbert.converters import open_checkpoint
from ftbert.dtypes import DTYPES


@dataclass(frozen=True)
class Case:
    """gate: how many times as fast as one GPU two have to be; 0: none."""

    model: str
    dtype: str
    texts: int
    tokens: int
    gate: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype} {self.texts}x{self.tokens}"


CASES = (
    Case("qwen3-8b", "bf16", 1, 32, 1.6), Case("qwen3-8b", "bf16", 8, 128, 1.6),
    Case("bert-large", "fp16", 1, 128), Case("bert-large", "fp16", 32, 384, 1.3),
)  # fmt: skip
QUICK = (Case("small", "fp32", 2, 16),)


class RandomTensors(TensorSource):
    """By shape: layers hold the same numbers, in memory of their own."""

    where = "random weights"

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._shapes, self._dtype = config.weight_shapes(), dtype
        self._made: dict[tuple[bool, tuple[int, ...]], torch.Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(shape) for name, shape in self._shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        key = "norm" in name, tuple(self._shapes[name])
        if key not in self._made:
            random = torch.randn(key[1], dtype=torch.float32).to(self._dtype)
            self._made[key] = torch.ones_like(random) if key[0] else random / max(1, key[1][-1]) ** 0.5
        return self._made[key]


def checkpoint_of(model: str, dtype: str) -> Checkpoint:
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    with torch.device("meta"):
        if model == "qwen3-8b":
            live: Any = Qwen3Model(
                Qwen3Config(
                    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                    num_key_value_heads=8, head_dim=128, vocab_size=151936, use_cache=False,
                )
            )  # fmt: skip
        elif model == "bert-large":
            live = BertModel(
                BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
            )
        else:
            sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            live = BertModel(BertConfig(**sizes))
    opened = open_checkpoint(live)
    config = CheckpointConfig(opened.config.architecture, opened.config.encoder)
    source = RandomTensors(config.encoder, DTYPES[dtype])
    return Checkpoint(config, source, {name: (name,) for name in source.shapes()}, None)


def call_of(model: Any, case: Case) -> Callable[[], torch.Tensor]:
    ids = torch.randint(5, 1000, (case.texts * case.tokens,), generator=torch.Generator().manual_seed(0))
    cu = torch.arange(0, case.texts * case.tokens + 1, case.tokens, dtype=torch.int32)
    ids, cu = ids.to(model.device), cu.to(model.device)
    return lambda: model.forward_packed(ids, cu, case.tokens)  # type: ignore[no-any-return]


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats


def measure(alone: Any, shared: Any, case: Case, rounds: int) -> dict[str, Any]:
    one, several = call_of(alone, case), call_of(shared, case)
    want, got = one().float(), several().float()
    apart = float((got - want).norm() / want.norm())
    for call in (one, several):
        seconds(call, alone.device, 3)  # recorded
    repeats = max(3, int(0.2 / seconds(one, alone.device, 3)))
    taken = [[seconds(call, alone.device, repeats) for call in (one, several)] for _ in range(rounds)]
    one_s, several_s = (statistics.median(way) for way in zip(*taken, strict=True))
    return {
        "case": case.name, "one_ms": 1e3 * one_s, "several_ms": 1e3 * several_s, "times_as_fast": one_s / several_s,
        "gate": case.gate, "difference": apart,
    }  # fmt: skip


def sums_of(shared: Any, case: Case) -> dict[str, Any]:
    """Microseconds of the sums of a call, with residual and norm: of their kernels on the first GPU, where they wait
    for what the other does besides; and of one of many in a row, as all-reduces are measured, its launch included."""
    call = call_of(shared, case)
    seconds(call, shared.device, 5)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:  # type: ignore[no-untyped-call]
        seconds(call, shared.device, 5)
    events = [event for event in found.events() if "all_reduce" in event.name]
    here = [event.self_device_time_total for event in events if event.device_index == shared.device.index]
    in_a_row = [shared.encoder.seconds_of_sum(case.texts * case.tokens) for _ in range(5)]
    return {
        "sums": len(here), "sum_us": statistics.median(here), "least_sum_us": min(here),
        "sum_in_a_row_us": 1e6 * statistics.median(in_a_row),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="with commas (default: every GPU)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small models, two ranks on the CPU; no gate")
    text = "JSON file (default: benchmarks/results/tensor-parallel-cuda.json, with --quick one in out/)"
    parser.add_argument("--out", type=Path, help=text)
    options = parser.parse_args(arguments)
    names = (options.devices or ",".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))).split(",")
    devices = ["cpu", "cpu"] if options.quick else names
    if len(devices) < 2:
        raise SystemExit(f"expected several GPUs, got {devices}; --quick runs on the CPU")
    out = options.out or results_file(f"tensor-parallel-{'cpu' if options.quick else 'cuda'}", whole=not options.quick)
    document: dict[str, Any] = {}
    loaded = ""
    models: tuple[Any, Any] = (None, None)
    for case in QUICK if options.quick else CASES:
        if loaded != case.model:
            models = (None, None)
            checkpoint = checkpoint_of(case.model, case.dtype)
            models = (
                ftbert.load(checkpoint, devices[0], case.dtype),
                ftbert.load(checkpoint, devices, case.dtype, parallel="tensor"),
            )
            loaded = case.model
        alone, shared = models
        if not document:
            document = {
                "provenance": provenance(alone.device, "fp16 and bf16", rounds=options.rounds, devices=devices),
                "parallel": shared.info()["parallel"], "rows": [],
            }  # fmt: skip
        row = measure(alone, shared, case, 2 if options.quick else options.rounds)
        if alone.device.type == "cuda":
            row |= sums_of(shared, case)
        document["rows"].append(row)
        write(out, document)
    print("\n".join(lines_of(document)), document["parallel"], sep="\n\n")
    log(f"wrote {out}")
    missed = [words for row in document["rows"] for words in misses(row)]
    print("\n".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
