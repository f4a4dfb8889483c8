"""`ftbert tune`: makes the tuned GEMM table of a model or a list of shapes, and reports what it brought."""

from __future__ import annotations

import math
import os
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ftbert import tuning
from ftbert.gemm_rows import WITH_LAYERNORM, Product, Row, merge
from ftbert.gemm_table import (
    Machine,
    add_rows,
    in_force,
    install,
    put_in_force,
    read_table,
    sources,
    tuner_module,
    user_table,
)
from ftbert.layer_tuning import MOST_ROWS, Layer, LayerTuner, layers_of
from ftbert.product_bench import NO_TUNER, NothingProposed
from ftbert.progress import Progress
from ftbert.tuning import ProductTuner, buckets, without_layernorm

NOTHING_ON_CPU = (
    "on the CPU there is nothing to tune: oneDNN picks its kernels when a product first runs, weights are repacked "
    "wherever that is possible, and the number of threads is torch's (torch.set_num_threads, OMP_NUM_THREADS)"
)


@dataclass
class Tuned:
    """What a run of `tune` did. rows: all that the table has for the products asked for, earlier runs included.
    seen_once: ranges that a thorough run did not look at a second time, since the table had them or time was over.
    in_layers: ranges at which whole layers were timed; layer_gains: of those where other products than those so far
    make a layer faster."""

    path: Path
    machine: Machine
    rows: list[Row]
    made: int
    left: int
    seconds: float
    seen_once: int = 0
    in_layers: int = 0
    layer_gains: Sequence[float] = ()

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "path": str(self.path),
            "gpu": self.machine.gpu,
            "cublaslt": self.machine.cublaslt,
            "made": self.made,
            "left": self.left,
            "seen_once": self.seen_once,
            "seconds": self.seconds,
            "in_layers": self.in_layers,
            "layer_gains": list(self.layer_gains),
            "rows": [row.as_dict() | {"gain": row.gain} for row in self.rows],
        }

    def __str__(self) -> str:
        where = f"{self.machine.gpu}, {self.machine.cublaslt}"
        lines = [f"{self.made} rows in {self.seconds:.0f} s on {where}: {self.path}"]
        if self.left:
            lines.append(f"{self.left} ranges are left: the same command goes on with them")
        if self.seen_once:
            lines.append(f"{self.seen_once} ranges were not looked at a second time: with --force they are made again")
        if self.layer_gains:
            lines.append(
                f"in {len(self.layer_gains)} of {self.in_layers} ranges whole layers are faster with other products "
                f"than with those so far: by {statistics.median(self.layer_gains):.1%} in the median, "
                f"{max(self.layer_gains):.1%} at most"
            )
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
    wanted: Iterable[Product],
    first: int = 1,
    last: int = 16384,
    *,
    lengths: Sequence[int] | None = None,
    device: str | torch.device = "cuda",
    minutes: float = math.inf,
    path: Path | None = None,
    force: bool = False,
    thorough: bool = False,
    whole_layers: bool = True,
    show_progress_bar: bool | None = None,
) -> Tuned:
    """Tunes these products for m from `first` to `last`, or for the ranges that hold one of `lengths`.

    thorough: then looks again at the rows that this run made, with what their neighbours have won with, and between
    them; takes nearly twice as long. Rows that the table had are not looked at again, nor are those of a run that was
    interrupted (`force` makes them anew).
    whole_layers: up to 1024 rows the four products of a layer are then chosen together, where LayerNorms can be folded
    into them; False for models where they never are. Meanwhile other models of this process run what their products are
    guessed to run best with: make them afterwards. A failure of this part is a warning.
    path: the table; default: the user's cache folder, where models find it. Rows that it has are kept (`force`: made
    again), new ranges are in the file within a second, and after `minutes` no further row is begun. Rows that it or the
    tables in force have for the same products in the other 16-bit type save the search; those for the products
    themselves are candidates. Raises RuntimeError (no GPU, no CUDA in this build, too little memory), ValueError (an
    empty range), OSError (path).
    """
    device = torch.device(device)
    machine = Machine.of(device)
    if not 1 <= first <= last:
        raise ValueError(f"tokens: expected 1 <= first <= last, got {first}..{last}")
    if thorough and tuner_module() is None:
        raise RuntimeError(NO_TUNER)
    path = table_path(machine, path)
    if tables_are_off():
        warnings.warn("no model uses these rows while tables are switched off (FTBERT_GEMM_TABLE=off)", stacklevel=2)
    wanted = list(dict.fromkeys(wanted))
    ranges = buckets(first, last)
    if lengths is not None:
        ranges = [(low, high) for low, high in ranges if any(low <= m <= high for m in lengths)]
        if not ranges:
            raise ValueError(f"none of the {len(lengths)} token counts of these texts lies in {first}..{last}")
        if outside := sum(not any(low <= m <= high for low, high in ranges) for m in lengths):
            of = f"{outside} of the {len(lengths)} token counts of these texts"
            warnings.warn(f"{of} lie outside {first}..{last} and get no rows", stacklevel=2)
    add_rows(path, machine, [])  # finds out now whether the file can be written
    table = read_table(path)[1]
    in_files = in_force(machine)
    known = merge(table, in_files)
    # Those with a LayerNorm come when the rows that they have to beat are made.
    plain = list(dict.fromkeys(without_layernorm(p) for p in wanted))
    norms = [p for p in wanted if p.layernorm and _may_contain_layernorm(p, device, path)]
    in_layer = {without_layernorm(product): product for product in wanted if product.layernorm}
    # Times without the LayerNorm that follows here, of a model that has it elsewhere, do not count; those with it count
    # for both models.
    have = {(row.product, m) for row in table for m in row.timed
            if not force and (row.followed or row.product not in in_layer)}  # fmt: skip
    layers = _layer_tuners(wanted, device, known) if whole_layers else {}
    able = dict(layers)  # those that have not failed
    wanted = [*plain, *norms]
    tuners = {product: ProductTuner(product, device, known, in_layer.get(product)) for product in wanted}
    together = [_Step(layer.down, low, high, layer=layer) for low, high in reversed(ranges) for layer in layers
                if high <= MOST_ROWS and (force or not _seen_in_layer(table, layer, high))]  # fmt: skip
    first_looks = {p: [(low, high) for low, high in reversed(ranges) if (p, high) not in have] for p in wanted}
    steps = _in_order(first_looks, together, thorough)
    began, done, unwritten = time.monotonic(), 0, list[Row]()
    written, beaten_in_force = began, False
    left_out = set[tuple[Product, int]]()  # ranges by their last m: cuBLASLt proposes nothing there
    bar = Progress(len(steps), show_progress_bar, unit=" ranges", label="tune")

    def write() -> None:
        nonlocal unwritten, written
        add_rows(path, machine, unwritten)
        unwritten, written = [], time.monotonic()

    def all_rows() -> list[Row]:
        return merge(unwritten, merge(read_table(path)[1], in_files))

    def rows_of(step: _Step) -> list[Row]:
        nonlocal beaten_in_force
        if step.layer is not None:
            whole = not any((product, step.high) in left_out for product in step.layer.plain)
            return _or_warning(able, step, all_rows()) if whole else []
        if step.product.layernorm and not beaten_in_force:
            put_in_force(torch.cuda.current_device() if device.index is None else device.index, all_rows())
            beaten_in_force = True
        look = tuners[step.product].again if step.again else tuners[step.product].row
        with _memory_named(step.product, step.high, path):
            try:
                row = look(step.low, step.high)
            except NothingProposed as error:
                leave_out(step, error)
                return []
        return [row] if row else []

    def leave_out(step: _Step, error: NothingProposed) -> None:
        if all(product != step.product for product, _ in left_out):
            warnings.warn(f"{error}: that m gets no row, nor do others of which this is true", stacklevel=4)
        if not step.again:
            left_out.add((step.product, step.high))

    try:
        for step in steps:
            if time.monotonic() - began > 60 * minutes:
                break
            unwritten = merge(rows_of(step), unwritten)
            done += 1
            bar.add(1, step.high)
            # The products of a range are written with what is chosen for its layers.
            ended = done == len(steps) or steps[done].low != step.low
            if ended and time.monotonic() - written > 1:
                write()
    finally:
        try:
            try:
                write()
            except KeyboardInterrupt:  # pressed once more: what is not in the file now is lost
                write()
                raise
        finally:
            bar.close()
            install(device, again=True)
    rows = [row for row in read_table(path)[1] if row.product in set(wanted)]
    asked = sum(not step.again and step.layer is None for step in steps)
    made = sum(not step.again and step.layer is None for step in steps[:done])
    left = sum(not step.again for step in steps[done:])
    unseen = {(step.product, step.low) for step in steps[done:] if step.again}
    seen_once = len(ranges) * len(wanted) - asked + len(unseen) - (asked - made) if thorough else 0
    seen = sum(tuner.seen for tuner in layers.values())
    gains = [gain for tuner in layers.values() for gain in tuner.gains]
    return Tuned(path, machine, rows, made - len(left_out), left, time.monotonic() - began, seen_once, seen, gains)


