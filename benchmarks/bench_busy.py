"""One query on the CPU, alone and beside processes that keep its cores busy.

    python benchmarks/bench_busy.py [--model FOLDER] [--dtype fp32] [--tokens 16] [--rounds 5] [--json]

Each way is a process of its own, which loads the model while cores are free and then takes its turn at every load:

    default     nobody says how many threads there are, nor how they wait for each other
    one         OMP_NUM_THREADS=1
    spinning    GOMP_SPINCOUNT=300000: what is the default of GCC's OpenMP, whatever else runs
    passive     OMP_WAIT_POLICY=passive

The busy processes spin, 0 to 3 for each core. A turn is --seconds of calls, one after another; told are the median of
all calls, and the 95th of 100. The exit code is 1 where at some load `default` takes more than 1.5 times as long as
`one`, or alone more than 1.05 times as long as `spinning`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import log, provenance, results_file, write  # noqa: E402

MOST_OF_ONE, MOST_OF_SPINNING = 1.5, 1.05
SPIN = "while True: pass"
# Answers a number of seconds on standard input with the latencies of calls for as long, and whether these saw that
# cores were busy.
QUERIES = """
import json, sys, time
import torch
import ftbert
model = ftbert.load(sys.argv[1], dtype=sys.argv[2])
ids = torch.randint(5, model.config.vocab, (1, int(sys.argv[3])))
def call():
    began = time.perf_counter()
    model(ids)
    return time.perf_counter() - began
with torch.inference_mode():
    for _ in range(20):
        call()
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        end, found = time.perf_counter() + float(line), []
        while time.perf_counter() < end:
            found.append(call())
        print(json.dumps([found, torch.ops.ftbert.busy_cores()["crowded"]]), flush=True)
"""


class Way:
    """A process that computes queries when it is its turn."""

    def __init__(self, name: str, environment: dict[str, str], options: argparse.Namespace, model: str) -> None:
        self.name = name
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "GOMP_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", QUERIES, model, options.dtype, str(options.tokens)], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        )  # fmt: skip
        self.read()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self.name}: the process ended with {self._process.wait()}")
        return json.loads(line)

    def turn(self, seconds: float) -> tuple[list[float], bool]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        latencies, crowded = self.read()
        return latencies, crowded


@contextmanager
def busy(count: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        time.sleep(1.0 if count else 0.0)  # until they all spin
        yield
    finally:
        for one in spinning:
            one.kill()
        for one in spinning:
            one.wait()


def measure(ways: list[Way], count: int, options: argparse.Namespace) -> dict[str, Any]:
    """At one load. ms, ms_95: the median, and what 95 of 100 calls take at most; calls; crowded: at the end."""
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    crowded: dict[str, bool] = {}
    with busy(count):
        for _ in range(options.rounds):
            for way in ways:
                latencies, crowded[way.name] = way.turn(options.seconds)
                found[way.name] += latencies
    rows = {
        name: {
            "ms": 1e3 * sorted(times)[len(times) // 2],
            "ms_95": 1e3 * sorted(times)[len(times) * 95 // 100],
            "calls": len(times),
            "crowded": crowded[name],
        }
        for name, times in found.items()
    }
    default = rows["default"]["ms"]
    ratios = {f"of_{name}": default / rows[name]["ms"] for name in ("one", "spinning")}
    return {"busy": count, **ratios, "ways": rows}


def model_folder(options: argparse.Namespace, into: str) -> str:
    """The one named, or one of MiniLM-L6's sizes with random weights."""
    if options.model is not None:
        return str(options.model)
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    )
    BertModel(config).save_pretrained(into)
    return into


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; without one MiniLM-L6 with random weights")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--tokens", type=int, default=16, help="of the query")
    parser.add_argument("--busy", type=int, nargs="+", help="numbers of processes; 0 to 3 for each core")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way at each load")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--json", action="store_true", help="print the document too")
    parser.add_argument("--out", type=Path, help="where the document goes")
    options = parser.parse_args()
    import torch

    cores = len(os.sched_getaffinity(0))
    counts = options.busy or [each * cores for each in range(4)]
    environments = {
        "default": {},
        "one": {"OMP_NUM_THREADS": "1"},
        "spinning": {"GOMP_SPINCOUNT": "300000"},
        "passive": {"OMP_WAIT_POLICY": "passive"},
    }
    whole = options.busy is None and options.dtype == "fp32" and options.rounds >= 5
    out = options.out or results_file(f"busy-cpu-{options.dtype}", whole)
    facts = provenance(torch.device("cpu"), options.dtype, tokens=options.tokens, threads=cores)
    document: dict[str, Any] = {"provenance": facts, "results": []}
    log(f"{'busy':>4} {'way':<8} {'median':>9} {'95 %':>9}  sees busy cores")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        model = model_folder(options, folder)
        ways = [running.enter_context(Way(name, more, options, model)) for name, more in environments.items()]
        for count in counts:
            result = measure(ways, count, options)
            document["results"].append(result)
            write(out, document)
            for name, row in result["ways"].items():
                sees = "yes" if row["crowded"] else ""
                log(f"{count:>4} {name:<8} {row['ms']:>6.1f} ms {row['ms_95']:>6.1f} ms  {sees}")
            log(f"     default is {result['of_one']:.2f} of one, {result['of_spinning']:.2f} of spinning")
    if options.json:
        print(json.dumps(document))
    log(f"written to {out}")
    slow = [one for one in document["results"] if one["of_one"] > MOST_OF_ONE]
    slow += [one for one in document["results"] if one["busy"] == 0 and one["of_spinning"] > MOST_OF_SPINNING]
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
