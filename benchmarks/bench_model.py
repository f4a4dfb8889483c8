"""The whole model, input ids to last hidden state, against everything else that runs it, in one run on one machine.

    python benchmarks/bench_model.py --threads 2 --point base:16x128:ragged --point minilm:32x128:full
    python benchmarks/bench_model.py --device cuda --dtype fp16

A point is MODEL:BATCHxLONGEST:FILL with MODEL minilm, base or large, and FILL "ragged" (a third of the padded batch is
text, as in real short texts), "half" (lengths drawn around half of the longest) or "full". Peers take turns; times are
medians; tokens/s counts valid tokens. Every output is compared with transformers in float32 before it is timed. The
numbers go to a JSON file that says where they come from, and as Markdown to stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from peers import PEERS, Batch, Call, Peer  # noqa: E402

from ftbert.token_batches import padded, ragged_lengths, random_sequences  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
CPU_POINTS = ("base:16x128:ragged", "base:16x128:full", "minilm:32x128:ragged", "minilm:32x128:full")
CUDA_POINTS = tuple(
    f"{model}:{shape}:{fill}"
    for model in ("base", "large")
    for shape, fills in (
        ("1x32", ("full",)), ("1x128", ("full",)), ("1x512", ("full",)), ("8x128", ("full", "half")),
        ("32x128", ("full", "half")), ("64x128", ("full", "half")), ("8x512", ("full", "half")),
        ("32x512", ("full", "half")),
    )
    for fill in fills
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", action="append", type=parse_point, help="MODEL:BATCHxLONGEST:FILL, repeatable")
    parser.add_argument("--minilm", type=Path, help="folder of the real MiniLM-L6 (default: random weights)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="append", help="only peers whose name contains this, repeatable")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/MACHINE.json)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    points = options.point or [parse_point(p) for p in (CUDA_POINTS if device.type == "cuda" else CPU_POINTS)]
    wanted = [
        peer for peer in PEERS
        if device.type in peer.devices and (not options.peer or any(p in peer.name for p in options.peer))
    ]  # fmt: skip

    results: list[dict[str, Any]] = []
    for name in dict.fromkeys(model for model, *_ in points):
        reference = reference_model(name, options.minilm)
        peers = {}
        for kind in wanted:
            log(f"{name}: setting up {kind.name}")
            peers[kind] = attempt(partial(build, kind, reference, device, dtype))
        for model, batch_size, longest, fill in points:
            if model == name:
                batch = make_batch(reference.config.vocab_size, batch_size, longest, fill, device)
                results.append(
                    {"model": model, "batch": batch_size, "longest": longest, "fill_name": fill}
                    | measure(reference, peers, batch, options.rounds)
                )
                print(table(results[-1]), flush=True)
        peers.clear()
        gc.collect()
    document = {"provenance": provenance(device, options), "results": results}
    out = options.out or ROOT / "benchmarks" / "results" / f"{device.type}-{options.dtype}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    log(f"wrote {out}")
    return 0


def parse_point(text: str) -> tuple[str, int, int, str]:
    try:
        model, shape, fill = text.split(":")
        batch, longest = map(int, shape.split("x"))
    except ValueError:
        model = fill = ""
        batch = longest = 0
    if model not in SHAPES or fill not in ("ragged", "half", "full") or min(batch, longest) < 1:
        raise argparse.ArgumentTypeError(f"expected e.g. base:16x128:ragged, got {text!r}")
    return model, batch, longest, fill


def reference_model(name: str, minilm: Path | None) -> Any:
    """transformers, float32, on the CPU. Random weights of that shape, except the real MiniLM where it is given."""
    from transformers import AutoModel, BertConfig, BertModel

    if name == "minilm" and minilm:
        return AutoModel.from_pretrained(minilm).float().eval()
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SHAPES[name]), add_pooling_layer=False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Away from 0 and 1, so that a forgotten bias would show.
            if parameter.dim() == 1:
                parameter.normal_(float("LayerNorm.weight" in parameter_name), 0.1)
    return model.eval()


def make_batch(vocab: int, batch: int, longest: int, fill: str, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    if fill == "full":
        lengths = [longest] * batch
    elif fill == "half":
        lengths = torch.randint(1, longest, (batch,), generator=generator).tolist()
        lengths[0] = longest
    else:
        lengths = ragged_lengths(batch, longest)
    ids, mask = padded(random_sequences(vocab, lengths), "right", 0, device)
    return Batch(ids, mask, lengths)


def attempt(make: Any) -> Any:
    """What `make` returns, or the words of what it raised: a peer that fails must not end the run."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def build(kind: type[Peer], reference: Any, device: torch.device, dtype: torch.dtype) -> Peer:
    if not kind.available():
        raise RuntimeError(f"{kind.needs} is not installed")
    with torch.inference_mode():
        return kind(reference, device, dtype, torch.get_num_threads())


