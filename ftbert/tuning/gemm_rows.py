"""Rows of tuned GEMM tables: what was measured of a product."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftbert.checkpoint import activations
from ftbert.formats import formats

WGMMA_TILE = "wgmma_tile"  # the kernel whose products can do without a LayerNorm kernel between them
WITH_LAYERNORM = "wgmma_layernorm"  # the kernel that contains the LayerNorm behind it
WITH_PRENORM = "wgmma_prenorm"  # the kernel that contains the residual sum and the norm before the next block
WITH_NORM = (WITH_LAYERNORM, WITH_PRENORM)
_MOST = (1 << 31) - 1  # of rows, columns and whatever else is counted


@dataclass(frozen=True, order=True)
class Product:
    """A linear layer's product c [m, n] = a [m, k] @ b [n, k]^T and what comes with it. dtype: "fp16", or of a, b and c
    "e4m3 e4m3 fp16", "byte_rows int8 fp16". activation: by the core's name; what cuBLASLt does not compute exactly
    follows it as add_bias_act. layernorm: with the residual and its LayerNorm, which follow as
    add_bias_input_layernorm or are contained. gated: columns 2i and 2i + 1 become activation(one) * other, so that c is
    [m, n / 2]; what is not ours is followed by add_bias_gate. prenorm: as layernorm, but c is the residual's sum, and
    its norm lies beside it."""

    dtype: str
    n: int
    k: int
    bias: bool = False
    activation: str = "none"
    layernorm: bool = False
    gated: bool = False
    prenorm: bool = False

    @property
    def normed(self) -> bool:
        """Whether it comes with a norm."""
        return self.layernorm or self.prenorm

    @property
    def types(self) -> tuple[str, str, str]:
        """Of a, b and c."""
        a, *others = self.dtype.split(" ")
        b, c = others or (a, a)
        return a, b, c

    @property
    def scaled(self) -> bool:
        """Whether its operands have scales: models run kernels of ftbert's own alone."""
        return self.types[0] in ("e4m3", "byte_rows")

    def __str__(self) -> str:
        parts = ["bias"] * self.bias + [self.activation] * (self.activation != "none") + ["gate"] * self.gated
        parts += ["layernorm"] * self.layernorm + ["prenorm"] * self.prenorm
        epilogue = "+".join(parts) or "no epilogue"
        return f"{self.dtype} n={self.n} k={self.k} {epilogue}"


@dataclass(frozen=True)
class Own:
    """A kernel of ftbert's own and a variant of it, by their names in csrc/gemm/gpu/own.h."""

    kernel: str
    variant: str


@dataclass(frozen=True)
class Row:
    """One product for m from `first` to `last`, both included. algorithm: a kernel of ftbert's own, or
    cublasLtMatmulAlgo_t as 8 words of 64 bit, or None. None of a product with a norm: the algorithm of the product
    without it was not beaten. Of another one: cuBLASLt's first proposal, or where it has scales the rule's choice. us,
    default_us: microseconds at the m of `timed`, of the algorithm and of cuBLASLt's first proposal, or of a product
    with scales of the rule's choice, with the norm that follows the product in a layer, if one does."""

    product: Product
    first: int
    last: int
    algorithm: Own | tuple[int, ...] | None
    timed: tuple[int, ...] = ()
    us: tuple[float, ...] = ()
    default_us: tuple[float, ...] = ()

    @property
    def gain(self) -> float:
        """How much faster than by default: 0.1 is 10 %."""
        return sum(self.default_us) / sum(self.us) - 1 if self.us else 0.0

    @property
    def tuned(self) -> int:
        """At how many of the timed m its own algorithm is faster than by default."""
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
        product = asdict(self.product)
        for absent in ("layernorm", "gated", "prenorm"):
            if not product[absent]:
                del product[absent]
        if isinstance(self.algorithm, Own):
            algorithm: dict[str, Any] = asdict(self.algorithm)
        else:
            algorithm = {"algorithm": None if self.algorithm is None else _hex(self.algorithm)}
        times = {key: [round(us, 2) for us in getattr(self, key)] for key in ("us", "default_us")}
        where = {"first": self.first, "last": self.last}
        return product | where | algorithm | {"timed": list(self.timed)} | times

    @staticmethod
    def parse(values: dict[str, Any]) -> Row:
        """ValueError names what is wrong: whatever a file holds, it must not break the model that asks for it."""
        try:
            product = Product(
                values["dtype"], _whole(values["n"]), _whole(values["k"]), bool(values["bias"]), values["activation"],
                *(bool(values.get(key, False)) for key in ("layernorm", "gated", "prenorm")),
            )  # fmt: skip
            row = Row(
                product,
                _whole(values["first"]),
                _whole(values["last"]),
                _algorithm(values),
                tuple(_whole(m) for m in values["timed"]),
                tuple(_microseconds(us) for us in values["us"]),
                tuple(_microseconds(us) for us in values["default_us"]),
            )
            unknown = {*product.types} - {*formats()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"a row cannot be read ({type(error).__name__}: {error})") from None
        if unknown or product.activation not in activations().values():
            raise ValueError(f"a row makes no sense: dtype {product.dtype!r}, activation {product.activation!r}")
        if product.gated + product.layernorm + product.prenorm > 1 or (product.gated and product.n % 2):
            raise ValueError(f"a row makes no sense: {product}")
        if not (row.first <= row.last and len(row.timed) == len(row.us) == len(row.default_us)):
            raise ValueError(f"a row makes no sense: {product}, m from {row.first} to {row.last}")
        return row.part(row.first, row.last)  # without times of other m


def _algorithm(values: dict[str, Any]) -> Own | tuple[int, ...] | None:
    if "kernel" in values:
        own = Own(values["kernel"], values["variant"])
        if not all(re.fullmatch("[ -~]{1,40}", name) for name in (own.kernel, own.variant)):
            raise ValueError(f"expected the names of a kernel and its variant, got {str(own)[:80]}")
        return own
    words = values["algorithm"]
    if words is None:
        return None
    if not re.fullmatch("([0-9a-f]{16}){1,8}", words):
        raise ValueError("algorithm is not words of 16 hexadecimal digits")
    return tuple(int(words.ljust(128, "0")[i : i + 16], 16) for i in range(0, 128, 16))


def _whole(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST:
        raise ValueError(f"expected a whole number from 1 to {_MOST}, got {str(value)[:40]}")
    return value


def _microseconds(value: Any) -> float:
    if not 0 < value < _MOST:  # nor a NaN
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
        same = before and (before.product, before.algorithm) == (row.product, row.algorithm)
        if before and same and before.last + 1 == row.first:
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
