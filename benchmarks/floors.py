"""What a forward pass cannot go below, and where its time goes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from typing import Any

import torch
from machine import DTYPES, bandwidth, cpu_product, gpu_events
from peers import E4M3, EIGHT_BITS, Call
from quantized import beside_e4m3

# The first whose pattern is in a kernel's name.
PARTS = {
    "attention": r"attention|flash|fmha|softmax",
    "products with layernorm": r"wgmma_norm",
    "layernorm": r"layer_?norm|bias_input",
    "activation": r"bias_act|bias_gate|gelu",
    "gemm": r"gemm|wgmma_tile|wgmma_persistent|nvjet|cutlass|xmma|splitk|cublas",
    "quantise": r"quantise",
    "memory": r"memcpy|memset|restore|stage|copy",
}
_bandwidth: dict[torch.device, float] = {}


def byte_floor(reference: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds in which every weight is read once, and the tokens' embeddings read and results written, at the speed of
    a copy. What layers hand to each other may stay in a cache and is not counted."""
    size, c = dtype.itemsize, reference.config
    tables = re.compile("embeddings|^shared|^encoder.embed_tokens")
    weights = sum(p.numel() for name, p in reference.named_parameters() if not tables.search(name))
    if device not in _bandwidth:
        _bandwidth[device] = bandwidth(device)
    other = dtype if dtype not in EIGHT_BITS else torch.float32 if device.type == "cpu" else torch.float16
    rows = 2 * tokens * c.hidden_size * other.itemsize  # where matrices are in 8 bits, what is read and written is not
    return (weights * size + rows) / _bandwidth[device]


def cpu_gemm_floor(reference: Any, tokens: int, dtype: torch.dtype) -> float:
    """Seconds of the layers' matrix products alone, each by the best of what torch carries (`cpu_product`)."""
    sizes = layer_products(reference.config)
    return float(reference.config.num_hidden_layers * sum(cpu_product(tokens, n, k, dtype) for n, k in sizes))


def layer_products(config: Any) -> list[tuple[int, int]]:
    """(n, k) of a layer's qkv, out, up (with the gate, where there is one) and down."""
    hidden, t5 = config.hidden_size, config.model_type == "t5"
    inter = config.d_ff if t5 else config.intermediate_size
    gated = config.is_gated_act if t5 else config.model_type in ("modernbert", "qwen3")
    size = getattr(config, "d_kv" if t5 else "head_dim", None) or hidden // config.num_attention_heads
    width, kv = config.num_attention_heads * size, getattr(config, "num_key_value_heads", config.num_attention_heads)
    return [(width + 2 * kv * size, hidden), (hidden, width), (inter * (1 + gated), hidden), (hidden, inter)]


class GpuProducts:
    """The layers' matrix products alone, each by the best of what cuBLASLt proposes and of our own, with a weight
    matrix of its own for each. It takes its turns among the peers, so that it meets their clock."""

    def __init__(self, reference: Any, tokens: int, dtype: torch.dtype) -> None:
        from ftbert.tuning import Bench, Product, tuner_module

        c, names = reference.config, {value: name for name, value in DTYPES.items()}
        m = tuner_module().rows(tokens)  # what the encoder runs
        self._layers, self._recordings = c.num_hidden_layers, []
        types = [names[beside_e4m3(reference) if dtype in EIGHT_BITS else dtype]] * 4
        if dtype == torch.int8:
            types = [f"byte_rows int8 {type}" for type in types]
        if dtype == E4M3:
            types = [f"e4m3 e4m3 {type}" for type in types]
            types[2] = "e4m3 e4m3 e4m3"  # what the last product reads
        for type, (n, k) in zip(types, layer_products(c), strict=True):
            bench = Bench(Product(type, n, k), m)
            able = [*([] if dtype in EIGHT_BITS else bench.heuristics()), *bench.own(), bench.chosen()]
            times = [statistics.median(of_one) for of_one in bench.times(able, 5)]
            self._recordings.append(bench.record(able[times.index(min(times))]))

    def __call__(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        """Of all layers' products."""
        return float(self._layers * sum(recording.microseconds() for recording in self._recordings) / 1e6)


def split(call: Call, before: int, repeats: int = 5) -> dict[str, float]:
    """Milliseconds of one call on the GPU by part, and in the gaps between kernels, after as many calls as settle the
    clock: they run behind the profiler too, which lets the GPU rest when it starts."""
    call()
    events = sorted(gpu_events(lambda: [call() for _ in range(before + repeats)]), key=lambda event: float(event["ts"]))
    parts = by_part(events[len(events) * before // (before + repeats) :])
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
