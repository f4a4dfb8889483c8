"""The products of a layer chosen together, where its LayerNorms are folded into them (csrc/folded_layers.h).

A product alone is timed with a LayerNorm kernel behind it. Where all four of a layer's are of those that do without
(csrc/gemm/gemm_few_cuda.cu), no kernel lies between them, each holds up the start of the next, and others win:
BERT-large at 256 tokens, 0.735 ms with the products that are the fastest one by one, 0.674 ms with these (H200).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ftbert import gemm_table
from ftbert.config import ACTIVATIONS, DTYPES, EncoderConfig
from ftbert.gemm_rows import Product, Row
from ftbert.product_bench import Algorithm, in_turns
from ftbert.tuning import Bench, row_of, verified, without_layernorm

MOST = 1024  # rows up to which the encoder folds (most_tokens_by_default in csrc/folded_layers_cuda.cpp)
_WEIGHT_BYTES = 80 << 20  # of the layers timed: more than an H100's L2 cache holds
_SEQUENCE = 128  # tokens, at most
_REPLAYS_US = 1000  # of a measurement
_NEAR = 1.5  # how much slower than the fastest a product alone may be, and
_MOST_OF_A_PRODUCT = 10


class Layer(NamedTuple):
    """A layer's products; LayerNorm follows the second and the fourth."""

    qkv: Product
    out: Product
    up: Product
    down: Product

    @property
    def plain(self) -> list[Product]:
        """What runs where LayerNorms are not contained in products."""
        return [without_layernorm(product) if product.layernorm else product for product in self]


def layers_of(products: Iterable[Product]) -> list[Layer]:
    """The layers that can be put together from these, in 16 bits and LayerNorm behind its blocks."""
    wanted = list(products)
    found = []
    for out in wanted:
        hidden = out.n
        qkv = Product(out.dtype, 3 * hidden, hidden, bias=True)
        if out.dtype == "fp32" or not out.layernorm or out.k != hidden or hidden % 32 or qkv not in wanted:
            continue
        for up in wanted:
            down = Product(out.dtype, hidden, up.n, bias=True, layernorm=True)
            first = Product(out.dtype, up.n, hidden, bias=True, activation=up.activation)
            if up == first and up != qkv and down in wanted:
                found.append(Layer(qkv, out, up, down))
    return found


