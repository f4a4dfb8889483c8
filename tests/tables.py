"""Rows of tuned tables, and the machine that they belong to."""

from __future__ import annotations

from fake_gpu import QKV

from ftbert.tuning import Machine, Own, Product, Row

HERE = Machine("Test GPU", "cuBLASLt 1.2.3", "sm_90 x 132")
WORDS = tuple(range(1, 9))


def row(
    first: int, last: int, product: Product = QKV, runs: Own | tuple[int, ...] | None = WORDS, us: float = 9.0
) -> Row:
    return Row(product, first, last, runs, (last,), (us,), (10.0,))
