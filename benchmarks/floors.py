"""What a forward pass cannot go below, and where its time goes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from machine import DTYPES, bandwidth, cpu_product, gpu_events
from peers import Call

# The first whose pattern is in a kernel's name.
PARTS = {
    "attention": r"attention|flash|fmha|softmax",
    "products with layernorm": r"norm_gemm",
    "layernorm": r"layer_?norm|bias_input",
    "activation": r"bias_act|gelu",
    "gemm": r"gemm|nvjet|cutlass|xmma|splitk|cublas",
    "memory": r"memcpy|memset|restore|stage|copy",
}
_bandwidth: dict[torch.device, float] = {}


def byte_floor(reference: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds in which every weight is read once, and the tokens' embeddings read and results written, at the speed of
    a copy. What layers hand to each other may stay in a cache and is not counted."""
    size, c = torch.empty((), dtype=dtype).element_size(), reference.config
    weights = sum(p.numel() for name, p in reference.named_parameters() if "embeddings" not in name)
    if device not in _bandwidth:
        _bandwidth[device] = bandwidth(device)
    return (weights + 2 * tokens * c.hidden_size) * size / _bandwidth[device]


def gemm_floor(reference: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of the layers' matrix products alone: on a GPU the best of what cuBLASLt proposes and of our own, with a
    weight matrix of its own for each; on the CPU the best of what torch carries (`cpu_product`)."""
    c = reference.config
    if device.type != "cuda":
        sizes = [(3 * c.hidden_size, c.hidden_size), (c.hidden_size, c.hidden_size),
                 (c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)]  # fmt: skip
        return float(c.num_hidden_layers * sum(cpu_product(tokens, n, k, dtype) for n, k in sizes))
    from ftbert.gemm_table import tuner_module
    from ftbert.tuning import Bench, products_of_shape, without_layernorm

    names = {value: name for name, value in DTYPES.items()}
    layer = 0.0
    m = tuner_module().rows(tokens)  # what the encoder runs
    for product in products_of_shape(c.hidden_size, c.intermediate_size, "gelu", names[dtype]):
        bench = Bench(replace(product, bias=False, activation="none", layernorm=False), m)
        tuned = Bench(without_layernorm(product), m).chosen()
        best = bench.times([*bench.heuristics(), *bench.fused(), tuned], 5)
        layer += min(map(statistics.median, best)) / 1e6
    return layer * float(c.num_hidden_layers)


def split(call: Call, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of one call on the GPU by part, and in the gaps between kernels."""
    call()
    parts = by_part(gpu_events(lambda: [call() for _ in range(repeats)]))
    return {part: us / 1e3 / repeats for part, us in parts.items()}


def by_part(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of these kernels and copies by part; together they are what passed from the first start to the last
    end. A kernel that starts before the one ahead has ended waits for it: it counts from that end."""
    parts = dict.fromkeys([*PARTS, "other", "gaps"], 0.0)
    now = None
    for event in sorted(events, key=lambda e: float(e["ts"] + e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        name = next((part for part, words in PARTS.items() if re.search(words, event["name"], re.I)), "other")
        parts["gaps"] += max(0.0, start - now) if now is not None else 0.0
        parts[name] += end - (start if now is None else max(start, now))
        now = end
    return parts
