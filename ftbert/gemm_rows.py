"""Rows of tuned GEMM tables: what was measured of a product, and what that lets expect between the measured m."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from ftbert.config import DTYPES

WITH_LAYERNORM = -2  # the id of an algorithm that contains it
_EMPTY_US = 1.5  # a kernel that does nothing, in a graph
_LAYERNORM_BYTES_PER_US = 3.5e6  # of an H200's LayerNorm: three 16-bit elements read or written for each of its own
_MOST = (1 << 31) - 1  # of rows, columns and whatever else is counted
_SPARSE = 1 << 18  # rows of a range that nobody times closely enough to expect something between
_TILE = ("tile_rows", "tile_columns", "split_k")
_ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh")


class TableError(ValueError):
    """The file is no table of ours; the words say why."""


@dataclass(frozen=True, order=True)
class Product:
    """A linear layer's product [m, k] @ [n, k]^T and what comes with it. dtype: fp32, fp16 or bf16. activation: gelu
    (erf), gelu_tanh, relu, silu or tanh; what cuBLASLt does not compute exactly follows it as add_bias_act. layernorm:
    with the residual and its LayerNorm, which follow as add_bias_input_layernorm or are contained."""

    dtype: str
    n: int
    k: int
    bias: bool = False
    activation: str = "none"
    layernorm: bool = False

    def __str__(self) -> str:
        parts = ["bias"] * self.bias + [self.activation] * (self.activation != "none") + ["layernorm"] * self.layernorm
        epilogue = "+".join(parts) or "no epilogue"
        return f"{self.dtype} n={self.n} k={self.k} {epilogue}"


@dataclass(frozen=True)
class Row:
    """One product for m from `first` to `last`, both included. algorithm: cublasLtMatmulAlgo_t as 8 words of 64 bit, or
    one of ftbert's own products (config's id is negative, its tile the variant), or None: with a LayerNorm what the
    product without it runs was not beaten; without one, in tables made before, cuBLASLt's first proposal was not.
    us, default_us: microseconds at the m of `timed`, where config's followed is 1 with the LayerNorm that follows the
    product in a layer; where its in_layer is 1, the algorithm was chosen by the time of whole layers."""

    product: Product
    first: int
    last: int
    algorithm: tuple[int, ...] | None
    timed: tuple[int, ...] = ()
    us: tuple[float, ...] = ()
    default_us: tuple[float, ...] = ()
    config: dict[str, int] = field(default_factory=dict)

    @property
    def followed(self) -> bool:
        """Whether the LayerNorm that follows the product in a layer is in its times."""
        return bool(self.config.get("followed"))

    @property
    def is_own(self) -> bool:
        """Whether it names a product of ftbert's own, which any cuBLASLt leaves as it is."""
        return self.config.get("id", 0) < 0

    @property
    def in_layer(self) -> bool:
        """Whether it was compared by the time of whole layers."""
        return bool(self.config.get("in_layer"))

    @property
    def gain(self) -> float:
        """How much faster than cuBLASLt's first proposals: 0.1 is 10 %."""
        return sum(self.default_us) / sum(self.us) - 1 if self.us else 0.0

    @property
    def tuned(self) -> int:
        """At how many of the timed m its own algorithm is faster than those."""
        if self.algorithm is None:
            return 0
        return sum(us < default for us, default in zip(self.us, self.default_us, strict=True))

    def part(self, first: int, last: int) -> Row:
        """The same for fewer m."""
        kept = [i for i, m in enumerate(self.timed) if first <= m <= last]
        timed = tuple(self.timed[i] for i in kept)
        us, default_us = (tuple(values[i] for i in kept) for values in (self.us, self.default_us))
        return replace(self, first=first, last=last, timed=timed, us=us, default_us=default_us)

    def as_dict(self) -> dict[str, Any]:
        """What stands in the file."""
        words = None if self.algorithm is None else _hex(self.algorithm)
        values = asdict(self) | {"algorithm": words, "timed": list(self.timed)}
        values |= {key: [round(us, 2) for us in values[key]] for key in ("us", "default_us")}
        product = values.pop("product")
        if not product["layernorm"]:
            del product["layernorm"]
        return product | values

    @staticmethod
    def parse(values: dict[str, Any]) -> Row:
        """TableError names what is wrong: whatever a file holds, it must not break the model that asks for it."""
        try:
            product = Product(
                values["dtype"], _whole(values["n"]), _whole(values["k"]), bool(values["bias"]), values["activation"],
                bool(values.get("layernorm", False)),
            )  # fmt: skip
            words = values["algorithm"]
            if words is not None and not re.fullmatch("([0-9a-f]{16}){1,8}", words):
                raise ValueError("algorithm is not words of 16 hexadecimal digits")
            row = Row(
                product,
                _whole(values["first"]),
                _whole(values["last"]),
                None if words is None else tuple(int(words.ljust(128, "0")[i : i + 16], 16) for i in range(0, 128, 16)),
                tuple(_whole(m) for m in values["timed"]),
                tuple(_microseconds(us) for us in values["us"]),
                tuple(_microseconds(us) for us in values["default_us"]),
                {str(key): _whole(value, least=-_MOST) for key, value in values["config"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TableError(f"a row cannot be read ({type(error).__name__}: {error})") from None
        if product.dtype not in (*DTYPES,) or product.activation not in _ACTIVATIONS:
            raise TableError(f"a row makes no sense: dtype {product.dtype!r}, activation {product.activation!r}")
        tile = not row.config.get("tile_rows") or min(row.config.get(key, 0) for key in _TILE) > 0
        if not (row.first <= row.last and tile and len(row.timed) == len(row.us) == len(row.default_us)):
            raise TableError(f"a row makes no sense: {product}, m from {row.first} to {row.last}")
        return row.part(row.first, row.last)  # without times of other m


def _whole(value: Any, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"expected a whole number from {least} to {_MOST}, got {str(value)[:40]}")
    return value


def _microseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise ValueError(f"expected microseconds, got {str(value)[:40]}")
    return float(value)


def _hex(words: tuple[int, ...]) -> str:
    """16 digits a word; zero words at the end, of which there are many, are left out."""
    used = max((i + 1 for i, word in enumerate(words) if word), default=1)
    return "".join(f"{word:016x}" for word in words[:used])


def merge(first: Iterable[Row], second: Iterable[Row]) -> list[Row]:
    """All of `first`, and of `second` what it leaves free. Neighbours with one algorithm become one row."""
    rows = list(first)
    taken: dict[Product, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.first):
        taken.setdefault(row.product, []).append(row)
    for row in second:
        free = row.first
        for other in taken.get(row.product, ()):
            if free < other.first <= row.last:
                rows.append(row.part(free, other.first - 1))
            free = max(free, other.last + 1) if other.first <= row.last else free
        if free <= row.last:
            rows.append(row.part(free, row.last))
    joined: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.product, row.first)):
        before = joined[-1] if joined else None
        if before and before.last + 1 == row.first and all(
            getattr(before, name) == getattr(row, name) for name in ("product", "algorithm", "followed", "in_layer")
        ):
            joined[-1] = replace(
                before,
                last=row.last,
                timed=before.timed + row.timed,
                us=before.us + row.us,
                default_us=before.default_us + row.default_us,
            )
        else:
            joined.append(row)
    return joined


def waves(
    tile_rows: int, tile_columns: int, split_k: int, m: int, n: int, sms: int, whole_rows: bool = False
) -> int:
    """How often all multiprocessors get a block; whole_rows: those of a row of tiles at a time."""
    rows, columns = -(-m // tile_rows), -(-n // tile_columns)
    if whole_rows:
        return -(-rows // max(1, sms // columns))
    return -(-(rows * columns * split_k) // sms)


def at_waves(us: float, timed: int, needed: int, other: float = 0.0) -> float:
    """Microseconds where `needed` waves of blocks run, from those of `timed` waves. other: what does not grow with the
    waves."""
    other = min(other + _EMPTY_US, us)
    return other + (us - other) * needed / timed


def followed_at_waves(us: float, timed: int, needed: int, n: int, at: int, m: int) -> float:
    """The same at m where the LayerNorm of n columns that follows is in the time, which was taken at `at`."""
    there, here = (6 * rows * n / _LAYERNORM_BYTES_PER_US for rows in (at, m))
    return at_waves(us, timed, needed, there) + here - there


class Point(NamedTuple):
    """A timed m."""

    m: int
    us: float
    row: Row

    def us_at(self, m: int, sms: int) -> float:
        """What the row's algorithm is expected to take there. Of one without a tile's size, such as cuBLASLt's own
        proposal, all that is known: fewer rows take no longer."""
        config, n = self.row.config, self.row.product.n
        if self.row.algorithm is None or not config.get("tile_rows"):
            return self.us if m <= self.m else math.inf
        rows, columns, split_k = config["tile_rows"], config["tile_columns"], config["split_k"]
        whole_rows = config.get("id") == WITH_LAYERNORM
        timed, needed = (waves(rows, columns, split_k, at, n, sms, whole_rows) for at in (self.m, m))
        if not self.row.followed:
            return at_waves(self.us, timed, needed)
        return followed_at_waves(self.us, timed, needed, n, self.m, m)


_m, _us = attrgetter("m"), itemgetter(0)


def between(rows: Iterable[Row], sms: int, gemm_rows: Callable[[int], int]) -> list[Row]:
    """The same with a choice for each m that the encoder runs (gemm_rows) and nobody timed: of the algorithms at the
    timed m below and above, the one expected to be faster on so many multiprocessors. Those one further off count only
    where they are expected to be faster by 1 %."""
    rows = list(rows)
    points: dict[Product, list[Point]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.first):
        points[row.product] += [Point(m, us, row) for m, us in zip(row.timed, row.us, strict=True)]
    better: list[tuple[Row, int, int]] = []
    for row in rows:
        low, timed = row.first, sorted(row.timed)
        while low <= row.last and row.last - row.first < _SPARSE:
            m = gemm_rows(low)
            high = min(m, row.last)
            if bisect_left(timed, low) == bisect_right(timed, high):
                best, begin = _expected(row, m, points[row.product], sms), low
                if best.algorithm != row.algorithm:
                    if better and better[-1][0] is best and better[-1][2] + 1 == low:
                        begin = better.pop()[1]
                    better.append((best, begin, high))
            low = high + 1
    return merge([best.part(low, high) for best, low, high in better], rows)


def beside(points: Sequence[Point], m: int, skip: int = 0) -> list[Point]:
    """The timed m next above, or m itself, and next below; skip: those behind them. What is a quarter of m away says
    nothing, except of the next above: fewer rows take no longer."""
    i = bisect_left(points, m, key=_m)
    found = [at for at in (i + skip, i - 1 - skip) if 0 <= at < len(points)]
    return [points[at] for at in found if at == i or 4 * abs(points[at].m - m) <= m]


def _expected(row: Row, m: int, points: list[Point], sms: int) -> Row:
    """The row whose algorithm should be the fastest at m, which `row` serves so far. A tie is the next above's."""

    def fastest(near: list[Point]) -> tuple[float, Row]:
        return min([(point.us_at(m, sms), point.row) for point in near], key=_us, default=(math.inf, row))

    near, behind = beside(points, m), beside(points, m, 1)
    if all(point.row.algorithm == row.algorithm for point in (*near, *behind)):
        return row
    next_to, further = fastest(near), fastest(behind)
    return further[1] if further[0] < 0.99 * next_to[0] else next_to[1]
