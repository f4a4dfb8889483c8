"""The whole model, input ids to last hidden state, against everything else that runs it, in one run on one machine.

    python benchmarks/bench_model.py --threads 2 --point base:16x128:ragged --point minilm:32x128:full
    python benchmarks/bench_model.py --device cuda --dtype fp16 [--model base]
    python benchmarks/bench_model.py --device cuda --dtype fp8 [--energy]
    python benchmarks/bench_model.py --device cuda --dtype int8
    python benchmarks/bench_model.py --threads 2 --dtype int8

A point is MODEL:BATCHxLONGEST:FILL with MODEL minilm, base, large, modernbert, qwen3, deberta, t5 or esm, and FILL
"ragged" (a third of the padded batch is text, as in real short texts), "half" (lengths drawn around half of the
longest), "full" or "mlperf" (lengths as of MLPerf's BERT: 384 at most, 177 in the mean). Without --point a GPU gets a
grid of 108, 36 for each of BERT's, in fp8 14; the CPU four; --model modernbert, qwen3, deberta, t5 and esm have points
of their own. Peers take turns; times are medians; tokens/s counts valid tokens. Every output is compared with
transformers in float32 before it is timed: the largest difference, and the square root of the mean squared one over
that of the numbers. The numbers go to a JSON file that says where they come from, and as Markdown to stdout.

In fp8 models are quantized by plain rounding, with scales from random tokens (quantized.py), and everything else is in
fp16, of modern models in bf16; the same model without fp8, ours and PyTorch's, takes turns with them. So it is in int8
on a GPU. On the CPU everything else is then in float32, and ours in float32 and bf16 take turns with everybody's int8.

A GPU at its power limit lowers its clock within some hundredths of a second, and what ran before leaves its mark: where
the fastest peer takes 0.4 ms or more, each is repeated until that has settled before it is timed. There all are timed
once more with a GPU that did nothing for a while before (--rest): the times of one that is not always busy. The matrix
products alone take turns with the peers, in the same state. At some points of the grid each peer then runs for half a
second at a stretch, with --energy at all points for a whole one, with the mean clock and the energy of a token.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from encoder_peers import ENCODER_PEERS  # noqa: E402
from floors import GpuProducts, byte_floor, cpu_gemm_floor, split  # noqa: E402
from fp8_peers import FP8_PEERS  # noqa: E402
from int8_peers import INT8_PEERS  # noqa: E402
from machine import DTYPES, attempt, log, provenance, results_file, seconds, write  # noqa: E402
from modern_peers import MODERN_PEERS  # noqa: E402
from nvml import meter  # noqa: E402
from peers import E4M3, EIGHT_BITS, PEERS, Batch, Call, Peer  # noqa: E402
from points import MODERN, SHAPES, make_batch, parse_point, reference_model, usual_points  # noqa: E402
from runtimes import RUNTIMES  # noqa: E402
from sustained import sustained  # noqa: E402

from ftbert.gpus import Gpu  # noqa: E402

RUN_DTYPES = DTYPES | {word: dtype for dtype, word in EIGHT_BITS.items()}
LONG = 4e-4  # seconds: where the fastest peer takes as long, power may count
SHORT, SETTLED = 0.02, 0.04  # seconds: what events cost does not count; the clock has settled
RESTED_ROUNDS = 3  # at most: each costs every peer a rest
SUSTAINED_AT = ((1, 128, "full"), (32, 128, "half"), (32, 512, "full"))
FLOOR = "matrix products alone"
# On the grid a profiler sees these only, (batch, longest, fill): it takes longer than all peers together.
SPLIT_AT = ((1, 128, "full"), (8, 128, "half"), (32, 128, "full"), (32, 128, "half"), (32, 512, "full"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", action="append", type=parse_point, help="MODEL:BATCHxLONGEST:FILL, repeatable")
    parser.add_argument("--model", action="append", choices=[*SHAPES, *MODERN], help="its usual points, repeatable")
    parser.add_argument("--minilm", type=Path, help="folder of the real MiniLM-L6 (default: random weights)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(RUN_DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=0.2, help="seconds before a timing of a rested GPU (0: none)")
    parser.add_argument("--peer", action="append", help="only peers whose name contains this, repeatable")
    parser.add_argument("--energy", action="store_true", help="each peer for a second at a stretch, at all points: "
                        "millijoules a token, where NVML counts them")  # fmt: skip
    parser.add_argument("--all-peers", action="store_true", help="also those that run only on request")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/DEVICE-DTYPE.json; with "
                        "--point, --model or --peer out/bench-DEVICE-DTYPE.json)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), RUN_DTYPES[options.dtype]
    least = {E4M3: 89, torch.int8: 80}.get(dtype, 0) if device.type == "cuda" else 0
    if dtype == E4M3 and device.type == "cpu":
        parser.error("--dtype fp8 needs --device cuda")
    if least and Gpu.of(device).capability < least:
        parser.error(f"--dtype {options.dtype} needs a GPU of compute capability {least / 10}, not held to less")
    usual = usual_points(device, options.dtype)
    points = options.point or [point for point in usual if point[0] in (options.model or SHAPES)]
    wanted = [
        peer for peer in (*PEERS, *MODERN_PEERS, *ENCODER_PEERS, *FP8_PEERS, *INT8_PEERS, *RUNTIMES)
        if device.type in peer.devices and dtype in peer.dtypes
        and (any(p in peer.name for p in options.peer) if options.peer else options.all_peers or not peer.on_request)
    ]  # fmt: skip

    weights = "real" if options.minilm else "random"
    rest = options.rest if device.type == "cuda" else 0.0
    facts = provenance(device, options.dtype, rounds=options.rounds, rest=rest, minilm_weights=weights)
    whole = not (options.point or options.model or options.peer)
    out = options.out or results_file(f"{device.type}-{options.dtype}", whole)
    torch._dynamo.config.recompile_limit = 1000
    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(model for model, *_ in points):
        reference = reference_model(name, options.minilm, device)
        peers = {}
        for kind in wanted:
            if kind.families and reference.config.model_type not in kind.families:
                continue
            log(f"{name}: setting up {kind.name}")
            peers[kind] = attempt(partial(build, kind, reference, device, dtype))
        for model, batch_size, longest, fill in points:
            if model == name:
                if any(kind.compiles_each_point for kind in wanted):
                    # Every point compiles anew: a compiler that gave up recompiling would be timed in eager mode.
                    torch._dynamo.reset()
                batch = make_batch(reference.config.vocab_size, batch_size, longest, fill, device)
                sustain = 1.0 if options.energy else 0.5 * ((batch_size, longest, fill) in SUSTAINED_AT)
                results.append(
                    {"model": model, "batch": batch_size, "longest": longest, "fill_name": fill}
                    | measure(reference, peers, batch, options.rounds, dtype, rest, sustain)
                )
                print(table(results[-1]), flush=True)
                write(out, {"provenance": facts, "results": results})
        peers.clear()
        gc.collect()
    # Last: behind a profiler the host's time of a replayed call rose from 28 to 47 us and more (H200).
    ours = next((kind for kind in wanted if kind.name == "ftbert, packed"), None)
    if ours:
        for name in dict.fromkeys(model for model, *_ in points):
            log(f"{name}: where the time goes")
            reference = reference_model(name, options.minilm, device)
            peer = attempt(partial(build, ours, reference, device, dtype))
            for result in results:
                point = result["batch"], result["longest"], result["fill_name"]
                if result["model"] == name and (options.point or point in SPLIT_AT):
                    batch = make_batch(reference.config.vocab_size, *point, device)
                    parts = peer if isinstance(peer, str) else attempt(partial(split_of, peer, batch))
                    result |= {"failed": parts} if isinstance(parts, str) else {"split_ms": parts}
            write(out, {"provenance": facts, "results": results})
    log(f"wrote {out}")
    return 0


def build(kind: type[Peer], reference: Any, device: torch.device, dtype: torch.dtype) -> Peer:
    if not kind.available():
        raise RuntimeError(f"{kind.needs} is not installed")
    with torch.inference_mode():
        return kind(reference, device, dtype, torch.get_num_threads())


@torch.inference_mode()
def measure(
    reference: Any,
    peers: dict[type[Peer], Any],
    batch: Batch,
    rounds: int,
    dtype: torch.dtype,
    rest: float,
    sustain: float = 0.0,
) -> dict[str, Any]:
    """Median milliseconds of each peer, in turns, after its output was compared; floors. sustain: for how many seconds
    each then runs at a stretch."""
    tokens, device = sum(batch.lengths), batch.ids.device
    want = reference(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state[batch.valid]
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for kind, peer in peers.items():
        if isinstance(peer, str):
            rows[kind.name] = {"failed": peer}
            continue
        call = attempt(partial(peer.prepare, batch))
        errors = call if isinstance(call, str) else attempt(partial(compare, call, want, batch))
        if isinstance(errors, str):
            rows[kind.name] = {"failed": errors}
            continue
        rows[kind.name] = errors
        if not peer.passes(errors["max_abs_diff"]):
            rows[kind.name]["failed"] = f"differs from transformers by {errors['max_abs_diff']:.1e}"
        else:
            calls[kind.name] = call
    result: dict[str, Any] = {"tokens": tokens, "fill": tokens / batch.ids.numel(), "peers": rows}
    gpu = device.type == "cuda"
    products = attempt(partial(GpuProducts, reference, tokens, dtype)) if gpu else None
    if isinstance(products, GpuProducts):
        calls[FLOOR] = products
    for name, found in timed(calls, rounds, device, rest).items():
        found = {"failed": found} if isinstance(found, str) else found
        if name == FLOOR:
            result |= {f"gemm_floor_{key}": found[key] for key in ("ms", "rested_ms") if key in found}
            products = found.get("failed")
        else:
            rows[name] |= found
    calls.pop(FLOOR, None)
    if isinstance(products, str):
        result["failed"] = products
    if gpu and sustain:
        gauge = meter(device)
        for name, call in calls.items():
            held = attempt(partial(sustained, call, tokens, device, gauge, sustain))
            rows[name] |= {"failed": held} if isinstance(held, str) else {"sustained": held}
    floors = [("byte_floor_ms", partial(byte_floor, reference, tokens, device, dtype))]
    floors += [] if gpu else [("gemm_floor_ms", partial(cpu_gemm_floor, reference, tokens, dtype))]
    for name, floor in floors:
        found = attempt(floor)
        result |= {"failed": found} if isinstance(found, str) else {name: 1e3 * found}
    return result


def timed(calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device, rest: float) -> dict[str, Any]:
    """What a row says of its time, or, of a call that raised at any time, the words of that alone."""
    rows: dict[str, Any] = {}
    for name, times in interleaved(calls, rounds, device).items():
        rows[name] = times
        if not isinstance(times, str):
            rows[name] = {"ms": 1e3 * statistics.median(times), "ms_least": 1e3 * min(times)}
            if device.type == "cuda" and rows[name]["ms"] < 1 and name != FLOOR:
                host = attempt(partial(host_seconds, calls[name]))
                rows[name] = host if isinstance(host, str) else rows[name] | {"host_us": 1e6 * host}
    going = {name: call for name, call in calls.items() if not isinstance(rows[name], str)}
    least = min((rows[name]["ms"] for name in going if name != FLOOR), default=0.0)
    if device.type == "cuda" and rest and least >= 1e3 * LONG:
        for name, times in interleaved(going, min(rounds, RESTED_ROUNDS), device, rest).items():
            rows[name] = times if isinstance(times, str) else rows[name] | {"rested_ms": 1e3 * statistics.median(times)}
    return rows


@torch.inference_mode()
def split_of(peer: Peer, batch: Batch) -> dict[str, float]:
    call = peer.prepare(batch)
    for _ in range(3):
        call()
    took = seconds(call, batch.ids.device)
    return split(call, before=round(SETTLED / took) if took >= LONG else 3)


def host_seconds(call: Callable[[], Any], calls: int = 20, rounds: int = 5) -> float:
    """Median seconds that a call keeps the host busy: several are given to the GPU, which is not waited for in between
    unless the call itself does."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def compare(call: Call, want: torch.Tensor, batch: Batch) -> dict[str, float]:
    """Differences at valid tokens: the largest one, and all of them over all numbers, root mean squares."""
    for _ in range(2):  # the first calls of some compile or tune
        got = call()
    rows = got[batch.valid] if got.dim() == 3 else got
    off = rows.float() - want
    rms = off.square().mean().sqrt() / want.square().mean().sqrt()
    return {"max_abs_diff": float(off.abs().max()), "rms_diff": float(rms)}


