"""The products of a layer chosen together, where its LayerNorms are deferred to them (csrc/layers/deferred_norm.h).

A product alone is timed with a LayerNorm kernel behind it. Where all four of a layer's are of those that do without
(wgmma_tile of csrc/gemm/own), no kernel lies between them, each holds up the start of the next, and others win:
BERT-large at 256 tokens, 0.735 ms with the products that are the fastest one by one, 0.674 ms with these (H200).
"""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ftbert.checkpoint import EncoderConfig
from ftbert.dtypes import DTYPES
from ftbert.tuning import gemm_table
from ftbert.tuning.gemm_rows import WGMMA_TILE, Product, Row
from ftbert.tuning.product_bench import Algorithm, Bench, choice_of, in_turns, is_faster
from ftbert.tuning.product_tuner import row_of, verified, without_layernorm

MOST_ROWS = 1024  # up to which LayerNorms are deferred (most_tokens_by_default in csrc/layers/deferred_norm_cuda.cpp)
_MOST_HIDDEN = 4096  # kMostColumns in csrc/gemm/own/deferred_norm.h
_WEIGHT_BYTES = 80 << 20  # of the layers timed, where 12 have as much: more than an L2 cache holds, as in a model
_SEQUENCE = 128  # tokens, at most
_REPLAYS_US = 1000  # of a measurement
_NEAR = 1.5  # how much slower than the fastest a product alone may be, and
_MOST_OF_A_PRODUCT = 10
_OTHER_16_BIT = {"fp16": "bf16", "bf16": "fp16"}


class Layer(NamedTuple):
    """A layer's products; LayerNorm follows the second and the fourth."""

    qkv: Product
    out: Product
    up: Product
    down: Product

    @property
    def plain(self) -> list[Product]:
        """What runs where LayerNorms are not contained in products."""
        return [without_layernorm(product) for product in self]


def layer_of(products: Sequence[Product]) -> Layer | None:
    """The layer of a model's `products`, in 16 bits and with LayerNorm behind its blocks; None where there is no such,
    or products that occur twice in it."""
    layer = Layer(*products[:4])
    hidden = layer.out.n
    fits = layer.out.dtype != "fp32" and layer.qkv.bias and layer.out.layernorm and len({*layer}) == 4
    return layer if fits and hidden % 32 == 0 and hidden <= _MOST_HIDDEN else None


class Alone(NamedTuple):
    """One of ftbert's products by itself, LayerNorm behind it. default_us: of cuBLASLt's first proposal."""

    us: float
    algorithm: Algorithm
    default_us: float


