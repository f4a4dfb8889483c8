"""`ftbert serve` under load beside `encode` on the same texts: throughput, then p50 and p99 over the load.

    python benchmarks/bench_serve.py --model FOLDER --texts FILE --device cuda --dtype fp16

Closed loops (each connection sends its next request when it has an answer) say how much is served; open loops (requests
come at random times, whatever the server does) say how long one waits: latency counts from the time a request was due,
whether a connection was free then or not. Up to a millisecond of it is the client's timer: --clients 1 --in-flight 1
--batches 1 times one request after another.
Clients are processes of their own on this machine: --clients says how many, and their CPU time is reported, as are
microseconds of workers and of engines for each request of a closed loop. FILE as in bench_encode.py; without it texts
are "hello " times --lengths, as others measure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_encode import read  # noqa: E402
from machine import DTYPES, log, provenance, results_file, write  # noqa: E402
from report import serve_table  # noqa: E402
from result_pages import markdown  # noqa: E402
from serve_chart import draw  # noqa: E402

import ftbert  # noqa: E402
from ftbert.evaluation import sequences_of  # noqa: E402
from ftbert.server.worker import raise_open_files  # noqa: E402

PACKAGES = ("httptools", "uvloop", "msgspec", "orjson", "tokenizers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="instead of --lengths")
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 512], help="words of a text")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="texts of a request")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9, 3.0], help="of the maximum")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--workers", help="of the server (default: its own choice)")
    parser.add_argument("--clients", type=int, default=0, help="processes (default: 1 on the CPU, 8 on a GPU)")
    parser.add_argument("--in-flight", type=int, default=0, help="texts, of a closed loop (default: 32; GPU: 4096)")
    parser.add_argument("--connections", type=int, default=512, help="of a closed loop, at most (default 512)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each point; above the maximum six times that")
    parser.add_argument("--most", type=int, default=2000, help="texts")
    parser.add_argument("--encode-texts", type=int, default=0, help="that encode is timed with (default: --most)")
    parser.add_argument("--out", type=Path, help="(default: benchmarks/results/serve-DEVICE-DTYPE.json)")
    options = parser.parse_args()
    raise_open_files()  # for the clients: an open loop has a connection for each request of a second
    on_gpu = options.device.startswith("cuda")
    options.clients = options.clients or (8 if on_gpu else 1)
    options.in_flight = options.in_flight or (4096 if on_gpu else 32)
    kind = options.device.partition(":")[0]
    out = options.out or results_file(f"serve-{kind}-{options.dtype}", whole=True)
    facts = provenance(
        torch.device(options.device), options.dtype, model=options.model.name, clients=options.clients,
        in_flight=options.in_flight, seconds=options.seconds, serve_packages={n: _version(n) for n in PACKAGES},
    )  # fmt: skip
    document: dict[str, Any] = {"provenance": facts, "encode": [], "closed": [], "open": []}
    sets = {"texts": read(options.texts)[: options.most]} if options.texts else {
        f"{length} words": [_words(length, i) for i in range(min(options.most, 256))] for length in options.lengths
    }  # fmt: skip
    model = ftbert.load(options.model, device=options.device, dtype=options.dtype)
    tokens = {name: sum(map(len, sequences_of(model, texts))) / len(texts) for name, texts in sets.items()}
    for when in ("before", "after"):
        for name, texts in sets.items():
            many = (texts * (options.encode_texts // len(texts) + 1))[: options.encode_texts or options.most]
            seconds = _encode_seconds(model, many)
            row = {"texts": name, "when": when, "tokens_per_text": tokens[name], "texts_per_s": len(many) / seconds}
            document["encode"].append(row | {"tokens_per_s": tokens[name] * len(many) / seconds})
            log(f"encode {name}: {row['texts_per_s']:,.1f} texts/s")
        if when == "before":
            del model
            _serve_and_measure(options, sets, tokens, document, out)
            model = ftbert.load(options.model, device=options.device, dtype=options.dtype)
    _compare(document)
    write(out, document)
    print(markdown(serve_table(document)))
    log(f"wrote {out}")
    if importlib.util.find_spec("matplotlib"):
        draw(document, out.with_suffix(".png"))
    return 0


def _serve_and_measure(
    options: argparse.Namespace,
    sets: dict[str, list[str]],
    tokens: dict[str, float],
    document: dict[str, Any],
    out: Path,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server, port = _start(options, Path(folder, "log"))
        try:
            for name, texts in sets.items():
                best: dict[int, float] = {}
                for size in options.batches:
                    connections = max(options.clients, min(options.connections, options.in_flight // size))
                    before = _cpu_seconds(server.pid)
                    row = _measure(options, port, texts, size, tokens[name], options.seconds, connections=connections)
                    # The seconds that warm up are in it, of requests too.
                    answered = row["requests_per_s"] * (options.seconds + min(2.0, options.seconds / 4))
                    row |= {f"{role}_cpu_us": 1e6 * (seconds - before.get(role, 0.0)) / answered
                            for role, seconds in _cpu_seconds(server.pid).items()} if answered else {}  # fmt: skip
                    best[size] = row["requests_per_s"]
                    document["closed"].append({"texts": name} | row)
                    _show(name, document["closed"][-1])
                    write(out, document)
                for load in options.loads:
                    size, seconds = options.batches[0], options.seconds * (6 if load > 1 else 1)
                    rate = load * best[size]
                    # Enough for a second's requests, and for those that the server lets wait for two.
                    most = min(10_000 * options.clients, math.ceil(rate))
                    row = _measure(options, port, texts, size, tokens[name], seconds, rate=rate, connections=most)
                    document["open"].append({"texts": name, "load": load} | row)
                    _show(f"{name}, load {load}", document["open"][-1])
                    write(out, document)
        finally:
            server.send_signal(signal.SIGTERM)
            document["exit_code"] = server.wait(60)


def _cpu_seconds(server: int) -> dict[str, float]:
    """CPU time so far of all its workers, and of all engines: those have the library's core in memory. One process is
    both."""
    found = {"workers": 0.0, "engines": 0.0}
    children = [int(one) for one in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    for process in children or [server]:
        tasks = Path(f"/proc/{process}/task").iterdir()
        seconds = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        computes = "libftbert_core" in Path(f"/proc/{process}/maps").read_text()
        found["engines" if computes else "workers"] += seconds
    return found


def _start(options: argparse.Namespace, path: Path) -> tuple[subprocess.Popen[bytes], int]:
    command = [sys.executable, "-m", "ftbert", "serve", str(options.model), "--device", options.device]
    command += ["--dtype", options.dtype, "--hostname", "127.0.0.1", "--port", "0"]
    command += ["--workers", options.workers] if options.workers else []
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with path.open("wb") as file:
        server = subprocess.Popen(command, stderr=file, env={**os.environ, "PYTHONPATH": search})
    until = time.monotonic() + 300
    while time.monotonic() < until and server.poll() is None:
        said = path.read_text()
        if "ready" in said and (found := re.search(r"127.0.0.1:(\d+)", said)):
            time.sleep(1.0)  # every worker has heard of it
            return server, int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {path.read_text()}")


def _measure(
    options: argparse.Namespace, port: int, texts: list[str], size: int, tokens: float, seconds: float, **how: Any
) -> dict[str, Any]:
    bodies = [json.dumps({"inputs": texts[i : i + size]}) for i in range(0, len(texts) - size + 1, size)] or [
        json.dumps({"inputs": (texts * size)[:size]})
    ]
    share = {name: value / options.clients if name == "rate" else max(1, value // options.clients)
             for name, value in how.items()}  # fmt: skip
    told = {"host": "127.0.0.1", "port": port, "path": "/embed", "bodies": bodies, "seconds": seconds,
            "warm": min(2.0, seconds / 4), **share}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(i)) for i in range(options.clients)]
        running = [_client(told | {"seed": i, "out": str(file)}) for i, file in enumerate(files)]
        for process in running:
            process.wait(seconds + 120)
        found = [json.loads(file.read_text()) for file in files]
    latencies = sorted(value for one in found for value in one["latencies"])
    refusals = sorted(value for one in found for value in one["refusals"])
    statuses: dict[str, int] = {}
    for one in found:
        for status, count in one["statuses"].items():
            statuses[status] = statuses.get(status, 0) + count
    rate = len(latencies) / seconds
    return {
        "texts_per_request": size, **how, "requests_per_s": rate, "texts_per_s": rate * size,
        "tokens_per_s": rate * size * tokens, "p50_ms": _quantile(latencies, 0.5), "p99_ms": _quantile(latencies, 0.99),
        "statuses": statuses, "client_cpu_s": sum(one["cpu"] for one in found),
        **({"refused_p99_ms": _quantile(refusals, 0.99)} if refusals else {}),
    }  # fmt: skip


def _client(told: dict[str, Any]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, str(ROOT / "benchmarks" / "load_client.py")], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(told).encode())
    process.stdin.close()
    return process


def _compare(document: dict[str, Any]) -> None:
    """Each closed loop as a share of encode, whose two times are averaged."""
    for row in document["closed"]:
        own = [one["tokens_per_s"] for one in document["encode"] if one["texts"] == row["texts"]]
        row["of_encode"] = row["tokens_per_s"] / statistics.mean(own)


def _show(name: str, row: dict[str, Any]) -> None:
    costs = [f", {role} {row[key]:.0f} us" for role in ("workers", "engines") if (key := f"{role}_cpu_us") in row]
    log(f"{name} x {row['texts_per_request']}: {row['texts_per_s']:,.1f} texts/s, p50 {row['p50_ms']:.1f} ms, "
        f"p99 {row['p99_ms']:.1f} ms, {row['statuses']}{''.join(costs)}")  # fmt: skip


def _quantile(values: list[float], share: float) -> float:
    return 1e3 * values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _encode_seconds(model: Any, texts: list[str]) -> float:
    model.encode(texts[:64], show_progress_bar=False)
    began = time.perf_counter()
    model.encode(texts, show_progress_bar=False)
    return time.perf_counter() - began


def _words(count: int, seed: int) -> str:
    return f"{seed} " + "hello " * (count - 4)


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
