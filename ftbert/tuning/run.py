"""`ftbert tune`: makes the tuned GEMM table of a model or a list of shapes, and reports what it brought."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftbert.dtypes import users_word
from ftbert.formats import formats
from ftbert.progress import Progress
from ftbert.tuning.gemm_rows import WITH_NORM, Product, Row, merge
from ftbert.tuning.gemm_table import (
    Machine,
    add_rows,
    in_force,
    install,
    is_known,
    put_in_force,
    read_table,
    sources,
)
from ftbert.tuning.product_bench import Bench, NothingProposed
from ftbert.tuning.product_tuner import ProductTuner, buckets, without_norm


@dataclass
class Tuned:
    """What a run of `tune` did. rows: all that the table has for the products asked for, earlier runs included."""

    path: Path
    machine: Machine
    rows: list[Row]
    made: int
    left: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "path": str(self.path),
            "gpu": self.machine.gpu,
            "cublaslt": self.machine.cublaslt,
            "made": self.made,
            "left": self.left,
            "seconds": self.seconds,
            "rows": [row.as_dict() | {"gain": row.gain} for row in self.rows],
        }

    def __str__(self) -> str:
        where = f"{self.machine.gpu}, {self.machine.cublaslt}"
        lines = [f"{self.made} rows in {self.seconds:.0f} s on {where}: {self.path}"]
        if self.left:
            lines.append(f"{self.left} ranges are left: the same command goes on with them")
        for product in sorted({row.product for row in self.rows}):
            rows = [row for row in self.rows if row.product == product]
            timed = sum(len(row.timed) for row in rows)
            better = sum(row.tuned for row in rows)
            lines.append(f"\n{product}: {better} of {timed} m gain")
            default = "by the rule" if product.scaled else "cuBLASLt's first"
            lines.append(f"  m               {default:>16}      tuned     gain")
            for row in rows:
                count = max(1, len(row.timed))
                shown = f"{row.gain:8.1%}" if row.tuned else "       -"
                lines.append(
                    f"  {f'{row.first}..{row.last}':<14}{sum(row.default_us) / count:14.2f} us"
                    f"{sum(row.us) / count:10.2f} us{shown}"
                )
        return "\n".join(lines)


def tune(
    wanted: Sequence[Product],
    path: Path,
    first: int,
    last: int,
    *,
    lengths: Sequence[int] | None = None,
    device: str | torch.device = "cuda",
    minutes: float = math.inf,
    force: bool = False,
) -> Tuned:
    """Tunes the `products` of a model for m from `first` to `last`, or for the ranges that hold one of `lengths`, into
    the table at `path` (models look at `user_table`).

    Meanwhile other models of this process run what a rule chooses: make them afterwards. Rows that the table has are
    kept (`force`: made again), new ranges are in the file within a second, and after `minutes` no further row is begun.
    Algorithms of cuBLASLt that it or the tables in force name for these products are candidates.
    Raises RuntimeError (no GPU, no CUDA in this build, too little memory), ValueError (an empty range, products that
    this GPU does not compute), OSError (path).
    """
    device = torch.device(device)
    machine = Machine.of(device)
    for product in wanted:
        stored = formats()[product.types[1]]
        if machine.capability < stored.first_gpu:
            word = users_word(stored.numbers)
            raise ValueError(
                f"products in {word} need compute capability {stored.capabilities}, and this is {machine.gpu}: use fp16"
            )
    if tables_are_off():
        warnings.warn("no model uses these rows while tables are switched off (FTBERT_GEMM_TABLE=off)", stacklevel=2)
    ranges = [(low, high) for low, high in buckets(first, last)
              if lengths is None or any(low <= m <= high for m in lengths)]  # fmt: skip
    if not ranges:
        raise ValueError(f"no token count to tune for lies in {first}..{last}")
    add_rows(path, machine, [])  # finds out now whether the file can be written
    table = [row for row in read_table(path)[1] if is_known(row)]
    known = merge(table, in_force(machine))
    with_norm = {without_norm(product): product for product in wanted if product.normed}
    plain = list(dict.fromkeys(without_norm(product) for product in wanted))
    norms = [product for product in with_norm.values()
             if any(algorithm.kernel in WITH_NORM for algorithm in Bench(product, 1, device).own())]  # fmt: skip
    tuners = {product: ProductTuner(product, device, known, with_norm.get(product)) for product in (*plain, *norms)}
    timed = set() if force else {(row.product, m) for row in table for m in row.timed}
    # From many rows to few; what contains a norm comes when all that it has to beat is made.
    steps = [(product, low, high) for kind in (plain, norms) for low, high in reversed(ranges)
             for product in kind if (product, high) not in timed]  # fmt: skip
    began = written = time.monotonic()
    done, made = 0, 0
    unwritten: list[Row] = []
    missing = set[Product]()  # those that cuBLASLt proposes nothing for at some m
    bar = Progress(len(steps), None, unit=" ranges", label="tune")

    def rows_of(product: Product, low: int, high: int) -> list[Row]:
        # What a row has to beat: the rule's choice, or with a norm what the product without it runs by now.
        put_in_force(device, [row for row in known if product.normed and not row.product.normed])
        try:
            return [tuners[product].row(low, high)]
        except NothingProposed as error:
            if product not in missing:
                warnings.warn(f"{error}: that m gets no row, nor do others of which this is true", stacklevel=3)
            missing.add(product)
            return []
        except torch.OutOfMemoryError:
            raise RuntimeError(
                f"out of GPU memory with {product} and m={high}: ask for fewer tokens; the rows made are in {path}"
            ) from None

    try:
        for product, low, high in steps:
            if time.monotonic() - began > 60 * minutes:
                break
            rows = rows_of(product, low, high)
            made += len(rows)
            unwritten, known = merge(rows, unwritten), merge(rows, known)
            done += 1
            bar.add(1, high)
            if time.monotonic() - written > 1:
                add_rows(path, machine, unwritten)
                unwritten, written = [], time.monotonic()
    finally:
        try:
            add_rows(path, machine, unwritten)
        finally:
            bar.close()
            install(device, again=True)
    rows = [row for row in read_table(path)[1] if row.product in tuners]
    return Tuned(path, machine, rows, made, len(steps) - done, time.monotonic() - began)


def tables_are_off() -> bool:
    """Whether models use none at all."""
    return os.environ.get("FTBERT_GEMM_TABLE") == "off"


def show(device: str | torch.device = "cuda") -> dict[str, Any]:
    """What is in force on this GPU and where it comes from."""
    machine = Machine.of(torch.device(device))
    rows = in_force(machine)
    return {
        "gpu": machine.gpu,
        "cublaslt": machine.cublaslt,
        "sources": [
            {"kind": s.kind, "path": str(s.path), "rows": len(s.rows), "ignored": s.problem} for s in sources(machine)
        ],
        "in_force": [
            {
                "product": str(product),
                "m": f"{min(r.first for r in mine)}..{max(r.last for r in mine)}",
                "rows": len(mine),
                "tuned": sum(bool(r.tuned) for r in mine),
                "default": _default(product),
            }
            for product in sorted({row.product for row in rows})
            if (mine := [row for row in rows if row.product == product])
        ],
    }


def _default(product: Product) -> str:
    """What a row whose algorithm is not faster names."""
    if product.scaled:
        return "the rule's choice"
    return "the product and then its norm" if product.normed else "cuBLASLt's first proposal"


def show_text(values: dict[str, Any]) -> str:
    """`show` for people."""
    lines = [f"{values['gpu']}, {values['cublaslt']}"]
    for source in values["sources"]:
        ignored = f"; {source['ignored']}" if source["ignored"] else ""
        lines.append(f"  {source['kind']:<20} {source['path']}: {source['rows']} rows{ignored}")
    if not values["sources"]:
        none = "tables are switched off (FTBERT_GEMM_TABLE=off)" if tables_are_off() else "no table"
        lines.append(f"  {none}: products are guessed; `ftbert tune` makes one")
    for entry in values["in_force"]:
        lines.append(
            f"  {entry['product']:<44} m {entry['m']:<12} {entry['tuned']} of {entry['rows']} ranges differ from "
            f"{entry['default']}"
        )
    return "\n".join(lines)
