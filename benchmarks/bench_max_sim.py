"""MaxSim of packed vectors beside the packages that are made for it, in turns.

    python benchmarks/bench_max_sim.py --device cuda --dtype fp16 [--out FILE]

Queries of 32 vectors and documents of 20 to 300, of 128 numbers, as a ColBERT's; one query that ranks documents, and
lists against lists. Peers are late-interaction-kernels (maxsim_varlen) and flash-maxsim (flash_maxsim_packed, one query
alone) where they are installed, and torch's product of padded vectors. Results are compared before they are timed: a
peer that differs, or raises, is a row that says so. Milliseconds are medians of a call among several on the stream,
operands warm; `ratio` is the peer's time by ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from machine import DTYPES, attempt, log, provenance, results_file, seconds, write  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import normalize  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402

from ftbert._library import load_library  # noqa: E402

POINTS = ((1, 100), (1, 1000), (1, 10000), (32, 1000), (128, 2000))  # queries, documents
QUERY, LENGTHS, WIDTH = 32, (20, 300), 128
Call = Callable[[], Tensor]


def operands(queries: int, documents: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Packed vectors of length 1 and their offsets."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTHS[0], LENGTHS[1] + 1, (documents,), generator=generator)
    q, d = (normalize(torch.randn(n, WIDTH, generator=generator)) for n in (queries * QUERY, int(lengths.sum())))
    cu_d = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    cu_q = torch.arange(0, queries * QUERY + 1, QUERY, dtype=torch.int32)
    return q.to(device, dtype), cu_q.to(device), d.to(device, dtype), cu_d.to(device)


def peers(q: Tensor, cu_q: Tensor, d: Tensor, cu_d: Tensor) -> Iterator[tuple[str, Callable[[], Call]]]:
    """What gives a call that scores all documents by all queries."""
    queries, longest = len(cu_q) - 1, int(cu_d.diff().max())

    def padded() -> Call:
        rows = pad_sequence(list(d.split(cu_d.diff().tolist())), batch_first=True)
        gap = torch.arange(longest, device=d.device) >= cu_d.diff()[:, None]
        some = q.view(queries, QUERY, WIDTH)

        def call() -> Tensor:
            found = [
                torch.einsum("ih,dth->dit", one, rows).masked_fill(gap[:, None], -torch.inf).amax(-1).float().sum(-1)
                for one in some
            ]
            return torch.stack(found)

        return call

    def varlen() -> Call:
        from late_interaction_kernels import maxsim_varlen

        return lambda: maxsim_varlen(q, d, cu_q, cu_d, QUERY, longest)  # type: ignore[no-any-return]

    def packed() -> Call:
        from flash_maxsim import flash_maxsim_packed

        return lambda: flash_maxsim_packed(q, d, cu_d, longest)[None]  # type: ignore[no-any-return]

    yield "torch, padded", padded
    if d.device.type == "cuda":
        yield "late-interaction-kernels", varlen
        if queries == 1:
            yield "flash-maxsim", packed


def measure(
    queries: int, documents: int, device: torch.device, dtype: torch.dtype, rounds: int
) -> Iterator[dict[str, Any]]:
    given = operands(queries, documents, device, dtype)
    ours: Call = lambda: torch.ops.ftbert.max_sim(*given)  # noqa: E731
    want = ours()
    for name, make in peers(*given):
        row: dict[str, Any] = {"queries": queries, "documents": documents, "peer": name}
        theirs = attempt(make)
        error = theirs if isinstance(theirs, str) else attempt(lambda call=theirs: float((call() - want).abs().max()))
        if isinstance(error, str) or not error < 0.1:
            yield row | {"failed": error if isinstance(error, str) else f"differs by {error:.1e}"}
            continue
        repeats = max(1, int(0.02 / max(1e-6, seconds(ours, device))))
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(rounds):
            for key, call in (("ours", ours), ("theirs", theirs)):
                times[key].append(1e3 * seconds(call, device, repeats))
        mine, other = (statistics.median(times[key]) for key in ("ours", "theirs"))
        yield row | {"ours_ms": mine, "theirs_ms": other, "ratio": other / mine, "difference": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most", type=int, default=0, help="documents of a point at most; 0: all points")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    load_library()
    out = arguments.out or results_file(f"max-sim-{device.type}-{arguments.dtype}", whole=not arguments.most)
    rows: list[dict[str, Any]] = []
    for queries, documents in POINTS:
        if arguments.most and documents > arguments.most:
            continue
        for row in measure(queries, documents, device, dtype, arguments.rounds):
            rows.append(row)
            told = row.get("failed") or f"{row['ours_ms']:.3f} ms, theirs {row['theirs_ms']:.3f}: {row['ratio']:.2f}"
            log(f"{queries:4} x {documents:5}  {row['peer']:26} {told}")
            shape = {"query": QUERY, "lengths": LENGTHS, "width": WIDTH}
            write(out, {"provenance": provenance(device, arguments.dtype), **shape, "rows": rows})
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