def table_path(machine: Machine, path: Path | None = None) -> Path:
    """Where `tune` writes: this file, or the user's."""
    path = path or user_table(machine)
    if path is None:
        raise ValueError("the cache is switched off (FTBERT_CACHE=off): say where the table shall go (--out)")
    return path


def tables_are_off() -> bool:
    """Whether models use none at all."""
    return os.environ.get("FTBERT_GEMM_TABLE") == "off"


@dataclass(frozen=True)
class _Step:
    """A row to be made, or looked at again. layer: instead the rows of its products, looked at together."""

    product: Product
    low: int
    high: int
    again: bool = False
    layer: Layer | None = None


def _in_order(first_looks: dict[Product, list[tuple[int, int]]], together: list[_Step], thorough: bool) -> list[_Step]:
    """From many rows to few; those that contain a LayerNorm when what they have to beat is made. A range's layers come
    behind its products, so that a run cut short leaves few that wait for theirs; second looks need all first ones."""
    steps = []
    for norms in (False, True):
        looks = [(p, *step) for p, ranges in first_looks.items() if p.layernorm == norms for step in ranges]
        made, layers = [_Step(*look) for look in looks], [] if norms else together
        if thorough:
            again = [_Step(p, *step, again=True) for p, low, high in looks for step in _second_looks(low, high)]
            steps += [*sorted(made, key=_downwards), *sorted(again, key=_downwards), *layers]
        else:
            steps += sorted([*made, *layers], key=_downwards)
    return steps