def can_fold(layer: Layer, device: torch.device) -> bool:
    """Whether this GPU has products for that."""
    return all(any(a.folds for a in Bench(product, 1, device).fused()) for product in layer.plain)


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
        names = {kernel: name for name, kernel in reversed(ACTIVATIONS.items())}
        config = EncoderConfig(
            vocab=1024, hidden=hidden, layers=min(12, max(4, -(-_WEIGHT_BYTES // size))), heads=hidden // head,
            head_size=head, inter=inter, embedding=hidden, max_positions=_SEQUENCE, token_types=1, padding_id=0,
            layer_norm_eps=1e-12, activation=names[layer.up.activation],
        )  # fmt: skip
        draw, dtype = torch.Generator(device).manual_seed(0), DTYPES[layer.out.dtype]
        weights = {}
        for name, shape in torch.ops.ftbert.weight_shapes(config.entries()).items():
            spread = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
            drawn = torch.randn(shape, device=device, generator=draw) * spread
            weights[name] = (drawn + name.endswith("norm.weight")).to(dtype)
        self.layers = config.layers
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._encoder = torch.classes.ftbert.Encoder(weights, config.entries(), "auto")
        self._encoder.use_cuda_graphs(False)

    def folds(self, rows: Iterable[Row]) -> bool:
        """Whether these rows lead to folded LayerNorms (FTBERT_FOLDED_NORM may say no)."""
        gemm_table.put_in_force(self._index, rows)
        return bool(self._encoder.info()["folded_layernorm"].startswith("of "))

    def record(self, rows: Iterable[Row], m: int) -> RecordedLayers:
        """With the products of these rows, which stay in force."""
        gemm_table.put_in_force(self._index, rows)
        return RecordedLayers(self._encoder, m, self._device)


class RecordedLayers:
    """Layers in a CUDA graph. result: [m, hidden]."""

    def __init__(self, encoder: Any, m: int, device: torch.device) -> None:
        ids = torch.arange(m, device=device) % 1024
        ends = [*range(0, m, _SEQUENCE), m]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        call = (encoder, ids, cu_seqlens, min(m, _SEQUENCE), None)
        torch.ops.ftbert.forward_packed(*call)  # plans are made
        self._inputs = ids, cu_seqlens
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = torch.ops.ftbert.forward_packed(*call)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._graph.replay()
        self._replays = 1
        self._replays = max(2, min(40, round(_REPLAYS_US / self.microseconds())))

    def microseconds(self) -> float:
        """Of one pass."""
        begin, end = self._events
        begin.record()
        for _ in range(self._replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / self._replays


class LayerTuner:
    """Makes the rows of a layer's products anew where that makes the layer faster."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.layer, self._device = layer, device
        self._layers: Layers | None = None
        self.gains: list[float] = []  # of the ranges that got other products: 0.1 is 10 % faster

    def rows(self, first: int, last: int, in_force: Iterable[Row]) -> list[Row]:
        """The rows of the four products for m from first to last, all marked as seen in their layer; in_force: those
        so far, which stay unless others are faster by more than the noise, one product after the other exchanged for
        each of those that are not much slower alone; no slower together, alone, than cuBLASLt's first proposals;
        each as accurate as these; and equal in what the layers give."""
        if self._layers is None:
            self._layers = Layers(self.layer, self._device)
        before = [row.part(max(first, row.first), min(last, row.last))
                  for row in in_force if row.product in (*self.layer, *self.layer.plain)
                  and row.first <= last and first <= row.last]  # fmt: skip
        found = self._fastest(first, last, before)
        if found is None:
            found = [row for row in before if row.product in self.layer.plain]
        return [replace(row, config=row.config | {"in_layer": 1}) for row in found]

    def _fastest(self, first: int, last: int, before: list[Row]) -> list[Row] | None:
        """None: `before` stays."""
        assert self._layers is not None
        able = [self._able(product, last) for product in self.layer]
        now = []
        for product, alone in zip(self.layer.plain, able, strict=True):
            words = next((row.algorithm for row in before if row.product == product), None)
            now.append(next((own for own in alone if tuple(own.algorithm.data) == words), alone[0]))
        if not self._layers.folds(self._as_rows(now, first, last)):
            return None
        now = self._descend(able, now, first, last)
        if sum(own.us for own in now) > sum(own.default_us for own in now):
            return None
        rows = self._as_rows(now, first, last)
        one, other = (self._layers.record(choice, last) for choice in (before, rows))
        ratios = [mine / theirs for theirs, mine in zip(*in_turns([one, other], 9), strict=True)]
        ratio = statistics.median(ratios)
        noise = 1.5 * statistics.median(abs(r - ratio) for r in ratios)
        right = all(verified(Bench(product, last, self._device), own.algorithm)
                    for product, own in zip(self.layer.plain, now, strict=True))  # fmt: skip
        if ratio + max(noise, 0.003) >= 1 or not right or not same(one.result, other.result):
            return None
        self.gains.append(1 / ratio - 1)
        return rows

    def _able(self, product: Product, m: int) -> list[Alone]:
        """The products that fold, those fastest alone first."""
        bench = Bench(product, m, self._device)
        own = [algorithm for algorithm in bench.fused() if algorithm.folds]
        *mine, default = (min(times) for times in bench.times([*own, bench.heuristics(1)[0]], 3))
        alone = sorted(zip(mine, own, strict=True), key=lambda pair: pair[0])[:_MOST_OF_A_PRODUCT]
        return [Alone(us, algorithm, default) for us, algorithm in alone if us <= _NEAR * alone[0][0]]

    def _descend(self, able: list[list[Alone]], now: list[Alone], first: int, last: int) -> list[Alone]:
        """From one choice to a better one by exchanging one product at a time."""

        def us(choice: list[Alone]) -> float:
            assert self._layers is not None
            recorded = self._layers.record(self._as_rows(choice, first, last), last)
            return min(recorded.microseconds() for _ in range(3))

        best, near = us(now), [list(alone) for alone in able]
        for _ in range(2):
            began = best
            for i in (3, 0, 2, 1):
                times = {}
                for own in near[i]:
                    if own.algorithm.tile == now[i].algorithm.tile:
                        continue
                    times[own.algorithm.tile] = taken = us([*now[:i], own, *now[i + 1 :]])
                    if taken < 0.996 * best:
                        best, now = taken, [*now[:i], own, *now[i + 1 :]]
                near[i] = [own for own in near[i] if times.get(own.algorithm.tile, math.inf) < 1.03 * best]
            if best == began:
                break
        return now

    def _as_rows(self, choice: list[Alone], first: int, last: int) -> list[Row]:
        return [
            row_of(product, own.algorithm, first, last, own.us, own.default_us, {"followed": 1} if normed else {})
            for product, own, normed in zip(self.layer.plain, choice, (p.layernorm for p in self.layer), strict=True)
        ]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether results behind some layers differ by no more than 16 bits make of the order of sums."""
    difference, eps = (one.float() - other.float()).abs(), torch.finfo(one.dtype).eps
    return bool(difference.mean() <= 8 * eps)  # False for NaN
