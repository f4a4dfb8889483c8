"""Where numbers come from, and what the machine could do at best."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from ftbert.dtypes import DTYPES as DTYPES  # noqa: E402

PACKAGES = (
    "torch", "transformers", "sentence-transformers", "onnxruntime", "openvino", "nncf", "ctranslate2", "tokenizers",
    "nanotoken",
)  # fmt: skip


def provenance(device: torch.device, dtype: str, **more: Any) -> dict[str, Any]:
    """For a JSON file of results."""
    facts: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *map(_shown, sys.argv)]),
        # FTBERT_COMMIT: of a tree that was unpacked without its repository.
        "commit": _commit() or os.environ.get("FTBERT_COMMIT"),
        "device": device.type,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()],  # well above threads: something else was running
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "os": platform.system(),
        "python": platform.python_version(),
        "dtype": dtype,
        "packages": {name: _version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        from ftbert._library import build_info
        from ftbert.gpus import Gpu
        from ftbert.tuning import gemm_table

        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": Gpu.of(device).told,
            "cuda": torch.version.cuda,
            "driver": _nvidia_smi("driver_version"),
            "clocks": {
                name: _nvidia_smi(f"clocks.{name}") for name in ("sm", "mem", "max.sm", "max.mem")
            },
            "power_limit": _nvidia_smi("power.limit"),
            "gemm": build_info().get("cuda_gemm"),
            "gemm_table": gemm_table.summary(device),
        }  # fmt: skip
    return facts | more


def _shown(argument: str) -> str:
    """An argument of the command line; of a path only what does not depend on whose machine it is."""
    if not Path(argument).is_absolute():
        return argument
    path = Path(argument)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """Of the code; a file of it that git does not know is a change. What a benchmark before this one wrote, results and
    the tables in *.md, is none."""
    code = (":/", ":(exclude,top)benchmarks/results", ":(exclude,top)*.md")
    return _git("rev-parse", "HEAD") + ("+changes" if _git("status", "--porcelain", "-unormal", "--", *code) else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _nvidia_smi(what: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0]


def results_file(name: str, whole: bool) -> Path:
    """Where numbers go that nobody named a file for: to the published ones only if they are of everything."""
    return ROOT / "benchmarks" / "results" / f"{name}.json" if whole else ROOT / "out" / f"bench-{name}.json"


def write(out: Path, document: dict[str, Any]) -> None:
    """After every measurement: a run that is cut off keeps what it has."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attempt(make: Any) -> Any:
    """What `make` returns, or the words of what it raised: a peer that fails must not end the run."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 1) -> float:
    """Of one call. On a GPU, of one among `repeats` on the stream, host work overlapping: what a busy GPU sees."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - began) / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def median_seconds(call: Callable[[], Any], device: torch.device, rounds: int = 7, repeats: int = 1) -> float:
    """After a call that warms up."""
    call()
    return statistics.median(seconds(call, device, repeats) for _ in range(rounds))


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy moves, reading and writing counted."""
    source = torch.ones((512 << 20) if device.type == "cuda" else (128 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), device, rounds=9, repeats=3)


def flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of torch's best large product."""
    if device.type != "cuda":
        n = 2048
        return 2 * n**3 / cpu_product(n, n, n, dtype)
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: a @ b.T, device, rounds=5)


def cpu_product(m: int, n: int, k: int, dtype: torch.dtype, rounds: int = 5) -> float:
    """Seconds of [m, k] @ [n, k]^T at best: weights as they are or packed by oneDNN; all threads at all rows, or each,
    as if nothing else ran, at its share of them."""
    threads, found = torch.get_num_threads(), []
    for count, rows in ((threads, m), (1, -(-m // threads))):
        ways = _int8_ways(rows, n, k) if dtype == torch.int8 else _float_ways(rows, n, k, dtype)
        torch.set_num_threads(count)
        try:
            for way in ways:
                way()
                found.append(min(seconds(way, torch.device("cpu")) for _ in range(rounds)))
        finally:
            torch.set_num_threads(threads)
    return min(found)


def _float_ways(m: int, n: int, k: int, dtype: torch.dtype) -> list[Callable[[], Any]]:
    x, weight = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    ways: list[Callable[[], Any]] = [partial(torch.nn.functional.linear, x, weight)]
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
        ways.append(partial(torch.ops.mkldnn._linear_pointwise, x, packed, None, "none", [], ""))
    return ways


def _int8_ways(m: int, n: int, k: int) -> list[Callable[[], Any]]:
    """uint8 or int8 by int8; the packed one scales its sums by row of the weights and gives float."""
    x, weight = (torch.randint(0, 127, shape, dtype=torch.int8) for shape in ((m, k), (n, k)))
    ways: list[Callable[[], Any]] = [partial(torch._int_mm, x, weight.T)]
    if torch.backends.mkldnn.is_available():
        packed, scales = torch.ops.onednn.qlinear_prepack(weight, [m, k]), torch.ones(n)
        zeros = torch.zeros(n, dtype=torch.int64)
        ways.append(partial(
            torch.ops.onednn.qlinear_pointwise, x.to(torch.uint8), 1.0, 0, packed, scales, zeros, None, 1.0, 0,
            torch.float32, "none", [], "",
        ))  # fmt: skip
    return ways


def gpu_events(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """What ran on the GPU meanwhile, copies too: name, ts and dur in microseconds. RuntimeError: nothing was seen."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    seen = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not seen:
        raise RuntimeError("the profiler saw nothing run on the GPU")
    return seen