def _downwards(step: _Step) -> int:
    return -step.high


def _may_contain_layernorm(product: Product, device: torch.device, path: Path) -> bool:
    with _memory_named(product, 1, path):
        return any(algorithm.id == WITH_LAYERNORM for algorithm in tuning.Bench(product, 1, device).fused())


def _layer_tuners(wanted: Iterable[Product], device: torch.device, known: list[Row]) -> dict[Layer, LayerTuner]:
    found = {}
    for layer in layers_of(wanted):
        try:
            tuner = LayerTuner(layer, device, known)
            if tuner.can_fold():
                found[layer] = tuner
        except RuntimeError as error:
            _warn_of_layers(error)
    return found


def _or_warning(able: dict[Layer, LayerTuner], step: _Step, in_force: list[Row]) -> list[Row]:
    """The layer's rows; where that fails, none, nor of its other ranges: its products have theirs without it."""
    if step.layer is None or step.layer not in able:
        return []
    try:
        return able[step.layer].rows(step.low, step.high, in_force)
    except RuntimeError as error:
        _warn_of_layers(error)
        del able[step.layer]
        return []


def _warn_of_layers(error: RuntimeError) -> None:
    warnings.warn(f"the products of a layer are not chosen together: {error}", stacklevel=4)


def _seen_in_layer(table: Iterable[Row], layer: Layer, m: int) -> bool:
    seen = {row.product for row in table if row.in_layer and m in row.timed}
    return seen.issuperset(layer.plain)


@contextmanager
def _memory_named(product: Product, m: int, path: Path) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise RuntimeError(
            f"out of GPU memory with {product} and m={m}: ask for fewer tokens; the rows made are in {path}"
        ) from None


def _second_looks(low: int, high: int) -> list[tuple[int, int]]:
    """The whole range, then what of it ends at the smaller m that the encoder runs: each replaces what it covers."""
    ends = sorted({min(tuner_module().rows(m), high) for m in range(low, high + 1)}, reverse=True)
    return [(low, end) for end in ends]


def show(device: str | torch.device = "cuda") -> dict[str, Any]:
    """What is in force on this GPU and where it comes from."""
    machine = Machine.of(torch.device(device))
    found = sources(machine)
    rows = in_force(machine)
    return {
        "gpu": machine.gpu,
        "cublaslt": machine.cublaslt,
        "sources": [
            {"kind": s.kind, "path": str(s.path), "rows": len(s.rows), "ignored": s.problem} for s in found
        ],
        "user_table": None if (path := user_table(machine)) is None else str(path),
        "switched_off": tables_are_off(),
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
        state = f"ignored: {source['ignored']}" if source["ignored"] else f"{source['rows']} rows"
        lines.append(f"  {source['kind']:<20} {source['path']}: {state}")
    if not values["sources"]:
        none = "tables are switched off (FTBERT_GEMM_TABLE=off)" if values["switched_off"] else "no table"
        makes = f"would write {values['user_table']}" if values["user_table"] else "needs --out (FTBERT_CACHE=off)"
        lines.append(f"  {none}: products are guessed; `ftbert tune` {makes}")
    for entry in values["in_force"]:
        lines.append(
            f"  {entry['product']:<44} m {entry['m']:<12} {entry['tuned']} of {entry['rows']} ranges differ from "
            f"{entry['default']}"
        )
    return "\n".join(lines)
