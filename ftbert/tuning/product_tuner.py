"""Which algorithms a product has, how long each takes, and the row of the table that follows. docs/tuning.md.

Times are of a CUDA graph in which the product runs on one weight matrix after another, more than the L2 cache holds, as
in a model, and a LayerNorm of a few rows follows each product; what the LayerNorms take alone is subtracted.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch

from ftbert.checkpoint import EncoderConfig, activations
from ftbert.dtypes import DTYPES
from ftbert.tuning.gemm_rows import WITH_LAYERNORM, Own, Product, Row
from ftbert.tuning.product_bench import Algorithm, Bench, choice_of, is_faster

_CONFIG = ("id", "tile", "stages", "split_k", "reduction", "swizzle", "custom", "inner_shape", "cluster")
_SEARCHED = (32, 128, 512, 1024, 2048, 4096, 8192)  # m
_FINALISTS = 5
_ROUNDS = 15  # of the turns that these take


def products(config: EncoderConfig, dtype: str) -> list[Product]:
    """The linear layers that this encoder runs per token, each once."""
    found = products_of_shape(config.hidden, config.inter, config.activation, dtype)
    if config.norm_place == "pre":
        # Its LayerNorm also keeps the sum.
        found = [without_layernorm(product) for product in found]
    if config.head_size not in (32, 64, 128):
        found[0] = Product(dtype, 3 * config.hidden, config.hidden)  # the general attention path adds the bias itself
    if config.embedding_projection:
        found.append(Product(dtype, config.hidden, config.embedding, bias=True))
    return found


def products_of_shape(hidden: int, inter: int, activation: str, dtype: str) -> list[Product]:
    """Of one layer: QKV, attention's output, and the two of the feed-forward block, where LayerNorm follows both.

    ValueError for an activation that the core does not know."""
    if activation not in activations():
        raise ValueError(f"activation must be one of {', '.join(activations())}; got {activation!r}")
    return [
        Product(dtype, 3 * hidden, hidden, bias=True),
        Product(dtype, hidden, hidden, bias=True, layernorm=True),
        Product(dtype, inter, hidden, bias=True, activation=activations()[activation]),
        Product(dtype, hidden, inter, bias=True, layernorm=True),
    ]


def without_layernorm(product: Product) -> Product:
    """The product that runs, the LayerNorm behind it, where none that contains it is faster; itself without one."""
    return replace(product, bias=False, layernorm=False) if product.layernorm else product


_Timed = list[tuple[float, Algorithm]]  # microseconds


def search(bench: Bench, seeds: Iterable[Algorithm] = ()) -> list[Algorithm]:
    """The fastest of ftbert's own kernels and of what a sampled search finds of cuBLASLt's, two of a tile at most."""
    own = bench.own()
    timed = [(us, algorithm) for (us,), algorithm in zip(bench.times(own, 1), own, strict=True)]
    return _fastest([*timed, *_sampled(bench, seeds, bench.enumerate())], 16, of_a_tile=2)


def _sampled(bench: Bench, seeds: Iterable[Algorithm], accepted: Iterable[Algorithm]) -> _Timed:
    """Some 800 of what cuBLASLt accepts, half a second: its proposals, each tile with settings drawn and with those of
    the fastest, then settings of the best tiles, then the neighbours of the best."""
    draw, by_tile = random.Random(0), defaultdict[tuple[int, int] | Own, list[Algorithm]](list)
    for algorithm in accepted:
        by_tile[_tile(algorithm)].append(algorithm)
    timed: dict[Own | tuple[int, ...], tuple[float, Algorithm]] = {}

    def measure(candidates: Iterable[Algorithm]) -> None:
        new = {choice_of(a): a for a in candidates if choice_of(a) not in timed}
        for (key, algorithm), times in zip(new.items(), bench.times(list(new.values()), 1), strict=True):
            timed[key] = times[0], algorithm

    measure([*bench.heuristics(), *seeds])
    plain = [[algorithm for algorithm in group if algorithm.split_k == 1] or group for group in by_tile.values()]
    drawn = [draw.choice(group) for group in plain]
    measure(drawn)
    # Settings count for more than many a tile: each is seen with those of the fastest.
    if drawn:
        fastest = min(drawn, key=lambda algorithm: timed[choice_of(algorithm)][0])
        measure(min(group, key=lambda other: _steps(other, fastest)) for group in plain)
    for algorithm in _fastest(timed.values(), 10, of_a_tile=1):
        group = by_tile.get(_tile(algorithm), [])
        measure(draw.sample(group, min(32, len(group))))
    for _ in range(2):
        for algorithm in _fastest(timed.values(), 3):
            group = by_tile.get(_tile(algorithm), [])
            measure([other for other in group if _steps(algorithm, other) == 1][:48])
    return list(timed.values())


def _fastest(timed: Iterable[tuple[float, Algorithm]], count: int, of_a_tile: int = 1000) -> list[Algorithm]:
    found = []
    of_tile: dict[tuple[int, int] | Own, int] = defaultdict(int)
    for _, algorithm in sorted(timed, key=lambda pair: pair[0]):
        of_tile[_tile(algorithm)] += 1
        if of_tile[_tile(algorithm)] <= of_a_tile:
            found.append(algorithm)
    return found[:count]


def _tile(algorithm: Algorithm) -> tuple[int, int] | Own:
    return Own(algorithm.kernel, algorithm.variant) if algorithm.kernel else (algorithm.id, algorithm.tile)


def _steps(one: Algorithm, other: Algorithm) -> int:
    """In how many settings two algorithms differ; a split sum and how it is added count as one."""
    return sum(getattr(one, name) != getattr(other, name) for name in _CONFIG if name != "reduction")


def buckets(first: int, last: int) -> list[tuple[int, int]]:
    """Ranges of m that share a choice, timed at their last m. The encoder rounds m up (cuda_gemm_rows in
    csrc/gemm/gemm.h): to that m, or above 1024 to the middle of the range, above 8192 to a quarter of it, above 16384
    to a multiple of 64, where that is enough."""
    edges = [8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    while edges[-1] < last:
        at = edges[-1]
        edges.append(at + (64 if at < 4096 else 128 if at < 8192 else 256 if at < 16384 else at // 2048 * 64))
    ranges = [(low + 1, high) for low, high in zip([0, *edges], edges, strict=False)]
    return [(low, high) for low, high in ranges if high >= first and low <= last]


class ProductTuner:
    """Makes the rows of one product, one after the other: what won before is a candidate."""

    def __init__(
        self,
        product: Product,
        device: str | torch.device = "cuda",
        known: Iterable[Row] = (),
        in_layer: Product | None = None,
    ) -> None:
        """known: rows of other tables. in_layer: the same product with the LayerNorm that follows it; it is then timed
        with that behind it: what is fastest without need not be the fastest with it."""
        self.product, self.device = product, device
        self._measured_as = in_layer or product
        self._config = {"followed": 1} if in_layer else {}
        self._known = [row for row in known if row.product == product]
        self._run_by_known = set(map(_settings_of_row, self._known))
        self._named: dict[tuple[int, ...], Algorithm] = {}  # what known rows run, by its settings
        self._searched: dict[int, list[Algorithm]] = {}  # by m
        self._winners: dict[Own | tuple[int, ...], Algorithm] = {}

    def row(self, first: int, last: int) -> Row:
        """The row for m from first to last.

        The candidates are ftbert's own kernels, cuBLASLt's proposals, the fastest of the searches next to this m, what
        won before and what known rows of this m run; they are timed at `last`, in a quick round first. The winner must
        be as accurate as cuBLASLt's first proposal and faster by more than the measurement's noise; else that proposal
        is the row's.

        With a LayerNorm they are the kernels that contain it, and the winner must beat what the product without it
        runs in this process, followed by the LayerNorm. Raises NothingProposed.
        """
        bench = Bench(self._measured_as, last, self.device)
        rivals = [bench.first_proposal()]
        candidates = [a for a in bench.own() if (a.kernel == WITH_LAYERNORM) == self.product.layernorm]
        if self.product.layernorm:
            rivals.append(Bench(without_layernorm(self.product), last, self.device).chosen())
        else:
            candidates += self._of_cublaslt(bench, first)
        candidates = list({choice_of(a): a for a in candidates if choice_of(a) != choice_of(rivals[0])}.values())
        quick = bench.times(candidates, 2, -(-bench.launches // 3))
        best = _fastest(zip(map(min, quick), candidates, strict=True), _FINALISTS)
        turns = bench.times([*rivals, *best], _ROUNDS)
        us = [statistics.median(times) for times in turns]
        able = (
            i for i in sorted(range(len(rivals), len(us)), key=us.__getitem__)
            if is_faster(turns[i], turns[len(rivals) - 1]) and verified(bench, best[i - len(rivals)])
        )  # fmt: skip
        winner = next(able, len(rivals) - 1)
        if self.product.layernorm and winner < len(rivals):
            return Row(self.product, first, last, None, (last,), (us[winner],), (us[0],), self._config)
        # Also where it is cuBLASLt's first proposal: at the m beside this one that may be another.
        algorithm = [*rivals, *best][winner]
        self._winners[choice_of(algorithm)] = algorithm
        return row_of(self.product, algorithm, first, last, us[winner], us[0], self._config)

    def _of_cublaslt(self, bench: Bench, first: int) -> list[Algorithm]:
        near = sorted(_SEARCHED, key=lambda at: abs(math.log(at / bench.m)))[:2]
        found = [algorithm for m in near for algorithm in self._search(m)]
        here = [_settings_of_row(row) for row in self._known if row.first <= bench.m and first <= row.last]
        known = [self._named[settings] for settings in here if settings in self._named]
        return [*bench.heuristics(), *self._winners.values(), *found, *known]

    def _search(self, m: int) -> list[Algorithm]:
        if m not in self._searched:
            bench = Bench(self._measured_as, m, self.device)
            accepted = bench.enumerate()
            self._named |= {key: a for a in accepted if (key := _settings(a)) in self._run_by_known}
            seeds = [algorithm for algorithm in self._winners.values() if not algorithm.kernel]
            self._searched[m] = _fastest(_sampled(bench, seeds, accepted), 16, of_a_tile=2)
        return self._searched[m]


def _settings(algorithm: Algorithm) -> tuple[int, ...]:
    return tuple(int(getattr(algorithm, name)) for name in _CONFIG)


def _settings_of_row(row: Row) -> tuple[int, ...]:
    return tuple(row.config.get(name, -1) for name in _CONFIG)


def row_of(
    product: Product, algorithm: Algorithm, first: int, last: int, us: float, default_us: float, config: dict[str, int]
) -> Row:
    """The row that says so; config: what it has beside the settings of cuBLASLt's algorithm."""
    settings: dict[str, int] = {}
    if not algorithm.kernel:
        settings |= zip(_CONFIG, _settings(algorithm), strict=True)
        settings |= {"tile_rows": algorithm.tile_rows, "tile_columns": algorithm.tile_columns}
    return Row(product, first, last, choice_of(algorithm), (last,), (us,), (default_us,), settings | config)


def verified(bench: Bench, algorithm: Algorithm) -> bool:
    """As accurate as cuBLASLt's first proposal: rounding may differ, a wrong sum may not."""
    limit = 1.25 * bench.error(bench.first_proposal()) + torch.finfo(DTYPES[bench.product.dtype]).eps
    return bench.error(algorithm) <= limit
