"""GEMM tuning from Python: which algorithms a product has, how long each takes, which one a model would run.

    from ftbert.tuning import Bench, Product
    bench = Bench(Product("fp16", n=2304, k=768, bias=True), m=4096)
    for algorithm in bench.heuristics():
        print(algorithm, bench.microseconds(algorithm))
    print(bench.chosen())

`ftbert tune` (ftbert/tune.py) makes tables out of this; ftbert/gemm_table.py keeps them. Times are of a CUDA graph in
which the product runs on one weight matrix after another, more than the L2 cache holds, as in a model, and a LayerNorm
of a few rows follows each product; what the LayerNorms take alone is subtracted.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ftbert.config import ACTIVATIONS, DTYPES, EncoderConfig
from ftbert.gemm_rows import WITH_LAYERNORM, Point, Product, Row, at_waves, beside, followed_at_waves, waves
from ftbert.product_bench import Algorithm, Bench, Recording, in_turns

__all__ = [
    "Algorithm",
    "Bench",
    "Product",
    "ProductTuner",
    "Recording",
    "buckets",
    "in_turns",
    "products",
    "products_of_shape",
    "search",
]

_CONFIG = ("id", "tile", "stages", "split_k", "reduction", "swizzle", "custom", "inner_shape", "cluster")
_SEARCHED = (32, 128, 512, 1024, 2048, 4096, 8192)  # m
_ROUNDS = 9  # of the turns that finalists take
OTHER_16_BIT = {"fp16": "bf16", "bf16": "fp16"}


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
    """Of one layer: QKV, attention's output, and the two of the feed-forward block, where LayerNorm follows both."""
    return [
        Product(dtype, 3 * hidden, hidden, bias=True),
        Product(dtype, hidden, hidden, bias=True, layernorm=True),
        Product(dtype, inter, hidden, bias=True, activation=ACTIVATIONS.get(activation, activation)),
        Product(dtype, hidden, inter, bias=True, layernorm=True),
    ]


def without_layernorm(product: Product) -> Product:
    """The product that runs, the LayerNorm behind it, where none that contains it is faster; itself without one."""
    return replace(product, bias=False, layernorm=False) if product.layernorm else product


def search(
    bench: Bench, seeds: Iterable[Algorithm] = (), accepted: Sequence[Algorithm] = (), seed: int = 0
) -> list[Algorithm]:
    """The fastest of our own and of what cuBLASLt accepts, two of a tile at most, found by sampling: each tile with
    settings drawn and with those of the fastest, then the settings of the best tiles, then the neighbours of the best.
    Some 800 timings, half a second.

    accepted: what `bench.enumerate()` gives, where it is known from another m.
    """
    by_tile = _by_tile(accepted or bench.enumerate())
    timed = _explore(bench, [*bench.fused(), *seeds], by_tile, seed)
    return [algorithm for _, algorithm in _fastest(timed, 16, of_a_tile=2)]


_Timed = list[tuple[float, Algorithm]]  # microseconds
_ByTile = dict[tuple[int, int], list[Algorithm]]


def _fastest(timed: Iterable[tuple[float, Algorithm]], count: int, of_a_tile: int = 1000) -> _Timed:
    found: _Timed = []
    of_tile: dict[tuple[int, int], int] = defaultdict(int)
    for us, algorithm in sorted(timed, key=lambda pair: pair[0]):
        tile = algorithm.id, algorithm.tile
        if of_tile[tile] < of_a_tile and len(found) < count:
            of_tile[tile] += 1
            found.append((us, algorithm))
    return found


def _explore(bench: Bench, seeds: Iterable[Algorithm], by_tile: _ByTile, seed: int = 0) -> _Timed:
    """All that a search has timed, what cuBLASLt proposes and the seeds included."""
    draw = random.Random(seed)
    timed: dict[tuple[int, ...], tuple[float, Algorithm]] = {}

    def measure(candidates: Iterable[Algorithm]) -> None:
        new = {tuple(a.data): a for a in candidates if tuple(a.data) not in timed}
        for (key, algorithm), times in zip(new.items(), bench.times(list(new.values()), 1), strict=True):
            timed[key] = times[0], algorithm

    measure([*bench.heuristics(), *seeds])
    plain = [[algorithm for algorithm in group if algorithm.split_k == 1] or group for group in by_tile.values()]
    drawn = [draw.choice(group) for group in plain]
    measure(drawn)
    # Settings count for more than many a tile: each is seen with those of the fastest.
    if drawn:
        fastest = min(drawn, key=lambda algorithm: timed[tuple(algorithm.data)][0])
        measure(min(group, key=lambda other: _steps(other, fastest)) for group in plain)
    for _, algorithm in _fastest(timed.values(), 10, of_a_tile=1):
        group = by_tile.get((algorithm.id, algorithm.tile), [])
        measure(draw.sample(group, min(32, len(group))))
    for _ in range(2):
        for _, algorithm in _fastest(timed.values(), 3):
            measure(_neighbours(algorithm, by_tile))
    return list(timed.values())