def interleaved(
    calls: dict[str, Callable[[], Any]], rounds: int, device: torch.device, rest: float = 0
) -> dict[str, list[float] | str]:
    """Seconds, or the words of what a call raised: the others go on. Taking turns gives every peer the same share of
    whatever disturbs the machine. rest: seconds in which a GPU does nothing before each timing; 0: it does the same
    work before."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, str] = {}
    repeats, before = dict.fromkeys(calls, 1), dict.fromkeys(calls, 1)  # one: caches hold the data of what ran before

    def each(names: Iterable[str], of_one: Callable[[str], float]) -> dict[str, float]:
        """What that gives for each that has not failed so far."""
        found = {name: attempt(partial(of_one, name)) for name in names if name not in failed}
        failed.update((name, words) for name, words in found.items() if isinstance(words, str))
        return {name: value for name, value in found.items() if name not in failed}

    def take(name: str, times: int = 1) -> float:
        own = getattr(calls[name], "seconds", None)  # of one that times itself
        return statistics.fmean(own() for _ in range(times)) if own else seconds(calls[name], device, times)

    def alone(name: str) -> float:
        return take(name)

    def in_turn(name: str) -> float:
        for _ in range(before[name]):
            calls[name]()
        if rest:
            take(name)
            time.sleep(rest)
        return take(name, repeats[name])

    once = each(calls, alone)
    if device.type == "cuda":
        once = each(calls, alone)  # the first warmed up
        least = min((took for name, took in once.items() if name != FLOOR), default=0.0)
        settle = least >= LONG and not rest  # all peers alike
        for name, took in once.items():
            repeats[name] = max(1, min(40 if settle else 20, round((SETTLED if settle else SHORT) / took)))
            before[name] = max(1, round(SETTLED / took)) if settle else 1
    draw = random.Random(0)
    for _ in range(rounds):
        # In an order of its own each time: who comes next differs.
        for name, took in each(draw.sample(list(calls), len(calls)), in_turn).items():
            times[name].append(took)
    return {name: failed.get(name, times[name]) for name in calls}


def table(result: dict[str, Any]) -> str:
    usual = ("transformers (sdpa)", "ftbert, packed, 16 bits", "ftbert, fp32")
    against = next((name for name in usual if name in result["peers"]), "")
    base = result["peers"].get(against, {}).get("ms")
    lines = [
        f"\n### {result['model']} {result['batch']}x{result['longest']} {result['fill_name']}: "
        f"{result['tokens']} valid tokens, fill {result['fill']:.2f}\n",
        f"| | ms | after a rest | valid tokens/s | against {against} | max abs diff | rms diff | mJ a token |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["peers"].items():
        if "ms" in row:
            speed_up = f"{base / row['ms']:.2f}x" if base else ""
            tokens = f"{1e3 * result['tokens'] / row['ms']:,.0f}"
            rested = f"{row['rested_ms']:.2f}" if "rested_ms" in row else ""
            energy = row.get("sustained", {}).get("mj_per_token")
            off = f"{row['max_abs_diff']:.1e} | {row['rms_diff']:.1e} | {'' if energy is None else f'{energy:.3f}'}"
            lines.append(f"| {name} | {row['ms']:.3f} | {rested} | {tokens} | {speed_up} | {off} |")
        else:
            lines.append(f"| {name} | failed: {row['failed']} | | | | | | |")
    if "gemm_floor_ms" in result and "byte_floor_ms" in result:
        floors = f"matrix products {result['gemm_floor_ms']:.3f} ms, bytes {result['byte_floor_ms']:.3f} ms"
        lines.append(f"\nFloors: {floors}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
