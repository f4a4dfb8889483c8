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

from ftbert.progress import Progress
from ftbert.tuning.gemm_rows import WITH_LAYERNORM, Product, Row, merge
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
from ftbert.tuning.layer_tuner import MOST_ROWS, Layer, LayerTuner, layer_of
from ftbert.tuning.product_bench import Bench, NothingProposed
from ftbert.tuning.product_tuner import ProductTuner, buckets, without_layernorm


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
            lines.append("  m               cuBLASLt's first      tuned     gain")
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
    whole_layers: bool = True,
) -> Tuned:
    """Tunes the `products` of a model for m from `first` to `last`, or for the ranges that hold one of `lengths`, into
    the table at `path` (models look at `user_table`).

    whole_layers: up to 1024 rows the four products of a layer are then chosen together, where LayerNorms can be
    deferred to them; False for models where they never are. Meanwhile other models of this process run what their
    products are guessed to run best with: make them afterwards. A failure of this part is a warning.
    Rows that the table has are kept (`force`: made again), new ranges are in the file within a second, and after
    `minutes` no further row is begun. Rows that it or the tables in force have for these products are candidates.
    Raises RuntimeError (no GPU, no CUDA in this build, too little memory), ValueError (an empty range), OSError (path).
    """
    device = torch.device(device)
    machine = Machine.of(device)
    if tables_are_off():
        warnings.warn("no model uses these rows while tables are switched off (FTBERT_GEMM_TABLE=off)", stacklevel=2)
    ranges = [(low, high) for low, high in buckets(first, last)
              if lengths is None or any(low <= m <= high for m in lengths)]  # fmt: skip
    if not ranges:
        raise ValueError(f"no token count to tune for lies in {first}..{last}")
    add_rows(path, machine, [])  # finds out now whether the file can be written
    table = [row for row in read_table(path)[1] if is_known(row)]
    known = merge(table, in_force(machine))
    in_layer = {without_layernorm(product): product for product in wanted if product.layernorm}
    plain = list(dict.fromkeys(without_layernorm(product) for product in wanted))
    norms = [product for product in in_layer.values()
             if any(algorithm.kernel == WITH_LAYERNORM for algorithm in Bench(product, 1, device).own())]  # fmt: skip
    tuners = {product: ProductTuner(product, device, known, in_layer.get(product)) for product in (*plain, *norms)}
    layer = layer_of(wanted) if whole_layers else None
    layer_tuner = _layer_tuner(layer, device, known) if layer else None

    # Times without the LayerNorm that follows here, of a model that has it elsewhere, do not count.
    timed = {(row.product, m) for row in table for m in row.timed if row.followed or row.product not in in_layer}
    timed_in_layer = {(row.product, m) for row in table for m in row.timed if row.in_layer}

    def is_due(each: Product | Layer, m: int) -> bool:
        if isinstance(each, Layer):
            return m <= MOST_ROWS and (force or not timed_in_layer.issuperset((product, m) for product in each.plain))
        return force or (each, m) not in timed

    # From many rows to few, a range's layers behind its products; what contains a LayerNorm comes when all that it has
    # to beat is made.
    kinds: list[list[Product | Layer]] = [[*plain, *([layer] if layer and layer_tuner else [])], [*norms]]
    steps = [(each, low, high) for kind in kinds for low, high in reversed(ranges)
             for each in kind if is_due(each, high)]  # fmt: skip
    began = written = time.monotonic()
    done, made = 0, 0
    unwritten: list[Row] = []
    missing = set[Product]()  # those that cuBLASLt proposes nothing for at some m
    bar = Progress(len(steps), None, unit=" ranges", label="tune")

    def layer_rows(layer: Layer, low: int, high: int) -> list[Row]:
        """None where it fails, nor for its other ranges: its products have theirs without it."""
        nonlocal layer_tuner
        if not layer_tuner or not {r.product for r in known if r.first <= high <= r.last} >= {*layer.plain}:
            return []
        try:
            return layer_tuner.rows(low, high, known)
        except RuntimeError as error:
            _warn_of_layers(error)
            layer_tuner = None
            return []

    def product_rows(product: Product, low: int, high: int) -> list[Row]:
        if product.layernorm:  # has to beat what the product without it runs by now
            put_in_force(torch.cuda.current_device() if device.index is None else device.index, known)
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
        for each, low, high in steps:
            if time.monotonic() - began > 60 * minutes:
                break
            if isinstance(each, Layer):
                rows = layer_rows(each, low, high)
            else:
                rows = product_rows(each, low, high)
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


def _layer_tuner(layer: Layer, device: torch.device, known: list[Row]) -> LayerTuner | None:
    try:
        tuner = LayerTuner(layer, device, known)
        return tuner if tuner.can_defer_norms() else None
    except RuntimeError as error:
        _warn_of_layers(error)
        return None


def _warn_of_layers(error: RuntimeError) -> None:
    warnings.warn(f"the products of a layer are not chosen together: {error}", stacklevel=4)


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
                "default": "the product and then LayerNorm" if product.layernorm else "cuBLASLt's first proposal",
            }
            for product in sorted({row.product for row in rows})
            if (mine := [row for row in rows if row.product == product])
        ],
    }


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
