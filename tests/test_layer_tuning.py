"""The products of a layer chosen together (ftbert/layer_tuning.py), where its LayerNorms are folded into them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import have_gpu, make_bert
from fake_gpu import FakeAlgorithm, fake_gpu
from test_cuda import packed
from test_tuning import HERE, measured
from test_tuning import cache as cache

import ftbert
from ftbert.cli import main
from ftbert.tuning import (
    Bench,
    Layer,
    LayerTuner,
    Machine,
    Product,
    ProductTuner,
    Row,
    gemm_table,
    layers_of,
    products_of_shape,
    put_in_force,
    without_layernorm,
)
from ftbert.tuning import layer_tuner as layer_tuning
from ftbert.tuning import product_tuner as tuning
from ftbert.tuning import run as tune
from ftbert.tuning.gemm_table import add_rows, read_table, user_table
from ftbert.tuning.layer_tuner import Layers

QKV, OUT, UP, DOWN = BASE = Layer(*products_of_shape(768, 3072, "gelu", "fp16"))
Time = Callable[[tuple[int, ...]], float]  # of a layer, by its products' numbers, 0 for one of cuBLASLt's


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_layers_are_put_together_from_products(activation: str) -> None:
    base, large = (products_of_shape(n, 4 * n, activation, "bf16") for n in (768, 1024))
    assert layers_of([*base, *reversed(large)]) == [Layer(*base), Layer(*large)]
    assert layers_of(base[:3]) == layers_of(base[1:]) == []  # not all of it
    assert layers_of(products_of_shape(768, 3072, activation, "fp32")) == []
    assert layers_of([without_layernorm(p) for p in base]) == []  # the LayerNorm comes first
    assert layers_of([Product("bf16", 2304, 768), *base[1:]]) == []  # the general attention path
    assert layers_of(products_of_shape(768, 768, activation, "bf16")) == []  # two of the four are the same
    assert layers_of(products_of_shape(5120, 1024, activation, "bf16")) == []  # too wide to be folded


def folding(number: int, us: float) -> FakeAlgorithm:
    algorithm = FakeAlgorithm(number, lambda m: us)
    algorithm.id, algorithm.folds = -1, True
    return algorithm


OWN = [folding(number, 7 + 0.5 * number) for number in (2, 3, 4)]  # alone 2 is the fastest
Told = Callable[..., None]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """told(time): whole layers take that long, by the numbers of their products. own: ftbert's; results: what layers
    give; most: rows up to which LayerNorms are folded where all four products are of those that fold."""

    def make(
        time: Time,
        own: Iterable[FakeAlgorithm] = OWN,
        results: Callable[[tuple[int, ...]], torch.Tensor] = lambda these: torch.zeros(2, 8, dtype=torch.float16),
        most: int = 1024,
    ) -> None:
        fake_gpu(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0)], list(own))
        monkeypatch.setattr(layer_tuning, "Bench", tuning.Bench)
        monkeypatch.setattr(Machine, "of", staticmethod(lambda device: HERE))
        for name in ("install", "put_in_force"):
            monkeypatch.setattr(tune, name, lambda *arguments, **named: None)

        class Recorded:
            def __init__(self, rows: Iterable[Row]) -> None:
                numbers = {row.product: row.algorithm[0] if row.algorithm else 1 for row in rows}
                self.numbers = tuple(numbers[product] for product in BASE.plain)
                self.result = results(self.numbers)

            def microseconds(self) -> float:
                return time(self.numbers)

        class FakeLayers:
            def __init__(self, layer: Layer, device: object) -> None:
                assert layer == BASE

            def folds(self, rows: Iterable[Row], m: int) -> bool:
                return m <= most

            def record(self, rows: Iterable[Row], m: int) -> Recorded:
                return Recorded(rows)

        monkeypatch.setattr(layer_tuning, "Layers", FakeLayers)

    return make


def numbers(rows: list[Row], m: int) -> tuple[int, ...]:
    return tuple(next(r.algorithm[0] for r in rows if r.product == p and r.first <= m <= r.last and r.algorithm)
                 for p in BASE.plain)  # fmt: skip


def chosen(these: tuple[int, ...], first: int = 33, last: int = 128, in_layer: int = 0) -> list[Row]:
    timed = (64, last)
    return [Row(p, first, last, (number,) * 8, timed, (8.0, 8.0), (10.0, 10.0), {"tile": number, "in_layer": in_layer})
            for p, number in zip(BASE.plain, these, strict=True)]  # fmt: skip


def run(path: Path, first: int = 33, last: int = 64, **named: Any) -> tune.Tuned:
    return tune.tune(BASE, first, last, device="cuda:0", path=path, show_progress_bar=False, **named)


def distance(best: tuple[int, ...]) -> Time:
    return lambda these: 100.0 + sum(a != b for a, b in zip(these, best, strict=True))


def test_a_layer_runs_what_it_is_the_fastest_with(cache: Path, told: Told) -> None:
    best = (2, 4, 3, 2)
    told(distance(best), [*OWN, FakeAlgorithm(5, lambda m: 7.0), folding(6, 12.1)])  # one folds not, one is slow alone
    path = cache / "t.json"
    done = run(path)
    assert numbers(done.rows, 48) == numbers(done.rows, 64) == best
    assert (done.made, done.left, done.in_layers) == (8, 0, 2)
    assert done.layer_gains == pytest.approx([0.04, 0.04])  # all four were 5
    assert all(row.in_layer and row.followed == (row.product in BASE.plain[1::2]) for row in done.rows)
    assert "in 2 of 2 ranges whole layers are faster" in str(done) and "% in the median" in str(done)
    alone = {row.product: row.us for row in done.rows}
    assert alone[BASE.plain[1]] == (9.0, 9.0)  # its own time stands in the file, not the layer's
    again = run(path)
    assert (again.made, again.left, again.in_layers) == (0, 0, 0) and again.rows == done.rows
    assert run(path, force=True).in_layers == 2


def test_what_would_be_faster_but_is_no_candidate(told: Told) -> None:
    told(lambda these: 90.0 if {5, 6} & set(these) else 100.0, [*OWN, FakeAlgorithm(5, lambda m: 7.0), folding(6, 12.1)])
    assert numbers(LayerTuner(BASE, torch.device("cuda:0")).rows(49, 64, chosen((2, 2, 2, 2))), 64) == (2, 2, 2, 2)


def test_layers_are_for_few_rows_only(cache: Path, told: Told) -> None:
    told(distance((3, 3, 3, 3)), most=4096)
    done = run(cache / "t.json", 1000, 1088)
    assert (done.in_layers, done.left) == (1, 0)
    assert numbers(done.rows, 1024) == (3, 3, 3, 3) and numbers(done.rows, 1088) == (2, 2, 2, 2)


def test_a_search_begins_with_what_was_chosen_before(told: Told) -> None:
    """Nothing leads from the fastest one by one to the fastest together."""
    told(lambda these: {(4, 4, 4, 4): 80.0, (3, 4, 4, 4): 79.0}.get(these, 100.0))
    device, before = torch.device("cuda:0"), chosen((2, 2, 2, 2))
    assert numbers(LayerTuner(BASE, device).rows(49, 64, before), 64) == (2, 2, 2, 2)
    other = [replace(r, product=replace(r.product, dtype="bf16")) for r in chosen((4, 4, 4, 4), 17, 128, 1)]
    for known in (chosen((4, 4, 4, 4), 17, 128), chosen((4, 4, 4, 4), 64, 64, 1), other, [*before, *other]):
        assert numbers(LayerTuner(BASE, device, known).rows(49, 64, before), 64) == (3, 4, 4, 4)
    assert numbers(LayerTuner(BASE, device, chosen((4, 4, 4, 4), 65)).rows(49, 64, before), 64) == (2, 2, 2, 2)
    assert numbers(LayerTuner(BASE, device).rows(49, 64, chosen((4, 4, 4, 4))), 64) == (3, 4, 4, 4)


def test_a_second_round_may_go_back(told: Told) -> None:
    told(lambda these: {(2, 2, 2, 3): 99.0, (3, 2, 2, 3): 95.0, (3, 2, 2, 2): 80.0}.get(these, 100.0))
    found = LayerTuner(BASE, torch.device("cuda:0")).rows(49, 64, chosen((2, 2, 2, 2)))
    assert numbers(found, 64) == (3, 2, 2, 2)


def test_a_run_cut_short_goes_on_with_its_layers(cache: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told(lambda these: 100.0 - (these == (3, 2, 2, 2)))
    path, rows = cache / "t.json", LayerTuner.rows
    begun: list[int] = []

    def once(self: LayerTuner, first: int, last: int, in_force: Iterable[Row]) -> list[Row]:
        begun.append(last)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return rows(self, first, last, in_force)

    monkeypatch.setattr(LayerTuner, "rows", once)
    with pytest.raises(KeyboardInterrupt):
        run(path, 17)
    kept = read_table(path)[1]
    assert numbers(kept, 64) == (3, 2, 2, 2) and numbers(kept, 48) == (2, 2, 2, 2)
    assert all(row.first >= 33 for row in kept)
    done = run(path, 17)
    assert begun == [64, 48, 48, 32, 24] and (done.made, done.left) == (8, 0)
    assert numbers(done.rows, 48) == numbers(done.rows, 24) == (3, 2, 2, 2)
    add_rows(path, HERE, chosen((3, 2, 2, 2), 33, 48)[:1])  # as another run without layers leaves it
    assert run(path, 17).in_layers == 1 and begun[-1] == 48


def test_when_time_is_over_layers_are_left(cache: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told(distance((3, 3, 3, 3)))
    now = iter(range(10000))
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: 3 * next(now)))
    done = run(cache / "t.json", minutes=0.9)
    assert (done.made, done.in_layers, done.left) == (5, 1, 4)
    assert {row.in_layer for row in done.rows if row.last == 64} == {True}
    assert [row.in_layer for row in done.rows if row.last == 48] == [False]


def test_a_failure_of_the_layers_is_a_warning(cache: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products have rows without them; layers come with the next run."""

    def fails(*arguments: object) -> list[Row]:
        raise torch.OutOfMemoryError("no memory for layers")

    def fails_later(self: LayerTuner, first: int, last: int, in_force: Iterable[Row]) -> list[Row]:
        begun.append(last)
        return rows(self, first, last, in_force) if len(begun) == 1 else fails()

    told(distance((3, 3, 3, 3)))
    rows, begun = LayerTuner.rows, list[int]()
    for owner, name, how, seen in ((layer_tuning, "Layers", fails, 0), (LayerTuner, "rows", fails_later, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, how)
            with pytest.warns(UserWarning, match="not chosen together: no memory") as warned:
                done = run(cache / name, 17)
        assert (done.made, done.left, done.in_layers, len(warned)) == (16, 0, seen, 1)
    assert begun == [64, 48] and run(cache / "rows", 17).in_layers == 3


def test_where_cublaslt_proposes_nothing_there_is_no_row(
    cache: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a layer that needs one; the others are made."""
    told(distance((3, 3, 3, 3)))
    honest = tuning.Bench.heuristics
    missing = {64, 80}
    monkeypatch.setattr(
        tuning.Bench, "heuristics",
        lambda bench, most=8: [] if bench.product == QKV and bench.m in missing else honest(bench, most),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="proposes nothing for fp16 n=2304 k=768 bias with m=80") as warned:
        done = run(cache / "t.json", last=80)
    assert len(warned) == 1 and (done.made, done.left, done.in_layers) == (10, 0, 1)
    assert {m for row in done.rows if row.product == QKV for m in row.timed} == {48}
    assert all(row.in_layer == (m == 48) for row in done.rows for m in row.timed)
    missing.clear()
    again = run(cache / "t.json", last=80)
    assert (again.made, again.in_layers) == (2, 2)  # they come as soon as there is one


def test_without_layers(cache: Path, told: Told) -> None:
    """Where a model never folds, or this GPU or $FTBERT_FOLDED_NORM does not, rows say nothing of layers."""
    for name, most, whole_layers in (("a", 1024, False), ("b", 0, True), ("c", 1024, True)):
        told(distance((3, 3, 3, 3)), OWN if name != "c" else [FakeAlgorithm(2, lambda m: 8.0)], most=most)
        done = run(cache / name, whole_layers=whole_layers)
        assert (done.made, done.in_layers) == (8, 0) and not any(row.in_layer for row in done.rows)
    told(distance((3, 3, 3, 3)), most=48)
    done = run(cache / "d")
    assert {row.last for row in done.rows if row.in_layer} == {48} and numbers(done.rows, 48) == (3, 3, 3, 3)
    assert done.in_layers == 1  # only what was timed counts


@pytest.mark.parametrize("reason", ["no faster", "noise", "slower alone", "wrong alone", "wrong together", "no number"])
def test_what_there_is_stays(told: Told, reason: str) -> None:
    jitter = itertools.cycle((96.0, 99.9, 103.0, 97.0, 104.0, 99.9, 95.0))

    def time(these: tuple[int, ...]) -> float:
        if reason == "noise" and these == (2, 3, 2, 2):
            return next(jitter)  # the least is well ahead, the median barely
        return {"no faster": 100.0}.get(reason, 90.0) if these == (2, 3, 2, 2) else 100.0

    def results(these: tuple[int, ...]) -> torch.Tensor:
        value = {"wrong together": 0.1, "no number": float("nan")}.get(reason, 0.0)
        return torch.full((2, 8), value if these == (2, 3, 2, 2) else 0.0, dtype=torch.float16)

    slow = reason == "slower alone"
    own = [folding(2, 11 if slow else 8), folding(3, 12 if slow else 8.5)]
    own[1].error = 0.5 if reason == "wrong alone" else 1e-4
    told(time, own, results)
    tuner = LayerTuner(BASE, torch.device("cuda:0"))
    found = tuner.rows(49, 64, chosen((2, 2, 2, 2)))
    assert tuner.gains == [] and numbers(found, 64) == (2, 2, 2, 2)
    assert all((r.first, r.last, r.timed, r.in_layer, r.config["tile"]) == (49, 64, (64,), True, 2) for r in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_wrong_row_or_column_is_seen(dtype: torch.dtype) -> None:
    right = torch.randn(1024, 768, generator=torch.Generator().manual_seed(0))
    rounded = (right + 2 * torch.finfo(dtype).eps * torch.randn_like(right)).to(dtype)
    assert layer_tuning.same(right.to(dtype), rounded)
    for place in ((5, slice(None)), (slice(None), 5)):
        for value in (0.0, float("nan")):
            wrong = rounded.clone()
            wrong[place] = value
            assert not layer_tuning.same(right.to(dtype), wrong)


hopper = pytest.mark.skipif(
    not have_gpu() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU with warpgroup instructions"
)


@hopper
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_layers_give_what_the_same_products_give_with_layernorms(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, device = layers_of(products_of_shape(192, 320, "gelu", dtype))[0], torch.device("cuda:0")
    rows = [Row(p, 1, 1024, tuple(next(a for a in Bench(p, 64).fused() if a.folds).data)) for p in layer.plain]
    try:
        folded = Layers(layer, device)
        assert folded.folds(rows, 1) and folded.folds(rows, 1024)
        assert not folded.folds([replace(rows[0], algorithm=None), *rows[1:]], 64)  # cuBLASLt's
        monkeypatch.setenv("FTBERT_FOLDED_NORM", "100")
        assert Layers(layer, device).folds(rows, 64) and not Layers(layer, device).folds(rows, 512)
        monkeypatch.setenv("FTBERT_FOLDED_NORM", "off")
        plain = Layers(layer, device)
        assert not plain.folds(rows, 1)
        for m in (1, 128, 300):
            one, other = (layers.record(rows, m) for layers in (folded, plain))
            assert all(0 < recorded.microseconds() < 1e5 for recorded in (one, other))
            assert one.result.shape == (m, 192) and layer_tuning.same(one.result, other.result)
            assert not torch.equal(one.result, other.result)
            assert not layer_tuning.same(one.result, other.result.flip(1))
    finally:
        gemm_table.install(device, again=True)


@hopper
def test_tune_chooses_for_the_layer(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model runs what was chosen, and computes the same."""
    reference = make_bert(hidden_size=256, num_attention_heads=4, intermediate_size=512)
    call = packed([17, 15, 32])
    want = ftbert.load(reference, device="cuda", dtype=torch.float32).forward_packed(*call)
    arguments = ["tune", "--hidden", "256", "--inter", "512", "--tokens", "49..80", "--json"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "not chosen together" not in printed.err
    done = json.loads(printed.out)
    assert (done["left"], done["in_layers"]) == (0, 2) and len(done["layer_gains"]) <= 2
    path = user_table(Machine.of(torch.device("cuda")))
    assert path is not None
    rows = [row for row in read_table(path)[1] if not row.product.layernorm]
    assert len({row.product for row in rows}) == 4 and all(row.in_layer for row in rows)
    assert measured(path) >= 8
    put_in_force(torch.cuda.current_device(), rows)
    model = ftbert.load(reference, device="cuda", dtype=torch.float16)
    if done["layer_gains"]:
        assert model.info()["folded_layernorm"].startswith("of ")
    assert (model.forward_packed(*call).float() - want).abs().max() < 0.02
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["in_layers"] == 0


@hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
def test_layers_on_another_gpu_than_the_current_one() -> None:
    layer, device = layers_of(products_of_shape(256, 512, "gelu", "fp16"))[0], torch.device("cuda:1")
    tuner = LayerTuner(layer, device)
    made = [ProductTuner(product, device).row(49, 64) for product in layer.plain]
    assert torch.cuda.current_device() == 0
    try:
        found = tuner.rows(49, 64, made)
        assert tuner.can_fold() and len(found) == 4
    finally:
        gemm_table.install(device, again=True)
