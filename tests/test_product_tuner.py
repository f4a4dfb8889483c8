"""Which algorithm the tuner puts into a row, on a GPU that is made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import QKV, FakeAlgorithm, fake_gpu, known, searched

from ftbert import tuning
from ftbert.gemm_rows import Product, Row
from ftbert.product_bench import NothingProposed
from ftbert.tuning import ProductTuner, buckets, without_layernorm


def fake_tuner(monkeypatch: pytest.MonkeyPatch, algorithms: list[FakeAlgorithm]) -> ProductTuner:
    fake_gpu(monkeypatch, algorithms)
    return ProductTuner(QKV)


def test_the_fastest_right_algorithm_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    first, good = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 8.0)
    wrong, slow = FakeAlgorithm(3, lambda m: 1.0, wrong=True), FakeAlgorithm(4, lambda m: 11.0)
    made = fake_tuner(monkeypatch, [first, good, wrong, slow]).row(129, 192)
    assert made.algorithm == good.data and made.timed == (192,)
    assert (made.config["tile"], made.config["tile_rows"], made.config["tile_columns"]) == (2, 128, 128)
    assert made.us == pytest.approx((8.0,), rel=2e-3) and made.gain == pytest.approx(0.25, rel=1e-2)


def test_the_tile_that_just_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among sixty tiles, those whose blocks fill all multiprocessors without one too many; nobody proposes them."""

    def tile(number: int, rows: int) -> FakeAlgorithm:
        made = FakeAlgorithm(number, lambda m: 1.5 + 0.05 * rows * -(-(-(-m // rows) * 8) // 132))
        made.tile_rows = rows
        return made

    product = Product("fp16", 1024, 1024)
    algorithms = [tile(i, rows) for i, rows in enumerate(range(16, 256, 4), start=1)]
    timed: list[int] = []
    fake_gpu(monkeypatch, algorithms)
    honest = tuning.Bench.times
    monkeypatch.setattr(tuning.Bench, "times", lambda self, *a: (timed.append(len(a[0])), honest(self, *a))[1])
    tuner = ProductTuner(product)
    tuner.row(16321, 16384)
    for m in range(3072, 1024, -64):
        timed.clear()
        made = tuner.row(m - 63, m)
        assert made.us[0] <= 1.005 * min(a.us(m) for a in algorithms), m
    assert sum(timed) < 60  # a row does not try them all


def test_a_new_tile_is_tried_with_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = (2048, 8192)
    others = [FakeAlgorithm(i, lambda m: 8.0 if m in searched else 12.0) for i in range(1, 15)]
    fits = []  # 256 rows a block: at 3072 rows two rounds of blocks as at 2048, where the others go from three to four
    for number in range(100):
        made = FakeAlgorithm(20, lambda m, number=number: 8.5 if m in searched else 5.0 if number == 77 else 7.0)
        made.data, made.custom, made.tile_rows = (100 + number,) * 8, number, 256
        fits.append(made)
    fake_gpu(monkeypatch, [*others, *fits[:60:2], *fits[61:]])
    assert ProductTuner(QKV).row(3009, 3072).us == pytest.approx((5.0,), rel=2e-3)


def test_a_search_sees_every_tile_with_good_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty settings each of a hundred tiles, of which the best with a wrong setting is one of many."""
    algorithms = []
    for tile in range(1, 101):
        for custom in range(40):
            us = 7.0 if tile == 77 else 8.0 + tile / 1000
            us += 0.0 if custom == 25 else 2.0 if tile == 77 else 0.5 + tile % 7 / 10
            made = FakeAlgorithm(tile, lambda m, us=us: us)
            made.data, made.custom = (1000 * tile + custom,) * 8, custom
            algorithms.append(made)
    fake_gpu(monkeypatch, algorithms)
    for seed in range(5):
        found = tuning.search(tuning.Bench(QKV, 2048, "cuda"), seed=seed)[0]
        assert (found.tile, found.custom) == (77, 25)


def test_a_product_of_our_own_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(20, lambda m: 8.0 if m < 200 else 12.0)
    own.id = -1
    fake_gpu(monkeypatch, [first], [own])
    tuner = ProductTuner(QKV)
    made = tuner.row(129, 192)
    assert made.algorithm == own.data and (made.config["id"], made.config["tile"]) == (-1, 20)
    assert tuner.row(193, 256).algorithm == first.data


def test_a_gain_within_the_noise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is the first proposal's, by name: at another m cuBLASLt may propose another."""
    first = FakeAlgorithm(1, lambda m: 10.0)
    row = fake_tuner(monkeypatch, [first, FakeAlgorithm(2, lambda m: 9.98)]).row(129, 192)
    assert row.algorithm == first.data and row.config["tile"] == 1 and row.gain == 0 and row.us == row.default_us


def in_turns(*us: float) -> Callable[[int], float]:
    """The times of its turns, the first two of a short look; the last of these again and again."""
    turns = chain(us, repeat(us[-1]))
    return lambda m: next(turns)


def without_search(monkeypatch: pytest.MonkeyPatch, *us: Callable[[int], float]) -> Row:
    """The row of algorithms that take turns for it and nothing else."""
    fake_gpu(monkeypatch, [FakeAlgorithm(i, one) for i, one in enumerate(us, start=1)])
    return ProductTuner(QKV, known=[known(1, 999, i + 1) for i in range(len(us))]).row(129, 192)


def test_a_gain_must_exceed_what_a_time_varies_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % in the median of nine turns; by the first of those that decide, 4 %."""
    varies = in_turns(*[9.6, 10.2, 9.9] * 7)
    assert without_search(monkeypatch, lambda m: 10.0, varies).algorithm == (1,) * 8
    assert without_search(monkeypatch, lambda m: 10.0, lambda m: 9.9).algorithm == (2,) * 8


def test_what_was_fast_when_it_was_chosen_must_be_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several is fast by chance; the times in the row are those of the turns after that."""
    for later, wanted, us in ((10.0, 1, 10.0), (9.0, 2, 9.0)):
        row = without_search(monkeypatch, lambda m: 10.0, in_turns(*[8.0] * 11, later), lambda m: 9.99)
        assert row.algorithm == (wanted,) * 8 and row.us == (us,) and row.default_us == (10.0,)


def test_no_row_is_slower_than_the_first_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the times that stand in it either, whatever most turns say, where the clock varies between them."""
    default, other = [9.0] * 4 + [10.0] + [20.0] * 4, [12.0] * 4 + [7.5] + [15.0] * 4
    row = without_search(monkeypatch, in_turns(*[14.0] * 11, *default), in_turns(*[8.0] * 11, *other))
    assert row.algorithm == (1,) * 8 and row.us == row.default_us == (10.0,)


def test_a_disturbed_turn_of_the_short_look_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of two decides who is among the five."""
    others = [lambda m, us=9.0 + i / 10: us for i in range(6)]
    row = without_search(monkeypatch, lambda m: 10.0, *others, in_turns(8.0, 20.0, 8.0))
    assert row.algorithm == (8,) * 8


@pytest.mark.parametrize("error, able", [(0.0134, True), (0.0136, False)])
def test_how_wrong_a_winner_may_be(monkeypatch: pytest.MonkeyPatch, error: float, able: bool) -> None:
    """A quarter more than cuBLASLt's first proposal is, and what fp16 rounds by."""
    first, other = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 8.0)
    first.error, other.error = 0.01, error
    fake_gpu(monkeypatch, [first, other])
    assert (ProductTuner(QKV).row(129, 192).algorithm == other.data) == able


def test_a_tie_goes_to_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    two, three = FakeAlgorithm(2, lambda m: 8.0), FakeAlgorithm(3, lambda m: 8.01 if m > 192 else 7.99)
    tuner = fake_tuner(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0), two, three])
    assert tuner.row(193, 256).algorithm == two.data
    assert tuner.row(129, 192).algorithm == two.data  # three is faster by 0.1 %


WIDE = Product("fp16", 33 * 128, 1024)  # four rows of blocks are a wave


def of_rows(number: int, tile_rows: int, us: Callable[[int], float]) -> FakeAlgorithm:
    made = FakeAlgorithm(number, us)
    made.tile_rows = tile_rows
    return made


@pytest.mark.parametrize("real, wanted", [(8.9, 2), (9.5, 3)])
def test_what_should_be_as_fast_between_two_rows_is_timed(
    monkeypatch: pytest.MonkeyPatch, real: float, wanted: int
) -> None:
    below = of_rows(2, 504, lambda m: 20.0 if m > 2016 else 8.9 if m < 2016 else real)
    fake_gpu(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0), below, of_rows(3, 512, lambda m: 9.0)])
    tuner = ProductTuner(WIDE)
    assert tuner.row(1985, 2048).algorithm == (3,) * 8 and tuner.row(1921, 1984).algorithm == (2,) * 8
    made = tuner.again(1985, 2016)
    assert made is not None and made.algorithm == (wanted,) * 8
    assert (made.first, made.last, made.timed) == (1985, 2016, (2016,))


