"""Which algorithm the tuner puts into a row, on a GPU that is made up."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from fake_gpu import QKV, FakeAlgorithm, fake_gpu, known

from ftbert.tuning import NothingProposed, Product, ProductTuner, Recording, product_bench, without_layernorm
from ftbert.tuning import product_tuner as tuning
from ftbert.tuning.product_bench import share_beyond_noise

NORM = Product("fp16", 768, 768, bias=True, layernorm=True)


def takes(number: int, us: float, **named: object) -> FakeAlgorithm:
    algorithm = FakeAlgorithm(number, lambda m: us)
    for name, value in named.items():
        setattr(algorithm, name, value)
    return algorithm


def test_the_fastest_right_algorithm_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    good, wrong, refused = takes(2, 8.0), takes(3, 1.0, error=0.5), takes(5, math.inf)
    fake_gpu(monkeypatch, [takes(1, 10.0), good, wrong, takes(4, 11.0), refused])
    made = ProductTuner(QKV).row(129, 192)
    assert made.algorithm == good.data and made.timed == (192,)
    assert (made.config["tile"], made.config["tile_rows"], made.config["tile_columns"]) == (2, 128, 128)
    assert made.us == pytest.approx((8.0,), rel=2e-3) and made.gain == pytest.approx(0.25, rel=1e-2)


@pytest.mark.parametrize("error, able", [(0.0134, True), (0.0136, False)])
def test_how_wrong_a_winner_may_be(monkeypatch: pytest.MonkeyPatch, error: float, able: bool) -> None:
    """A quarter more than cuBLASLt's first proposal is, and what fp16 rounds by."""
    fake_gpu(monkeypatch, [takes(1, 10.0, error=0.01), takes(2, 8.0, error=error)])
    assert (ProductTuner(QKV).row(129, 192).algorithm == (2,) * 8) == able


def test_a_product_of_our_own_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    first, own = takes(1, 10.0), FakeAlgorithm(20, lambda m: 8.0 if m < 200 else 12.0)
    own.id = -1
    fake_gpu(monkeypatch, [first], [own])
    tuner = ProductTuner(QKV)
    made = tuner.row(129, 192)
    assert made.algorithm == own.data and (made.config["id"], made.config["tile"]) == (-1, 20)
    assert tuner.row(193, 256).algorithm == first.data


def test_a_search_sees_every_tile_with_good_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty settings each of a hundred tiles, of which the best with a wrong setting is one of many."""
    algorithms = []
    for tile in range(1, 101):
        for custom in range(40):
            us = 7.0 if tile == 77 else 8.0 + tile / 1000
            us += 0.0 if custom == 25 else 2.0 if tile == 77 else 0.5 + tile % 7 / 10
            algorithms.append(takes(tile, us, data=(1000 * tile + custom,) * 8, custom=custom))
    fake_gpu(monkeypatch, algorithms, [takes(200, 6.0, id=-1)])
    for seed in range(5):
        own, found = tuning.search(tuning.Bench(QKV, 2048, "cuda"), seed=seed)[:2]
        assert own.id == -1 and (found.tile, found.custom) == (77, 25)
    timed: list[int] = []
    honest = tuning.Bench.times
    monkeypatch.setattr(tuning.Bench, "times", lambda self, *a: (timed.append(len(a[0])), honest(self, *a))[1])
    tuner = ProductTuner(QKV)
    for m in (3072, 3008):
        timed.clear()
        assert tuner.row(m - 63, m).algorithm == (200,) * 8
    assert sum(timed) < 100  # the next row does not search again


def test_what_won_before_and_what_an_earlier_table_runs_are_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forty tiles, those that are slow wherever a search looks."""
    others = [takes(i, 9.0) for i in range(10, 50)]
    hidden = [FakeAlgorithm(i, lambda m, us=us: 12.0 if m in tuning._SEARCHED else us) for i, us in ((2, 8.5), (3, 8.0))]
    fake_gpu(monkeypatch, [takes(1, 10.0), *others, *hidden])
    assert ProductTuner(QKV).row(1473, 1536).us[0] > 8.9
    tuner = ProductTuner(QKV, known=[known(1500, 1510, 2), known(1473, 1480, 3, NORM), known(1537, 1600, 3)])
    assert tuner.row(1473, 1536).algorithm == (2,) * 8
    assert tuner.row(1409, 1472).algorithm == (2,) * 8  # no table has it here
    assert tuner.row(1537, 1600).algorithm == tuner.row(1409, 1472).algorithm == (3,) * 8


def in_turns(*us: float) -> Callable[[int], float]:
    """The times of its turns, the first two of a quick round; the last of these again and again."""
    turns = chain(us, repeat(us[-1]))
    return lambda m: next(turns)


