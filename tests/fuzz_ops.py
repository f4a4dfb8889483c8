"""Runs random calls (random_calls.py) in child processes, and counts: `python tests/fuzz_ops.py --count 20000 --seed 1`.

A call that ends the process is a crash, one that takes longer than 5 s a hang; both are reported with their seeds, which
`--seed N --count 1 --here` repeats in this process, and the run goes on behind them. Exits with 1 where there was one, or
an error of a kind that says nothing to a caller.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import select
import subprocess
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANG_S = 5.0
START_S = 120.0
MEMORY = 1 << 30  # that a child may take beyond what it has after the models are loaded
# What a caller can read. Anything else is a mistake of ours.
EXPECTED = ("RuntimeError", "ValueError", "TypeError", "IndexError", "NotImplementedError", "OutOfMemoryError")


@dataclass
class Report:
    """answers: how calls ended, by "returned" or the exception's name. The others: seed -> what is known of it."""

    answers: Counter[str] = field(default_factory=Counter)
    crashes: dict[int, str] = field(default_factory=dict)
    hangs: dict[int, str] = field(default_factory=dict)
    unclear: dict[int, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not (self.crashes or self.hangs or self.unclear)

    def __str__(self) -> str:
        lines = [f"{sum(self.answers.values())} calls: " + ", ".join(f"{n} {what}" for what, n in self.answers.most_common())]
        for what in ("crashes", "hangs", "unclear"):
            found: dict[int, str] = getattr(self, what)
            lines += [f"{len(found)} {what}", *(f"  seed {seed}: {text}" for seed, text in list(found.items())[:40])]
        return "\n".join(lines)


def answer(seed: int, device: str) -> tuple[str, str]:
    """Calls what the seed says: how it ended, and with which words."""
    import torch
    from random_calls import make_call

    name, function, arguments = make_call(seed, device)
    sys.stdout.write(f"{seed} {name}\n")
    sys.stdout.flush()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            function(*arguments)
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - what kinds there are is the question
            return type(error).__name__, f"{name}: {error}"
    return "returned", name


def _bound(device: str) -> None:
    if "asan" not in os.environ.get("LD_PRELOAD", "") and device == "cpu":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def child(first: int, calls: int, device: str) -> None:
    import torch
    from random_calls import make_call, models, without_positions

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    models(device), without_positions(device)
    _bound(device)  # a wild tensor of gigabytes is none
    for seed in range(64):  # what is imported late
        make_call(seed, device)
    _bound(device)
    for seed in range(first, first + calls):
        kind, text = answer(seed, device)
        sys.stdout.write(f"{seed} = {kind} {text[:200]!r}\n")
    sys.stdout.flush()


def _lines(process: Any) -> Any:
    """(line, or None after a silence that is too long), until the child ends."""
    waiting, rest = START_S, b""
    while True:
        if not select.select([process.stdout], [], [], waiting)[0]:
            yield None
            return
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()
        waiting = HANG_S


def run(first: int, calls: int, device: str = "cpu", progress: bool = False) -> Report:
    """Every seed from `first` on once, in as many children as it takes."""
    report, seed, end = Report(), first, first + calls
    spec = importlib.util.find_spec("ftbert")
    assert spec is not None and spec.origin is not None
    home = Path(spec.origin).parents[1]
    while seed < end:
        command = [sys.executable, __file__, "--child", "--seed", str(seed), "--count", str(end - seed), "--device", device]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=None if progress else subprocess.DEVNULL, cwd=home)
        name, started, hung = "(start)", time.monotonic(), False
        for line in _lines(process):
            if line is None:
                process.kill()
                hung = True
                break
            number, _, rest = line.partition(" ")
            if not rest.startswith("= "):
                seed, name = int(number), rest
                continue
            kind, _, text = rest[2:].partition(" ")
            report.answers[kind] += 1
            if kind not in ("returned", *EXPECTED):
                report.unclear[int(number)] = f"{kind} {text}"
            seed = int(number) + 1
            if progress and seed % 1000 == 0:
                print(f"{seed - first} calls, {time.monotonic() - started:.0f} s", flush=True)
        process.wait()
        if seed >= end:
            break
        if name == "(start)":
            raise RuntimeError(f"the child did not start: exit status {process.returncode}")
        (report.hangs if hung else report.crashes)[seed] = name if hung else f"{name}: exit status {process.returncode}"
        seed += 1
    return report


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # the package that is tested, as with `python -m pytest`
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first of so many seeds in a row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--here", action="store_true", help="in this process, with every answer shown")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.seed, asked.count, asked.device)
    elif asked.here:
        for one in range(asked.seed, asked.seed + asked.count):
            print(*answer(one, asked.device))
    else:
        result = run(asked.seed, asked.count, asked.device, progress=True)
        print(result)
        sys.exit(not result.clean)
