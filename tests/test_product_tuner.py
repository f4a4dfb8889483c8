"""Which algorithm the tuner puts into a row, on a GPU that is made up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fake_gpu import QKV, FakeAlgorithm, fake_gpu

from ftbert.dtypes import DTYPES, NUMBERS
from ftbert.tuning import (
    WGMMA_TILE,
    WITH_LAYERNORM,
    WITH_PRENORM,
    Own,
    Product,
    ProductTuner,
    Row,
    product_bench,
    product_tuner,
)


def test_the_fastest_right_algorithm_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    good, wrong, refused = FakeAlgorithm(2, 8.0), FakeAlgorithm(3, 1.0, error=0.5), FakeAlgorithm(5, math.inf)
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0), good, wrong, FakeAlgorithm(4, 11.0), refused])
    made = ProductTuner(QKV).row(129, 192)
    assert made.algorithm == good.data and made.timed == (192,)
    assert made.us == pytest.approx((8.0,), rel=2e-3) and made.gain == pytest.approx(0.25, rel=1e-2)


@pytest.mark.parametrize("error, able", [(0.0134, True), (0.0136, False)])
def test_how_wrong_a_winner_may_be(monkeypatch: pytest.MonkeyPatch, error: float, able: bool) -> None:
    """A quarter more than cuBLASLt's first proposal is, and what fp16 rounds by."""
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0, error=0.01), FakeAlgorithm(2, 8.0, error=error)])
    assert (ProductTuner(QKV).row(129, 192).algorithm == (2,) * 8) == able


@pytest.mark.parametrize("gain, least, most", [(0.0, 0, 10), (0.1, 90, 100)])
def test_a_winner_beats_the_noise(monkeypatch: pytest.MonkeyPatch, gain: float, least: int, most: int) -> None:
    """Times vary by 2 %, and one of ten is disturbed. Of 100 tables few rows gain where nothing is faster, nearly all
    where something is by far."""
    draw = random.Random(0)

    def noisy(us: float) -> Callable[[int], float]:
        return lambda m: us * draw.gauss(1, 0.02) * (draw.choice((1, 1.5, 2)) if draw.random() < 0.1 else 1)

    algorithms = [FakeAlgorithm(i, noisy(10 * (1 - gain * (i == 7)))) for i in range(1, 13)]
    fake_gpu(monkeypatch, algorithms)
    rows = [ProductTuner(QKV).row(129, 192) for _ in range(100)]
    assert least <= sum(row.tuned for row in rows) <= most
    assert all((row.algorithm == algorithms[0].data) == (row.us == row.default_us) for row in rows)


@pytest.mark.parametrize(("us", "wins"), [(8.9, False), (8.7, True)])
def test_what_runs_without_a_table_stays_unless_something_is_2_percent_faster(
    monkeypatch: pytest.MonkeyPatch, us: float, wins: bool
) -> None:
    runs, other = FakeAlgorithm(3, 9.0, WGMMA_TILE), FakeAlgorithm(4, us, WGMMA_TILE)
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0)], [runs, other], in_force=runs)
    for product in (QKV, replace(QKV, activation="silu", gated=True)):
        made, few = ProductTuner(product).row(1025, 1088), ProductTuner(product).row(961, 1024)
        assert made.algorithm == Own(WGMMA_TILE, "4" if wins else "3") and made.default_us == (10.0,)
        assert few.algorithm == Own(WGMMA_TILE, "3")  # other variants are faster in a layer than alone


def test_what_known_rows_run_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0)])
    monkeypatch.setattr(product_tuner.Bench, "algorithm", lambda bench, words: FakeAlgorithm(words[0], 5.0))
    known = [Row(QKV, first, first + 63, (first,) * 8) for first in (65, 129, 193)]
    assert ProductTuner(QKV, known=known).row(129, 192).algorithm == (129,) * 8


@pytest.mark.parametrize("place, kernel", [("layernorm", WITH_LAYERNORM), ("prenorm", WITH_PRENORM)])
def test_a_norm_is_contained_where_that_is_faster_than_what_the_product_runs(
    monkeypatch: pytest.MonkeyPatch, place: str, kernel: str
) -> None:
    runs = FakeAlgorithm(2, lambda m: 8.0 if m < 500 else 6.0)
    own = [FakeAlgorithm(*one) for one in ((5, 5.0, WGMMA_TILE), (7, 7.0, kernel), (8, 9.0, kernel))]
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0), runs], own, in_force=runs)
    tuner = ProductTuner(Product("fp16", 768, 768, bias=True, **{place: True}))
    # A product of ours without its norm is not asked anew.
    contained, two_kernels = tuner.row(129, 192), tuner.row(449, 512)
    assert contained.algorithm == Own(kernel, "7") and contained.default_us == (10.0,)
    assert two_kernels.algorithm is None and two_kernels.us == (6.0,) and two_kernels.default_us == (10.0,)


@pytest.mark.parametrize("types", ["e4m3 e4m3 fp16", "e4m3 e4m3 e4m3", "byte_rows int8 fp16"])
@pytest.mark.parametrize("us, error, wins", [(9.9, 1e-4, False), (7.0, 1e-4, True), (7.0, 0.1, False)])
@pytest.mark.parametrize("kernel", [WGMMA_TILE, "wgmma_persistent"])
def test_of_products_with_scales_only_our_own_kernels_compete(
    monkeypatch: pytest.MonkeyPatch, types: str, us: float, error: float, wins: bool, kernel: str
) -> None:
    """And what the rule chooses is what they are compared with, in time and in error. In E4M3 it decides alone up to as many
    rows as norms are deferred of."""
    runs, other = FakeAlgorithm(3, 10.0, kernel, 0.05), FakeAlgorithm(4, us, WGMMA_TILE, 0.05 + error)
    fake_gpu(monkeypatch, [FakeAlgorithm(1, 1.0)], [runs, other], in_force=runs, refused=(1088, 192, 64))
    asked = Product(types, 3072, 768, bias=True)
    known = [Row(asked, 129, 192, (7,) * 8), Row(asked, 129, 192, None)]
    for first, last in ((1025, 1088), (129, 192), (49, 64)):
        made = ProductTuner(asked, known=known).row(first, last)
        by_rule = "e4m3" in types and last <= 1024
        assert made.algorithm == (None if by_rule else Own(WGMMA_TILE, "4") if wins else Own(kernel, "3"))
        assert made.default_us == (10.0,) and made.tuned == (wins and not by_rule)


@pytest.mark.parametrize("word", [*DTYPES, "e4m3"])
def test_operands_fit_every_type(word: str) -> None:
    """Also where rows of a and b are the same ones: squares would sum up to k."""
    k, cpu = 4096, torch.device("cpu")
    a, b = (product_bench._operand(name, 300 * k, NUMBERS[word], cpu).float()[: 300 * k].view(300, k) for name in "ab")
    sums = a @ b.T
    assert 2 < sums.std() < 5 and sums.abs().max() < 20
    gated = torch.nn.functional.silu(sums[:, ::2]) * sums[:, 1::2]
    assert gated.abs().max() < 448