def without_search(monkeypatch: pytest.MonkeyPatch, *us: Callable[[int], float]) -> tuple[int, float, float]:
    """Which of these wins where they take turns and nothing else, its time and that of the first."""
    fake_gpu(monkeypatch, [FakeAlgorithm(i, one) for i, one in enumerate(us, start=1)])
    monkeypatch.setattr(tuning, "_sampled", lambda bench, seeds, accepted: [(us, a) for us, a in enumerate(accepted)])
    row = ProductTuner(QKV).row(129, 192)
    assert row.algorithm is not None
    return row.algorithm[0], row.us[0], row.default_us[0]


def test_a_gain_must_exceed_what_a_time_varies_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % in the median; by every third turn 4 %. And 0.2 % is none at all."""
    assert without_search(monkeypatch, lambda m: 10.0, in_turns(*[9.6, 10.2, 9.9] * 7))[0] == 1
    assert without_search(monkeypatch, lambda m: 10.0, lambda m: 9.9)[0] == 2
    winner, us, default_us = without_search(monkeypatch, lambda m: 10.0, lambda m: 9.98)
    assert winner == 1 and us == default_us  # by name: at another m cuBLASLt may propose another


def test_what_was_fast_in_the_quick_round_must_be_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for later, wanted, us in ((10.0, 1, 10.0), (9.0, 2, 9.0)):
        assert without_search(monkeypatch, lambda m: 10.0, in_turns(8.0, 8.0, later)) == (wanted, us, 10.0)


def test_a_disturbed_turn_of_the_quick_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of two decides who is among the five."""
    others = [lambda m, us=9.0 + i / 10: us for i in range(6)]
    assert without_search(monkeypatch, lambda m: 10.0, *others, in_turns(8.0, 20.0, 8.0))[0] == 8


def test_turns_and_medians_must_agree() -> None:
    assert share_beyond_noise([9.0, 18.0], [10.0, 20.0]) == pytest.approx(0.9)
    ours, theirs = [12.0] * 4 + [7.5] + [15.0] * 4, [9.0] * 4 + [10.0] + [20.0] * 4
    assert share_beyond_noise(ours, theirs) == 1  # the clock varies between turns
    assert share_beyond_noise([math.inf] * 3, [10.0] * 3) == 1


def test_recordings_take_turns() -> None:
    ran: list[str] = []

    def recording(name: str) -> Recording:
        times = iter((1.0, 2.0, 3.0))
        graph = SimpleNamespace(microseconds=lambda: (ran.append(name), next(times))[1])
        return Recording(SimpleNamespace(), graph)

    never = Recording(SimpleNamespace(), None)  # what cuBLASLt refuses after all
    assert product_bench.in_turns([recording("a"), never, recording("b")], 3) == [[1, 2, 3], [math.inf] * 3, [1, 2, 3]]
    assert ran == ["a", "b"] * 3


def test_where_nothing_is_proposed_there_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, [takes(2, 8.0)], proposed=lambda m: None)
    with pytest.raises(NothingProposed, match="m=2048"):
        ProductTuner(QKV).row(1985, 2048)


def test_a_layernorm_is_contained_where_that_is_faster_than_what_the_product_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeAlgorithm(2, lambda m: 8.0 if m < 500 else 6.0)
    own = [takes(5, 5.0, id=-1), takes(7, 7.0, id=-2), takes(8, 9.0, id=-2)]
    fake_gpu(monkeypatch, [takes(1, 10.0), runs], own, in_force=runs)
    tuner = ProductTuner(NORM)
    # A product of ours without LayerNorm is not asked anew.
    contained, two_kernels = tuner.row(129, 192), tuner.row(449, 512)
    assert contained.algorithm == (7,) * 8 and contained.config["id"] == -2 and contained.default_us == (10.0,)
    assert two_kernels.algorithm is None and two_kernels.us == (6.0,) and two_kernels.default_us == (10.0,)


def test_what_a_layernorm_follows_is_timed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One algorithm is faster alone, another with the LayerNorm behind it; a product that contains one is neither."""
    first, alone = takes(1, 10.0, layernorm=1.3), takes(2, 8.0, layernorm=4.7)
    followed = takes(3, 8.6, id=-1, layernorm=1.3)
    fake_gpu(monkeypatch, [first, alone], [followed, takes(7, 1.0, id=-2)])
    plain = without_layernorm(NORM)
    lone = ProductTuner(plain).row(129, 192)
    assert lone.algorithm == alone.data and not lone.followed
    row = ProductTuner(plain, in_layer=NORM).row(129, 192)
    assert (row.product, row.algorithm, row.followed) == (plain, followed.data, True)
    assert row.us == pytest.approx((9.9,), rel=2e-3) and row.default_us == pytest.approx((11.3,), rel=2e-3)
    first.layernorm = -9.0
    row = ProductTuner(plain, in_layer=NORM).row(129, 192)
    assert row.algorithm == first.data and row.followed and row.us == row.default_us == (1.0,)