def test_a_first_proposal_of_another_m_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt proposes a good one at 1504 rows, and a bad one at others."""
    found, good, bad = (FakeAlgorithm(i, lambda m, us=us: us) for i, us in ((1, 23.7), (2, 22.9), (3, 28.4)))
    fake_gpu(monkeypatch, [found], proposed=lambda m: good if 1472 < m <= 1504 else bad)
    tuner = ProductTuner(QKV)
    assert tuner.row(1409, 1472).algorithm == found.data
    assert tuner.row(1473, 1504).algorithm == good.data
    made = tuner.again(1409, 1472)
    assert made is not None and made.algorithm == good.data and made.us == pytest.approx((22.9,), rel=2e-3)


def test_where_nothing_is_proposed_there_is_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeAlgorithm(1, lambda m: 10.0)
    fake_gpu(monkeypatch, [first], proposed=lambda m: first if m <= 1024 else None)
    tuner = ProductTuner(QKV)
    tuner.row(961, 1024)
    with pytest.raises(NothingProposed, match="m=2048"):
        tuner.row(1985, 2048)
    assert tuner.again(1985, 2016) is None


def test_what_should_be_slower_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(
        monkeypatch,
        [
            FakeAlgorithm(1, lambda m: 10.0),
            of_rows(2, 496, lambda m: 8.0 if m <= 1984 else 14.5),
            of_rows(3, 528, lambda m: 9.0),
        ],
    )
    tuner = ProductTuner(WIDE)
    tuner.row(1985, 2048)
    tuner.row(1921, 1984)
    monkeypatch.setattr(tuning.Bench, "times", None)
    assert [tuner.again(*step) for step in ((2017, 2048), (1985, 2016), (1921, 1984))] == [None] * 3


def test_a_tile_that_fits_between_two_rows_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(number: int, tile_rows: int, wave: float) -> FakeAlgorithm:
        return of_rows(number, tile_rows, lambda m: 1.5 + wave * (1 + (m > 4 * tile_rows)))

    fake_gpu(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0), fits(2, 496, 5.5), fits(3, 528, 7.5), fits(4, 504, 6.0)])
    tuner = ProductTuner(WIDE)
    assert tuner.row(1985, 2048).algorithm == (3,) * 8 and tuner.row(1921, 1984).algorithm == (2,) * 8
    made = tuner.again(1985, 2016)
    assert made is not None and made.algorithm == (4,) * 8


def test_the_winner_below_is_tried_where_it_was_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = {2048}
    below = of_rows(2, 528, lambda m: 20.0 if m in disturbed else 8.0)
    fake_gpu(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0), below, of_rows(3, 528, lambda m: 9.0)])
    tuner = ProductTuner(WIDE)
    assert tuner.row(1985, 2048).algorithm == (3,) * 8
    disturbed.clear()
    assert tuner.row(1921, 1984).algorithm == (2,) * 8
    made = tuner.again(2017, 2048)
    assert made is not None and made.algorithm == (2,) * 8 and made.us == pytest.approx((8.0,), rel=2e-3)
    assert tuner.again(2017, 2048) is None


def test_recordings_take_turns() -> None:
    ran: list[str] = []

    def recording(name: str) -> tuning.Recording:
        times = iter((1.0, 2.0, 3.0))
        graph = SimpleNamespace(microseconds=lambda: (ran.append(name), next(times))[1])
        return tuning.Recording(SimpleNamespace(), graph)

    never = tuning.Recording(SimpleNamespace(), None)  # what cuBLASLt refuses after all
    assert tuning.in_turns([recording("a"), never, recording("b")], 3) == [[1, 2, 3], [math.inf] * 3, [1, 2, 3]]
    assert ran == ["a", "b"] * 3


def test_rows_of_the_other_16_bit_type_take_the_place_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    first, far, near = (FakeAlgorithm(i, lambda m, us=us: us) for i, us in ((1, 10.0), (2, 7.0), (3, 8.0)))
    fake_gpu(monkeypatch, [first, far, near])
    at = searched(monkeypatch)
    tuner = ProductTuner(QKV, known=[known(129, 192, 1), known(193, 256, 3), known(385, 448, 2)])
    made = tuner.row(129, 192)  # the neighbour's algorithm wins; the one from beyond twice this m is no candidate
    assert made.algorithm == near.data and made.config["tile"] == 3 and not at
    assert made.us == pytest.approx((8.0,), rel=2e-3)
    assert tuner.row(257, 320).algorithm == far.data and at  # no row covers this m


def test_what_the_other_type_chose_in_a_layer_does_not_take_the_place_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, theirs, mine = (FakeAlgorithm(i, lambda m, us=us: us) for i, us in ((1, 10.0), (2, 9.0), (3, 5.0)))
    fake_gpu(monkeypatch, [first, theirs, mine])
    row_ = known(1, 999, 2)
    assert ProductTuner(QKV, known=[row_]).row(129, 192).algorithm == theirs.data
    in_layer = replace(row_, config=row_.config | {"in_layer": 1})
    assert ProductTuner(QKV, known=[in_layer]).row(129, 192).algorithm == mine.data


def test_what_an_earlier_table_runs_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, earlier = (FakeAlgorithm(i, lambda m, us=us: us) for i, us in ((1, 10.0), (2, 9.0), (3, 8.0)))
    fake_gpu(monkeypatch, [first, other, earlier])
    rows = [known(129, 256, 2), known(192, 192, 3, QKV)]
    for row_, winner in zip(buckets(129, 256), (earlier, other), strict=True):
        assert ProductTuner(QKV, known=rows).row(*row_).algorithm == winner.data


def test_what_cublaslt_proposes_for_fewer_rows_of_the_range_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    first, inside = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 8.0)
    fake_gpu(monkeypatch, [first, inside], proposed=lambda m: inside if 1457 <= m <= 1464 else first)
    tuner = ProductTuner(QKV, known=[known(1, 9999, 1)])
    assert [tuner.row(*row_).algorithm for row_ in ((1473, 1536), (1409, 1472))] == [first.data, inside.data]


def test_a_product_of_ours_that_is_no_more_leaves_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    first, near, new = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 9.0), own(40, 8.0, -1)
    gone = replace(known(129, 192, 22), config=known(129, 192, 22).config | {"id": -1})
    for row_, searches in ((gone, True), (replace(gone, config=gone.config | {"tile": 40}), False)):
        fake_gpu(monkeypatch, [first, near], [new])
        at = searched(monkeypatch)
        made = ProductTuner(QKV, known=[row_, known(193, 256, 2)]).row(129, 192)
        assert made.algorithm == new.data and bool(at) == searches


def test_what_the_other_type_runs_is_verified_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    first, wrong = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 1.0, wrong=True)
    refused, slow = FakeAlgorithm(3, lambda m: float("inf")), FakeAlgorithm(4, lambda m: 11.0)
    fake_gpu(monkeypatch, [first, wrong, refused, slow])
    at = searched(monkeypatch)
    tuner = ProductTuner(QKV, known=[known(1, 999, tile) for tile in (2, 3, 4)])
    assert tuner.row(129, 192).algorithm == first.data and not at


@pytest.mark.parametrize(
    "row_",
    [known(1, 999, 5), known(1, 999, 2, Product("fp32", QKV.n, QKV.k, bias=True)), known(1, 999, 2, Product("bf16", 768, 768))],
    ids=["no such algorithm in this type", "fp32", "another product"],
)  # fmt: skip
def test_rows_that_help_nothing_leave_the_search(monkeypatch: pytest.MonkeyPatch, row_: Row) -> None:
    fake_gpu(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 8.0)])
    at = searched(monkeypatch)
    assert ProductTuner(QKV, known=[row_]).row(129, 192).algorithm == (2,) * 8 and at


NORM = Product("fp16", 768, 768, bias=True, layernorm=True)


def own(number: int, us: float, id: int) -> FakeAlgorithm:
    algorithm = FakeAlgorithm(number, lambda m: us)
    algorithm.id = id
    return algorithm


def test_a_layernorm_is_contained_where_that_is_faster_than_what_the_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    first, runs = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 8.0 if m < 500 else 6.0)
    fake_gpu(monkeypatch, [first, runs], [own(5, 5.0, -1), own(7, 7.0, -2), own(8, 9.0, -2)], in_force=runs)
    tuner = ProductTuner(NORM)
    # A product of ours without LayerNorm is not asked anew.
    contained, two_kernels = tuner.row(129, 192), tuner.row(449, 512)
    assert contained.algorithm == (7,) * 8 and contained.config["id"] == -2 and contained.default_us == (10.0,)
    assert two_kernels.algorithm is None and two_kernels.us == (6.0,) and two_kernels.default_us == (10.0,)
    assert tuner.again(129, 192) is None and tuner.again(129, 160) is not None


def only(bench: Any, product: Product) -> Callable[..., Any]:
    def make(asked: Product, m: int, device: object) -> Any:
        assert asked == product
        return bench(asked, m, device)

    return make


def test_what_a_layernorm_follows_is_timed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One algorithm is faster alone, another with the LayerNorm behind it; a product that contains one is neither."""
    first, alone, followed = FakeAlgorithm(1, lambda m: 10.0), FakeAlgorithm(2, lambda m: 8.0), own(3, 8.6, -1)
    first.layernorm, alone.layernorm, followed.layernorm = 1.3, 4.7, 1.3
    fake_gpu(monkeypatch, [first, alone], [followed, own(7, 1.0, -2)])
    plain, at = without_layernorm(NORM), searched(monkeypatch)
    lone = ProductTuner(plain).row(129, 192)
    assert lone.algorithm == alone.data and not lone.followed and at
    twin = known(1, 999, 2, replace(plain, dtype="bf16"))
    behind = replace(twin, config=twin.config | {"followed": 1, "id": -1, "tile": 3})  # one of our own
    for row_, searches in ((twin, True), (behind, False)):
        at.clear()
        tuner = ProductTuner(plain, known=[row_], in_layer=NORM)
        row = tuner.row(129, 192)
        assert (row.product, row.algorithm, row.followed) == (plain, followed.data, True)
        assert row.us == pytest.approx((9.9,), rel=2e-3) and row.default_us == pytest.approx((11.3,), rel=2e-3)
        assert bool(at) == searches  # what was timed alone does not take its place
        # Also where it looks again.
        monkeypatch.setattr(tuning, "Bench", only(tuning.Bench, NORM))
        tuner.again(193, 256)
        fake_gpu(monkeypatch, [first, alone], [followed, own(7, 1.0, -2)])
    first.layernorm = -9.0
    row = ProductTuner(plain, in_layer=NORM).row(129, 192)
    assert row.algorithm == first.data and row.followed and row.us == row.default_us == (1.0,)