def _by_tile(algorithms: Iterable[Algorithm]) -> _ByTile:
    found: _ByTile = defaultdict(list)
    for algorithm in algorithms:
        found[algorithm.id, algorithm.tile].append(algorithm)
    return found


def _neighbours(algorithm: Algorithm, by_tile: _ByTile) -> list[Algorithm]:
    """Of the same tile, different in one setting."""
    group = by_tile.get((algorithm.id, algorithm.tile), [])
    return [other for other in group if _steps(algorithm, other) == 1][:48]


def _waves(algorithm: Algorithm, m: int, n: int, sms: int) -> int:
    """How often all multiprocessors get a block. Blocks of 128x128 where cuBLASLt's header names no tile."""
    return waves(algorithm.tile_rows or 128, algorithm.tile_columns or 128, algorithm.split_k, m, n, sms)


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
    """Makes the rows of one product. A search at few m tells what each tile takes for one wave of blocks; between them,
    a tile's time is that times the waves it needs: a step at each m where one more begins."""

    def __init__(
        self,
        product: Product,
        device: int | str | torch.device = "cuda",
        known: Iterable[Row] = (),
        in_layer: Product | None = None,
    ) -> None:
        """known: rows of other tables. in_layer: the same product with the LayerNorm that follows it; it is then timed
        with that behind it, and known rows count that were: what is fastest without need not be the fastest with it."""
        self.product, self.device = product, device
        self._measured_as = in_layer or product
        twin = replace(product, dtype=OTHER_16_BIT.get(product.dtype, ""))
        followed = in_layer is not None
        known = list(known)
        # What was chosen in a layer need not be the fastest alone.
        self._known = [r for r in known if r.product == twin and (r.followed or not followed) and not r.in_layer]
        self._earlier = [row for row in known if row.product == product]
        self._config = {"followed": 1} if followed else {}
        self._named: dict[tuple[int, ...], Algorithm] = {}  # what cuBLASLt accepts, by its settings
        self._named_at: set[int] = set()  # powers of two
        self._tiles: _ByTile = {}  # what it accepts at the first m searched
        self._refined: set[tuple[int, int]] = set()  # tiles
        self._found: dict[int, _Timed] = {}
        self._recent: list[Algorithm] = []  # the finalists of the rows made last
        self._before: tuple[int, ...] | None = None  # the row made last
        self._made: dict[int, Row] = {}  # by the m timed
        self._winners: dict[tuple[int, ...], Algorithm] = {}

    def row(self, first: int, last: int) -> Row:
        """The row for m from first to last.

        The candidates are cuBLASLt's own proposals, its first ones also for fewer rows of the range, the best of the
        rows made before, and the tiles expected to be the fastest here, or where rows of the other 16-bit type cover
        this m, what they run around it, and what earlier rows of this product run; they are timed at `last`. Of a tile
        that is in front for the first time, other settings are timed too.
        A tie goes to the row before. The winner must be as accurate as cuBLASLt's first proposal, and in new turns
        faster by more than the measurement's noise; else that proposal is the row's.

        With a LayerNorm they are the products that contain it, and the winner must beat what the product without it
        runs in this process, followed by the LayerNorm. Raises NothingProposed.
        """
        bench = self._bench(last)
        default = bench.first_proposal()
        if self.product.layernorm:
            timed = self._quick(bench, self._own(bench))
            two_kernels = Bench(without_layernorm(self.product), last, self.device).chosen()
            return self._final(bench, first, default, [algorithm for _, algorithm in _fastest(timed, 3)], two_kernels)
        timed = self._quick(bench, self._candidates(bench, first))
        front = _fastest(timed, 1)[0][1]
        if (front.id, front.tile) not in self._refined:
            self._refined.add((front.id, front.tile))
            timed += self._quick(bench, _neighbours(front, self._tiles))
        return self._final(bench, first, default, [algorithm for _, algorithm in _fastest(timed, 5)])

    def again(self, first: int, last: int) -> Row | None:
        """The row for m from first to last, when those around it are made: the winners beside `last` that are expected
        to be as fast there as its own take turns with that. Where `last` has no row yet, those expected to be within
        2 % of the fastest, and tiles expected to beat them all by 1 %. None where there is nothing to compare."""
        if self.product.layernorm:
            return None if last in self._made else self.row(first, last)
        bench = self._bench(last)
        points = [Point(m, row.us[0], row) for m, row in sorted(self._made.items())]
        near = [point for skip in (0, 1) for point in beside(points, last, skip)]
        if not near:
            return None
        expected = {point.row.algorithm: point.us_at(last, bench.sms) for point in reversed(near)}
        own, least = self._made.get(last), min(expected.values())
        limit = own.us[0] if own else 1.02 * least
        best = [self._winners[words] for words, us in expected.items() if words is not None and us <= limit]
        tiles = [] if own or not self._found else self._expected(bench, best, 2, 0.99 * least)
        if len(best) + len(tiles) < 2:
            return None
        self._before = own.algorithm if own else None  # a tie is the row's own
        return self._final(bench, first, bench.first_proposal(), [*best, *tiles])

    def _final(
        self, bench: Bench, first: int, default: Algorithm, best: Iterable[Algorithm], rival: Algorithm | None = None
    ) -> Row:
        """The row of the winner among these, timed in turns, if it beats the rival in new ones: cuBLASLt's first
        proposal, if nobody else."""
        last, rival = bench.m, rival or default
        finalists = list({tuple(algorithm.data): algorithm for algorithm in (default, rival, *best)}.values())
        beaten = next(i for i, algorithm in enumerate(finalists) if tuple(algorithm.data) == tuple(rival.data))
        us = [statistics.median(times) for times in bench.times(finalists, _ROUNDS)]

        order = sorted(range(len(us)), key=us.__getitem__)
        tied = [i for i in order if us[i] <= 1.004 * us[order[0]] and tuple(finalists[i].data) == self._before]
        able = (i for i in [*tied, *order] if i == 0 or (us[i] <= us[0] and verified(bench, finalists[i])))
        winner = next(able, beaten)
        recent = {tuple(a.data): a for a in [*(finalists[i] for i in order), *self._recent]}
        self._recent = list(recent.values())[:8]

        # It is the least of several medians, and that is too low by chance: new turns decide.
        kept = sorted({0, beaten, winner})
        rounds = dict(zip(kept, bench.times([finalists[i] for i in kept], _ROUNDS), strict=True))
        medians = {i: statistics.median(times) for i, times in rounds.items()}
        ratios = [mine / other for mine, other in zip(rounds[winner], rounds[beaten], strict=True)]
        ratio = statistics.median(ratios)
        noise = 1.5 * statistics.median(abs(r - ratio) for r in ratios)
        if winner in (0, beaten) or ratio + max(noise, 0.003) >= 1 or medians[winner] > medians[0]:
            winner = beaten
        self._before = tuple(finalists[winner].data)
        if winner == beaten and self.product.layernorm:
            row = Row(self.product, first, last, None, (last,), (medians[beaten],), (medians[0],), self._config)
        else:  # also where it is cuBLASLt's first proposal: at the m beside this one that may be another
            algorithm = finalists[winner]
            row = row_of(self.product, algorithm, first, last, medians[winner], medians[0], self._config)
            self._winners[tuple(algorithm.data)] = algorithm
        self._made[last] = row
        return row

    def _bench(self, m: int) -> Bench:
        return Bench(self._measured_as, m, self.device)

    def _own(self, bench: Bench) -> list[Algorithm]:
        """ftbert's own products: with a LayerNorm those that contain it."""
        return [a for a in bench.fused() if (a.id == WITH_LAYERNORM) == self.product.layernorm]

    def _quick(self, bench: Bench, algorithms: list[Algorithm]) -> _Timed:
        times = bench.times(algorithms, 2, -(-bench.launches // 3))
        return [(min(of_one), algorithm) for of_one, algorithm in zip(times, algorithms, strict=True)]

    def _candidates(self, bench: Bench, first: int) -> list[Algorithm]:
        found = [*self._recent, *bench.heuristics()]
        # What it proposes first changes with every few rows (docs/tuning.md).
        for m in range(first, bench.m, max(8, (bench.m + 1 - first) // 8)):
            found += self._bench(m).heuristics(1 if m > first else 8)
        if known := self._of_the_other_type(bench):
            found += known
        else:
            found += self._expected(bench, self._recent)
        found += self._run_by(bench, [row for row in self._earlier if row.first <= bench.m and first <= row.last])
        return list({tuple(a.data): a for a in found}.values())

    def _expected(
        self, bench: Bench, like: Sequence[Algorithm], most: int = 10, limit: float = math.inf
    ) -> list[Algorithm]:
        """Of the tiles expected to be the fastest at this m, and faster than the limit: the best seen, and what has the
        settings of the first of `like`. most: of either search next to this m."""
        m, n = bench.m, self.product.n
        found: dict[tuple[int, ...], Algorithm] = {}
        for at in sorted(_SEARCHED, key=lambda at: abs(math.log(at / m)))[:2]:
            guesses = []
            for us, algorithm in _fastest(self._search(at), 10000, of_a_tile=1):
                timed, needed = (_waves(algorithm, rows, n, bench.sms) for rows in (at, m))
                guess = followed_at_waves(us, timed, needed, n, at, m) if self._config else at_waves(us, timed, needed)
                guesses.append((guess, algorithm))
            fastest = [algorithm for us, algorithm in _fastest(guesses, most) if us < limit]
            found |= {tuple(algorithm.data): algorithm for algorithm in fastest}
        settings = _settings(like[0])[2:] if like else ()
        same = [self._named.get((algorithm.id, algorithm.tile, *settings)) for algorithm in found.values()]
        return [*found.values(), *(algorithm for algorithm in same if algorithm)]

    def _of_the_other_type(self, bench: Bench) -> list[Algorithm]:
        """What its rows run from half this m to twice as much; nothing where no row covers this m. Rows with a product
        of ours that is no more do not count: what took its place would be left out."""
        able = {(algorithm.id, algorithm.tile) for algorithm in self._own(bench)}
        with_tiles = [(row, (row.config.get("id", 0), row.config.get("tile", 0))) for row in self._known]
        rows = [row for row, tile in with_tiles if tile[0] >= 0 or tile in able]
        if not any(row.first <= bench.m <= row.last for row in rows):
            return []
        return self._run_by(bench, [row for row in rows if 2 * row.last >= bench.m and row.first <= 2 * bench.m])

    def _run_by(self, bench: Bench, rows: Iterable[Row]) -> list[Algorithm]:
        """What these rows run, where this product has it."""
        better = [row.config for row in rows if row.algorithm is not None]
        tiles = {(config["id"], config["tile"]) for config in better if config.get("id", 0) < 0}
        own = [algorithm for algorithm in self._own(bench) if (algorithm.id, algorithm.tile) in tiles]
        wanted = dict.fromkeys(
            tuple(config.get(name, -1) for name in _CONFIG) for config in better if config.get("id", 0) >= 0
        )
        # An algorithm's bytes hold the data type, its settings do not: they are found again among what cuBLASLt accepts
        # here. A large m leaves some out, which smaller ones have: a split sum's parts must fit into the workspace.
        above = 1 << (bench.m - 1).bit_length()
        if above not in self._named_at and not wanted.keys() <= self._named.keys():
            self._named_at.add(above)
            self._named |= {_settings(algorithm): algorithm for algorithm in bench.enumerate()}
        return own + [self._named[settings] for settings in wanted if settings in self._named]

    def _search(self, m: int) -> _Timed:
        if m not in self._found:
            bench = self._bench(m)
            if not self._tiles:
                accepted = bench.enumerate()
                self._tiles = _by_tile(accepted)
                self._named |= {_settings(algorithm): algorithm for algorithm in accepted}
            self._found[m] = _explore(bench, [*self._own(bench), *self._recent], self._tiles)
        return self._found[m]


def _settings(algorithm: Algorithm) -> tuple[int, ...]:
    return tuple(int(getattr(algorithm, name)) for name in _CONFIG)


def row_of(
    product: Product, algorithm: Algorithm, first: int, last: int, us: float, default_us: float, config: dict[str, int]
) -> Row:
    """The row that says so; config: what it has beside the algorithm's settings."""
    settings = dict(zip(_CONFIG, _settings(algorithm), strict=True))
    settings |= {"tile_rows": algorithm.tile_rows, "tile_columns": algorithm.tile_columns} | config
    return Row(product, first, last, tuple(algorithm.data), (last,), (us,), (default_us,), settings)


def verified(bench: Bench, algorithm: Algorithm) -> bool:
    """As accurate as cuBLASLt's first proposal: rounding may differ, a wrong sum may not."""
    limit = 1.25 * bench.error(bench.first_proposal()) + torch.finfo(DTYPES[bench.product.dtype]).eps
    return bench.error(algorithm) <= limit
