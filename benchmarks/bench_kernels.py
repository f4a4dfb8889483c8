"""Each kernel and matrix product against torch's equivalent and the floor of bytes or FLOPs.

    python benchmarks/bench_kernels.py --device cuda --dtype fp16 [--out FILE]

Shapes are BERT-base's for 1x128, 32x128 and 32x512 tokens; on a GPU attention comes for more sizes, heads and masks,
beside cuDNN's and FlashAttention's: --kernel "attention 12x" --rounds 3 is these alone, in less than a minute. "cold":
every call has operands of its own, together more than the caches hold, as after other layers' work; "warm": the same
operands again and again. On a GPU a CUDA graph of many calls is timed, so that launches are not. The floor is the
larger of the bytes that must move, at the speed of a copy measured here, and the FLOPs, at that of torch's best.
Results are compared before they are timed: a kernel that differs, or raises, is a row that says so, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product as every
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import (  # noqa: E402
    DTYPES,
    attempt,
    bandwidth,
    flops,
    log,
    provenance,
    results_file,
    seconds,
    write,
)
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import gelu, layer_norm, linear, normalize, scaled_dot_product_attention, silu  # noqa: E402

from ftbert._library import library_path, load_library  # noqa: E402

HIDDEN, INTER, HEADS, VOCAB = 768, 3072, 12, 30522
SIZE = HIDDEN // HEADS
SHAPES = ((1, 128), (32, 128), (32, 512))  # batch, seq
ATTENTION_SHAPES = tuple((batch, seq) for batch in (8, 32, 64) for seq in (128, 384, 512))
ATTENTION_HEADS = ((12, 64), (16, 64), (12, 32))  # heads, head size
LONG_HEADS, LONG_TOKENS = ((12, 64), (12, 128)), 16384
LONG_SHAPES = tuple((LONG_TOKENS // seq, seq) for seq in (128, 256, 512, 1024, 2048, 4096, 8192))
PEERS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "masked": SDPBackend.EFFICIENT_ATTENTION,
}
MASKS = {"full": (-1, -1), "causal": (-1, 0), "window": (64, 64)}  # keys that a query sees on each side
Make = Callable[[], tuple[Any, ...]]


@dataclass
class Case:
    """make() -> operands, new ones each time. bytes, flops: the least that one call must do."""

    name: str
    make: Make
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    bytes: float
    flops: float = 0.0


def cases(batch: int, seq: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    ops = torch.ops.ftbert
    tokens, size = batch * seq, torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator(device=device).manual_seed(0)
    cu = torch.arange(0, tokens + 1, seq, dtype=torch.int32, device=device)

    def random(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device).normal_(0, scale, generator=generator)

    activations = tokens * HIDDEN * size
    vectors = [random(HIDDEN) for _ in range(3)]
    yield Case(
        "add_bias_input_layernorm", lambda: (random(tokens, HIDDEN), random(tokens, HIDDEN)),
        lambda x, y: ops.add_bias_input_layernorm(x, vectors[0], y, vectors[1], vectors[2], 1e-12)[0],
        lambda x, y: layer_norm(x + vectors[0] + y, (HIDDEN,), vectors[1], vectors[2], 1e-12),
        4 * activations,  # the op also gives the sum
    )  # fmt: skip
    wide = random(INTER)
    yield Case(
        "add_bias_act (erf GELU)", lambda: (random(tokens, INTER),),
        lambda x: ops.add_bias_act_(x, wide, "gelu") or x,
        lambda x: gelu(x + wide), 2 * tokens * INTER * size,
    )  # fmt: skip
    yield Case(
        "add_bias_gate (SwiGLU)", lambda: (random(tokens, INTER),), lambda x: ops.add_bias_gate(x, wide, "silu"),
        lambda x: silu((x + wide)[:, ::2]) * (x + wide)[:, 1::2], 1.5 * tokens * INTER * size,
    )  # fmt: skip

    def sdpa(qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(batch, seq, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(tokens, HIDDEN)

    yield Case(
        "attention", lambda: (random(tokens, 3 * HIDDEN),), lambda qkv: ops.attention(qkv, cu, seq, HEADS), sdpa,
        4 * activations, 4.0 * tokens * seq * HIDDEN,
    )  # fmt: skip
    triple = random(3 * HIDDEN)
    yield Case(
        "add_qkv_bias", lambda: (random(tokens, 3 * HIDDEN),), lambda x: ops.add_qkv_bias(x, triple, cu, seq, HEADS)[0],
        lambda x: (x + triple).view(batch, seq, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).contiguous()[0],
        6 * activations,
    )  # fmt: skip
    scores = batch * HEADS * seq * seq
    yield Case(
        "softmax", lambda: (random(batch, HEADS, seq, seq, kind=torch.float32),),
        lambda x: ops.softmax(x, cu, 0.125, None, None, dtype), lambda x: (x * 0.125).softmax(-1).to(dtype),
        scores * (4 + size),
    )  # fmt: skip
    yield Case(
        "transpose", lambda: (random(batch, HEADS, seq, SIZE),), lambda x: ops.transpose(x, cu, tokens),
        lambda x: x.transpose(1, 2).reshape(tokens, HIDDEN), 2 * activations,
    )  # fmt: skip
    word, position = random(VOCAB, HIDDEN), random(512, HIDDEN)
    places = torch.arange(seq, dtype=torch.int32, device=device).repeat(batch)
    yield Case(
        "embeddings_layernorm", lambda: (torch.randint(0, VOCAB, (tokens,), device=device, generator=generator),),
        lambda ids: ops.embeddings_layernorm(ids, None, None, places, word, position, None, *vectors[:2], 1e-12),
        lambda ids: layer_norm(word[ids] + position[places], (HIDDEN,), vectors[0], vectors[1], 1e-12),
        2 * activations + tokens * 8,
    )  # fmt: skip
    half = torch.arange(0, tokens, 2, device=device)  # every other token is kept
    packed_index = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    packed_index[half] = torch.arange(len(half), dtype=torch.int32, device=device)
    yield Case(
        "restore_padding (half)", lambda: (random(len(half), HIDDEN),), lambda x: ops.restore_padding(x, packed_index),
        lambda x: x.new_zeros(tokens, HIDDEN).index_copy_(0, half, x), 1.5 * activations,
    )  # fmt: skip
    yield Case(
        "pooling (mean, normalised)", lambda: (random(tokens, HIDDEN),), lambda x: ops.pooling(x, cu, "mean", True),
        lambda x: normalize(x.view(batch, seq, HIDDEN).float().mean(1)), activations,
    )  # fmt: skip
    yield Case(
        "argmax of 128256", lambda: (random(batch, 128256),), ops.argmax, lambda x: x.max(-1)[1], batch * 128256 * size,
    )  # fmt: skip
    if device.type == "cuda":  # on the CPU the op repacks the weights in every call
        for name, n, k in (
            ("qkv", 3 * HIDDEN, HIDDEN), ("out", HIDDEN, HIDDEN), ("up", INTER, HIDDEN), ("down", HIDDEN, INTER)
        ):  # fmt: skip
            yield product(name, n, k, tokens, random, size)


def attention(
    batch: int, seq: int, heads: int, size: int, device: torch.device, dtype: torch.dtype,
    mask: str = "full", peer: str = "cuDNN",
) -> Case:  # fmt: skip
    """Beside torch's, which takes cuDNN's by itself for some sizes only and for a window wants a mask [seq, seq]."""
    left, right = MASKS[mask]
    places = torch.arange(seq, device=device)
    seen = ((places - places[:, None]).abs() <= left) if mask == "window" else None
    keys = {"full": seq, "causal": seq / 2, "window": min(seq, left + right + 1)}[mask]
    hidden, tokens, width = heads * size, batch * seq, torch.empty((), dtype=dtype).element_size()
    cu = torch.arange(0, tokens + 1, seq, dtype=torch.int32, device=device)
    generator = torch.Generator(device=device).manual_seed(0)

    def theirs(qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(batch, seq, 3, heads, size).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(PEERS[peer]):
            out = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=mask == "causal")
        return out.transpose(1, 2).reshape(tokens, hidden)

    return Case(
        f"attention {heads}x{size}{'' if mask == 'full' else f' {mask}'}, {peer}",
        lambda: (torch.empty(tokens, 3 * hidden, device=device, dtype=dtype).normal_(generator=generator),),
        lambda qkv: torch.ops.ftbert.attention(qkv, cu, seq, heads, left=left, right=right), theirs,
        4.0 * tokens * hidden * width, 4.0 * tokens * keys * hidden,
    )  # fmt: skip


def product(name: str, n: int, k: int, tokens: int, random: Callable[..., Tensor], size: int) -> Case:
    bias = random(n)
    return Case(
        f"linear {name}", lambda: (random(tokens, k), random(n, k, scale=1 / math.sqrt(k))),
        lambda x, w: torch.ops.ftbert.linear(x, w, bias, "none"), lambda x, w: linear(x, w, bias),
        (tokens * (n + k) + n * k) * size, 2.0 * tokens * n * k,
    )  # fmt: skip


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all)")
    parser.add_argument("--kernel", action="append", help="only kernels whose name contains this, repeatable")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/kernels-cuda-DTYPE.json; "
                        "on a CPU and with --kernel out/bench-kernels-DEVICE-DTYPE.json)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    load_library()
    torch.ops.load_library(str(library_path().with_name("libftbert_test.so")))  # single kernels
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    facts = provenance(device, options.dtype, rounds=options.rounds)
    whole = device.type == "cuda" and not options.kernel  # what a page quotes
    out = options.out or results_file(f"kernels-{device.type}-{options.dtype}", whole)
    speed = {"bytes": bandwidth(device), "flops": flops(device, dtype)}
    log(f"copy {speed['bytes'] / 1e9:,.0f} GB/s, product {speed['flops'] / 1e12:.1f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    print("| kernel | batch x seq | us cold | torch | us warm | torch | floor us | floor / cold |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for batch, seq, case in all_cases(device, dtype):
        if options.kernel and not any(word in case.name for word in options.kernel):
            continue
        floor = 1e6 * max(case.bytes / speed["bytes"], case.flops / speed["flops"])
        found = attempt(partial(compared_and_timed, case, device, dtype, options.rounds))
        found = {"failed": found} if isinstance(found, str) else found
        rows.append({"name": case.name, "batch": batch, "seq": seq, "floor_us": floor} | found)
        print(line(rows[-1]), flush=True)
        write(out, {"provenance": facts, "speed": speed, "rows": rows})
    log(f"wrote {out}")
    return int(any("failed" in row for row in rows))


def line(row: dict[str, Any]) -> str:
    """Of the table that is printed."""
    name = f"| {row['name']} | {row['batch']}x{row['seq']} |"
    if "failed" in row:
        return f"{name} failed: {row['failed']} | | | | {row['floor_us']:.1f} | |"
    shown = " | ".join(f"{row[key]:.1f}" for key in ("cold", "torch_cold", "warm", "torch_warm", "floor_us"))
    return f"{name} {shown} | {row['floor_us'] / row['cold']:.0%} |"


def all_cases(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[int, int, Case]]:
    """With batch and length."""
    for batch, seq in SHAPES if device.type == "cuda" else SHAPES[:2]:
        for case in cases(batch, seq, device, dtype):
            yield batch, seq, case
    if device.type == "cuda" and dtype != torch.float32:
        for heads, size in ATTENTION_HEADS:
            for batch, seq in ATTENTION_SHAPES:
                yield batch, seq, attention(batch, seq, heads, size, device, dtype)
        for (heads, size), (batch, seq), mask in every(LONG_HEADS, LONG_SHAPES, MASKS):
            for peer in ("masked",) if mask == "window" else ("cuDNN", "flash"):
                yield batch, seq, attention(batch, seq, heads, size, device, dtype, mask, peer)


def compared_and_timed(case: Case, device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    compare(case, dtype)
    return measure(case, device, rounds)


def compare(case: Case, dtype: torch.dtype) -> None:
    """Against the equivalent in the same dtype: it tells another result from another rounding."""
    operands = case.make()
    want = case.theirs(*operands).float()
    got = case.ours(*operands).float()  # may write its operand
    error = float((got.view(want.shape) - want).abs().max() / want.abs().max())
    limit = 32 * torch.finfo(dtype).eps
    if not error <= limit:
        raise ValueError(f"differs from torch by {error:.1e} of the largest value, allowed {limit:.1e}")


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, ours and torch's in turns."""
    cache = 150 << 20 if device.type == "cuda" else 96 << 20
    # A set of operands weighs about half of what moves; the sets of a cold run exceed every cache twice over.
    sets = [case.make() for _ in range(max(2, min(400, math.ceil(2 * cache / max(1, case.bytes / 2)))))]
    runs = {
        "cold": graph(case.ours, sets, device),
        "torch_cold": graph(case.theirs, sets, device),
        "warm": graph(case.ours, sets[:1] * len(sets), device),
        "torch_warm": graph(case.theirs, sets[:1] * len(sets), device),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(1e6 * seconds(run, device) / len(sets))
    return {name: statistics.median(values) for name, values in times.items()}


def graph(call: Callable[..., Any], sets: list[tuple[Any, ...]], device: torch.device) -> Callable[[], None]:
    """One call that runs `call` on every set."""

    def run() -> None:
        for operands in sets:
            call(*operands)

    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*sets[0])
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded, stream=stream):
        run()
    return recorded.replay


if __name__ == "__main__":
    sys.exit(main())
