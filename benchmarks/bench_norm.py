"""The training norms of `ftbert.norm` beside those of PyTorch, torch.compile, Liger, quack and apex.

    python benchmarks/bench_norm.py --device cuda [--dtype bf16] [--out FILE]      some minutes on an H100
    python benchmarks/bench_norm.py --quick                                        small shapes, on the CPU

LayerNorm and RMSNorm, alone and with the residual's sum, on 16,384 rows of 256 to 6,144 columns and 4,096 of 8,192 and
32,768; BatchNorm with addend and ReLU on fp16 images; ReLU's gradient from a mask of bits. Forward is the pass of a
training step, with what it keeps for the backward pass. A time is the median of a CUDA graph of many calls, whose
buffers exceed the cache, peers in turns. GB/s count what must move (norm_cases.py); beside them is their share of a
large copy in this run. "kept" is what is held between the passes where nobody else holds x, in tensors like x; "peak"
is of both passes, with x and gradients. Outputs and gradients are compared with float64 first: a peer that differs, or
raises, is a row that says so. The file is written after every row. Tables of it: norm_tables.py; the picture:
norm_chart.py.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import DTYPES, attempt, bandwidth, log, provenance, results_file, write  # noqa: E402
from norm_cases import (  # noqa: E402
    COLUMNS,
    IMAGES,
    ROW_OPS,
    SMALL_IMAGES,
    Case,
    Operands,
    batch_cases,
    compare,
    row_cases,
)
from norm_peers import COMPILED, EFFICIENT, MAKERS, PLAIN, Functions, available, versions  # noqa: E402
from norm_relu import relu_row  # noqa: E402
from norm_tables import lines_of  # noqa: E402
from norm_timing import Passes, in_turns, memory, operand_sets, own_stream, record_copies, record_passes  # noqa: E402

SECTIONS = ("relu", "batch", "rows")
COMPILED_COLUMNS = (768, 1024, 4096, 8192)  # each width is compiled anew
COPY = "copy of x"


class Bench:
    """Peers on one device, and the document of what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device, self.dtype, self.rounds = torch.device(options.device), options.dtype, options.rounds
        self.peers, left_out = available(options.peer)
        self.compile_seconds = options.compile_seconds  # left
        facts = provenance(self.device, self.dtype, rounds=self.rounds)
        facts["packages"] |= versions()
        gpu = re.search(r"[A-Z]+\d+", facts.get("gpu", ""))
        name = f"norm-{gpu[0].lower() if gpu else self.device.type}-{self.dtype}"
        whole = not (options.quick or options.peer or options.section or options.columns or options.op)
        self.out = options.out or results_file(name, whole)
        self.document: dict[str, Any] = {
            "provenance": facts, "copy_gbs": bandwidth(self.device) / 1e9, "left_out": left_out, "rows": []
        }  # fmt: skip
        log(f"copy {self.document['copy_gbs']:,.0f} GB/s")
        for peer, why in left_out.items():
            print(f"{peer} is left out: {why}")

    def add(self, row: dict[str, Any]) -> None:
        self.document["rows"].append(row)
        print("\n".join(lines_of(row, self.document["copy_gbs"])), flush=True)
        write(self.out, self.document)

    def run(self, cases: Iterable[Case], compiled: Callable[[Case], bool]) -> None:
        for case in cases:
            peers = {name: functions for name, functions in self.peers.items() if case.op in functions}
            if not compiled(case):
                peers.pop(COMPILED, None)
            gc.collect()  # recordings of the case before hold gigabytes
            sets = operand_sets(case, self.device)
            rows: dict[str, dict[str, Any]] = {}
            runs = {(COPY, "forward"): record_copies(sets, self.device)}
            for name, functions in peers.items():
                found = self.prepare(case, name, functions, sets)
                rows[name] = {"failed": found} if isinstance(found, str) else found[0]
                if not isinstance(found, str):
                    runs |= {(name, "forward"): found[1].forward, (name, "backward"): found[1].backward}
                del found
            times = in_turns(runs, self.device, self.rounds)
            for (name, direction), of_all in times.items():
                each, tensors = of_all / len(sets), 2 if name == COPY else case.passes[direction == "backward"]
                row = rows.setdefault(name, {})
                row[f"{direction}_us"] = 1e6 * each
                row[f"{direction}_gbs"] = tensors * case.tensor / each / 1e9
            runs.clear()
            self.add({
                "op": case.op, "shape": case.shape, "dtype": str(sets[0].inputs[0].dtype).removeprefix("torch."),
                "tensor_bytes": case.tensor, "peers": rows,
            })  # fmt: skip

    def prepare(self, case: Case, name: str, functions: Functions, sets: list[Operands]) -> Any:
        """What is known of a peer before it is timed, and its recordings; or why it has none."""
        if name == COMPILED and self.compile_seconds <= 0:
            return "not compiled: the run's time for that was spent"
        began, sets = time.perf_counter(), [operands.with_own_buffers() for operands in sets]

        def prepared() -> tuple[dict[str, Any], Passes]:
            function = functions[case.op]
            facts = {"error": compare(case.op, function, sets[0])}
            return facts | memory(function, sets[0], self.device), record_passes(function, sets, self.device)

        found = attempt(prepared)
        if name == COMPILED:
            self.compile_seconds -= time.perf_counter() - began
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="repeatable (default: all)")
    parser.add_argument("--op", action="append", choices=ROW_OPS, help="of the rows, repeatable (default: all)")
    parser.add_argument("--columns", action="append", type=int, help="repeatable (default: 256 to 32,768)")
    parser.add_argument("--peer", action="append", choices=list(MAKERS), help="repeatable (default: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile-seconds", type=float, default=70, help="that torch.compile may take in all")
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/norm-GPU-DTYPE.json, "
                        "of a part out/bench-norm-GPU-DTYPE.json)")  # fmt: skip
    options = parser.parse_args(arguments)
    options.rounds = min(options.rounds, 3) if options.quick else options.rounds
    torch.manual_seed(0)
    began, bench = time.perf_counter(), Bench(options)
    gc.freeze()  # what was imported need not be looked at again
    for section in options.section or SECTIONS:
        with own_stream(bench.device):
            words = attempt(partial(run_section, bench, section, options))
        if words:
            print(f"{section}: failed: {words}")
            bench.document.setdefault("failed", {})[section] = words
        bench.document["seconds"] = time.perf_counter() - began
        write(bench.out, bench.document)
    log(f"wrote {bench.out} after {bench.document['seconds']:.0f} s")
    return int("failed" in bench.document or any(failures(bench.document["rows"])))


def run_section(bench: Bench, section: str, options: argparse.Namespace) -> None:
    if section == "relu":
        if PLAIN in bench.peers:
            shape = (2, 8, 14, 14) if options.quick else SMALL_IMAGES
            bench.add(relu_row(shape, bench.device, bench.rounds))
    elif section == "batch":
        dtype = torch.float16 if bench.device.type == "cuda" else torch.float32
        bench.run(batch_cases(bench.device, dtype, (4, 16, 8, 8) if options.quick else IMAGES), lambda case: True)
    else:
        columns = options.columns or ((256, 768) if options.quick else COLUMNS)
        rows, dtype = 128 if options.quick else None, DTYPES[bench.dtype]
        cases = row_cases(options.op or ROW_OPS, columns, bench.device, dtype, rows)
        bench.run(cases, lambda case: bool(options.columns) or case.shape[1] in COMPILED_COLUMNS)


def failures(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Of our own functions: what others cannot do is no failure of this run."""
    for row in rows:
        for name in (PLAIN, EFFICIENT):
            if words := row["peers"].get(name, {}).get("failed"):
                yield words


if __name__ == "__main__":
    sys.exit(main())