class Layers:
    """Some layers of random weights in an encoder of their own, timed whole."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        hidden, inter = layer.out.n, layer.up.n
        size = 2 * (4 * hidden * hidden + 2 * hidden * inter)
        head = 64 if hidden % 64 == 0 else 32
        config = EncoderConfig(
            vocab=1024, hidden=hidden, layers=min(12, max(4, -(-_WEIGHT_BYTES // size))), heads=hidden // head,
            head_size=head, inter=inter, embedding=hidden, max_positions=_SEQUENCE, token_types=1, padding_id=0,
            layer_norm_eps=1e-12, activation=layer.up.activation,
        )  # fmt: skip
        draw, dtype = torch.Generator(device).manual_seed(0), DTYPES[layer.out.dtype]
        weights = {}
        for name, shape in torch.ops.ftbert.weight_shapes(config.entries()).items():
            spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
            drawn = torch.randn(shape, device=device, generator=draw) * spread
            weights[name] = (drawn + name.endswith("norm.weight")).to(dtype)
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._encoder = torch.classes.ftbert.Encoder(weights, config.entries(), "auto")
        self._encoder.use_cuda_graphs(False)

    def defers_norms(self, rows: Iterable[Row], m: int) -> bool:
        """Whether LayerNorms are deferred at m with the products of these rows, which stay in force.
        $FTBERT_DEFERRED_NORM may say no."""
        gemm_table.put_in_force(self._index, rows)
        sizes = re.findall(r"(\d+) to (\d+)", self._encoder.info()["deferred_layernorm"])
        return any(int(first) <= m <= int(last) for first, last in sizes)

    def record(self, rows: Iterable[Row], m: int) -> RecordedLayers:
        """With the products of these rows, which stay in force."""
        gemm_table.put_in_force(self._index, rows)
        with torch.cuda.device(self._index):
            return RecordedLayers(self._encoder, m, self._device)


class RecordedLayers:
    """Layers in a CUDA graph. result: [m, hidden]."""

    def __init__(self, encoder: Any, m: int, device: torch.device) -> None:
        ids = torch.arange(m, device=device) % 1024
        ends = [*range(0, m, _SEQUENCE), m]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        call = (encoder, ids, None, None, cu_seqlens, min(m, _SEQUENCE), ["tokens"])
        torch.ops.ftbert.forward_batch(*call)  # plans are made
        self._inputs = ids, cu_seqlens
        self._graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what it destroys may spoil a recording
        try:
            # A stream of this device: torch's own for graphs is of the device that was current first.
            with torch.cuda.graph(self._graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
                self.result = torch.ops.ftbert.forward_batch(*call)[0]
        finally:
            if collecting:
                gc.enable()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._graph.replay()
        self._replays = 1
        self._replays = max(2, min(40, round(_REPLAYS_US / self.microseconds())))

    def microseconds(self) -> float:
        """Of one pass."""
        begin, end = self._events
        with torch.cuda.device(self.result.device):
            begin.record()
            for _ in range(self._replays):
                self._graph.replay()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / self._replays


class LayerTuner:
    """Makes the rows of a layer's products anew where that makes the layer faster."""

    def __init__(self, layer: Layer, device: torch.device, known: Iterable[Row] = ()) -> None:
        """known: rows of other tables; what was chosen before, in either 16-bit type, is where a search may begin."""
        self.layer, self._device = layer, device
        self.layers = Layers(layer, device)
        known, dtype = list(known), layer.out.dtype
        twins = [replace(row, product=replace(row.product, dtype=dtype)) for row in known
                 if row.product.dtype == _OTHER_16_BIT[dtype]]  # fmt: skip
        self._known = [known, twins]

    def can_defer_norms(self) -> bool:
        """Whether LayerNorms are deferred at any m where this GPU's products for that run."""
        able = [_deferring(Bench(product, 1, self._device)) for product in self.layer.plain]
        if not all(able):
            return False
        rows = [Row(product, 1, MOST_ROWS, choice_of(own[0]))
                for product, own in zip(self.layer.plain, able, strict=True)]  # fmt: skip
        return self.layers.defers_norms(rows, 1)

    def rows(self, first: int, last: int, in_force: Iterable[Row]) -> list[Row]:
        """The rows of the four products for m from first to last, all marked as seen in their layer, or none where
        LayerNorms are not deferred.

        in_force: the rows so far. They stay unless others make the layer faster by more than the noise: those of the
        products that defer LayerNorms which are not much slower alone take turns, one product after the other.
        Together, alone, they must be no slower than cuBLASLt's first proposals, and each as accurate; and what the
        layers give must be the same but for rounding."""

        def here(rows: Iterable[Row]) -> list[Row]:
            return [row.part(max(first, row.first), min(last, row.last)) for row in rows
                    if row.product in (*self.layer, *self.layer.plain)
                    and row.first <= last and first <= row.last]  # fmt: skip

        able = [self._able(product, last) for product in self.layer]
        if not all(able):
            return []
        before = here(in_force)
        starts = [self._choice(able, rows) for rows in (before, *map(here, self._known))]
        if not self.layers.defers_norms(self._as_rows(starts[0], first, last), last):
            return []
        different = [start for i, start in enumerate(starts) if start not in starts[:i]]
        found = self._faster(self._descend(able, different, first, last), first, last, before)
        if found is None:
            found = [row for row in before if row.product in self.layer.plain]
        return [replace(row, config=row.config | {"in_layer": 1}) for row in found]

    def _choice(self, able: list[list[Alone]], rows: Sequence[Row]) -> list[Alone]:
        """What these rows run, where that defers LayerNorms; else what is the fastest alone."""
        found = []
        for product, alone in zip(self.layer.plain, able, strict=True):
            choice = next((row.algorithm for row in rows if row.product == product), None)
            found.append(next((own for own in alone if choice_of(own.algorithm) == choice), alone[0]))
        return found

    def _faster(self, choice: list[Alone], first: int, last: int, before: list[Row]) -> list[Row] | None:
        """The rows of this choice if they pass; None: `before` stays."""
        if sum(own.us for own in choice) > sum(own.default_us for own in choice):
            return None
        rows = self._as_rows(choice, first, last)
        one, other = (self.layers.record(these, last) for these in (before, rows))
        theirs, mine = in_turns([one, other], 9)
        if not is_faster(mine, theirs) or not same(one.result, other.result):
            return None
        accurate = (verified(Bench(product, last, self._device), own.algorithm)
                    for product, own in zip(self.layer.plain, choice, strict=True))  # fmt: skip
        return rows if all(accurate) else None

    def _able(self, product: Product, m: int) -> list[Alone]:
        """The products that defer LayerNorms, those fastest alone first."""
        bench = Bench(product, m, self._device)
        own = _deferring(bench)
        *mine, default = (min(times) for times in bench.times([*own, bench.first_proposal()], 3))
        alone = sorted(zip(mine, own, strict=True), key=lambda pair: pair[0])[:_MOST_OF_A_PRODUCT]
        return [Alone(us, algorithm, default) for us, algorithm in alone if us <= _NEAR * alone[0][0]]

    def _descend(self, able: list[list[Alone]], starts: list[list[Alone]], first: int, last: int) -> list[Alone]:
        """From the best start to a better choice by exchanging one product at a time."""

        def us(choice: list[Alone]) -> float:
            recorded = self.layers.record(self._as_rows(choice, first, last), last)
            return min(recorded.microseconds() for _ in range(3))

        best, now = min(((us(start), start) for start in starts), key=lambda pair: pair[0])
        near = [list(alone) for alone in able]
        for _ in range(2):
            began = best
            for i in (3, 0, 2, 1):
                times = {now[i].algorithm.variant: best}
                for own in near[i]:
                    if own.algorithm.variant == now[i].algorithm.variant:
                        continue
                    times[own.algorithm.variant] = taken = us([*now[:i], own, *now[i + 1 :]])
                    if taken < 0.996 * best:
                        best, now = taken, [*now[:i], own, *now[i + 1 :]]
                near[i] = [own for own in near[i] if times.get(own.algorithm.variant, math.inf) < 1.03 * best]
            if best == began:
                break
        return now

    def _as_rows(self, choice: list[Alone], first: int, last: int) -> list[Row]:
        return [
            row_of(plain, own.algorithm, first, last, own.us, own.default_us, {"followed": 1} if it.layernorm else {})
            for it, plain, own in zip(self.layer, self.layer.plain, choice, strict=True)
        ]


def _deferring(bench: Bench) -> list[Algorithm]:
    """Those that can do without a LayerNorm kernel between them."""
    return [algorithm for algorithm in bench.own() if algorithm.kernel == WGMMA_TILE]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether results behind some layers, [m, hidden] of about 1, differ by no more than 16 bits make of the order of
    sums: in no row and in no column by more on average."""
    difference, limit = (one.float() - other.float()).abs(), 24 * torch.finfo(one.dtype).eps
    return bool((difference.mean(1) <= limit).all() and (difference.mean(0) <= limit).all())  # False for NaN