@torch.inference_mode()
def measure(reference: Any, peers: dict[type[Peer], Any], batch: Batch, rounds: int) -> dict[str, Any]:
    """Median milliseconds of each peer, in turns, after its output was compared."""
    on_cpu = Batch(batch.ids.cpu(), batch.mask.cpu(), batch.lengths)
    want = reference(input_ids=on_cpu.ids, attention_mask=on_cpu.mask).last_hidden_state[on_cpu.valid]
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for kind, peer in peers.items():
        if isinstance(peer, str):
            rows[kind.name] = {"failed": peer}
            continue
        call = attempt(partial(peer.prepare, batch))
        error = call if isinstance(call, str) else attempt(partial(compare, call, want, batch))
        if isinstance(error, str):
            rows[kind.name] = {"failed": error}
            continue
        rows[kind.name] = {"max_abs_diff": error}
        judged = peer.tolerance is not None and peer.dtype == torch.float32
        if judged and not error <= peer.tolerance:
            rows[kind.name]["failed"] = f"differs from transformers by {error:.1e}"
        else:
            calls[kind.name] = call
    for name, seconds in interleaved(calls, rounds, batch.ids.device).items():
        rows[name] |= {"ms": 1e3 * statistics.median(seconds), "ms_least": 1e3 * min(seconds)}
    tokens = sum(batch.lengths)
    return {"tokens": tokens, "fill": tokens / batch.ids.numel(), "peers": rows}


def compare(call: Call, want: torch.Tensor, batch: Batch) -> float:
    """Largest absolute difference at valid tokens."""
    for _ in range(2):  # the first calls of some compile or tune
        got = call()
    got = got.float().cpu()
    rows = got[batch.valid.cpu()] if got.dim() == 3 else got
    return float((rows - want).abs().max())


def interleaved(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds. Taking turns gives every peer the same share of whatever disturbs the machine."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # what ran before it left its own data in the caches
            seconds[name].append(gpu_seconds(call) if device.type == "cuda" else cpu_seconds(call))
    return seconds


def cpu_seconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def gpu_seconds(call: Call, repeats: int = 10) -> float:
    """Of one call among several on the stream, host work overlapping: what a busy GPU sees."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def table(result: dict[str, Any]) -> str:
    base = result["peers"].get("transformers (sdpa)", {}).get("ms")
    lines = [
        f"\n### {result['model']} {result['batch']}x{result['longest']} {result['fill_name']}: "
        f"{result['tokens']} valid tokens, fill {result['fill']:.2f}\n",
        "| | ms | valid tokens/s | against transformers | max abs diff |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in result["peers"].items():
        if "ms" in row:
            speed_up = f"{base / row['ms']:.2f}x" if base else ""
            tokens = f"{1e3 * result['tokens'] / row['ms']:,.0f}"
            lines.append(f"| {name} | {row['ms']:.2f} | {tokens} | {speed_up} | {row['max_abs_diff']:.1e} |")
        else:
            lines.append(f"| {name} | failed: {row['failed']} | | | |")
    return "\n".join(lines)


def provenance(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Where these numbers come from."""
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/bench_model.py", *(str(a) for a in sys.argv[1:])]),
        # FTBERT_COMMIT: of a tree that was unpacked without its repository.
        "commit": git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
        or os.environ.get("FTBERT_COMMIT"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),  # well above threads: something else was running
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "os": platform.system(),
        "python": platform.python_version(),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "minilm_weights": "real" if options.minilm else "random",
        "packages": {name: version(name) for name in ("torch", "transformers", "onnxruntime", "openvino")},
    }
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": driver()}
    return facts


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0]


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
