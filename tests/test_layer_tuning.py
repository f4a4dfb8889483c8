"""The products of a layer chosen together (ftbert/tuning/layer_tuner.py), where its LayerNorms are deferred to them."""

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
from test_gemm_table import HERE
from test_gemm_table import user as user
from test_tuning import measured

import ftbert
from ftbert.cli import main
from ftbert.tuning import (
    WGMMA_TILE,
    Bench,
    Layer,
    LayerTuner,
    Machine,
    Own,
    Row,
    choice_of,
    gemm_table,
    products_of_shape,
    put_in_force,
)
from ftbert.tuning import layer_tuner as layer_tuning
from ftbert.tuning import product_tuner as tuning
from ftbert.tuning import run as tune
from ftbert.tuning.gemm_table import read_table, user_table
from ftbert.tuning.layer_tuner import Layers

BASE = Layer(*products_of_shape(768, 3072, "gelu", "fp16"))
Time = Callable[[tuple[int, ...]], float]  # of a layer, by its products' numbers, 1 for one of cuBLASLt's
OWN = [FakeAlgorithm(number, 7 + 0.5 * number, WGMMA_TILE) for number in (2, 3, 4)]  # alone 2 is the fastest


def number_of(row: Row) -> int:
    return int(row.algorithm.variant) if isinstance(row.algorithm, Own) else 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """told(time): whole layers take that long, by the numbers of their products. own: ftbert's; results: what layers
    give."""

    def make(
        time: Time,
        own: Iterable[FakeAlgorithm] = OWN,
        results: Callable[[tuple[int, ...]], torch.Tensor] = lambda these: torch.zeros(2, 8, dtype=torch.float16),
    ) -> None:
        fake_gpu(monkeypatch, [FakeAlgorithm(1, 10.0)], list(own))
        monkeypatch.setattr(layer_tuning, "Bench", tuning.Bench)
        monkeypatch.setattr(Machine, "of", staticmethod(lambda device: HERE))
        for name in ("install", "put_in_force"):
            monkeypatch.setattr(tune, name, lambda *arguments, **named: None)

        class FakeLayers:
            def __init__(self, layer: Layer, device: object) -> None:
                assert layer == BASE

            def defers_norms(self, rows: Iterable[Row], m: int) -> bool:
                return True

            def record(self, rows: Iterable[Row], m: int) -> SimpleNamespace:
                by_product = {row.product: number_of(row) for row in rows}
                these = tuple(by_product[product] for product in BASE.plain)
                return SimpleNamespace(result=results(these), microseconds=lambda: time(these))

        monkeypatch.setattr(layer_tuning, "Layers", FakeLayers)

    return make


def numbers(rows: list[Row], m: int) -> tuple[int, ...]:
    return tuple(next(number_of(r) for r in rows if r.product == p and r.first <= m <= r.last and r.algorithm)
                 for p in BASE.plain)  # fmt: skip


def run(path: Path, first: int = 33, last: int = 64, **named: Any) -> tune.Tuned:
    return tune.tune(BASE, path, first, last, device="cuda:0", **named)


def distance(best: tuple[int, ...]) -> Time:
    return lambda these: 100.0 + sum(a != b for a, b in zip(these, best, strict=True))


def test_a_layer_runs_what_it_is_the_fastest_with(user: Path, told: Callable[..., None]) -> None:
    best = (2, 4, 3, 2)
    told(distance(best))
    done = run(user)
    assert numbers(done.rows, 48) == numbers(done.rows, 64) == best
    assert (done.made, done.left) == (8, 0)
    assert all(row.in_layer and row.followed == (row.product in BASE.plain[1::2]) for row in done.rows)
    alone = {row.product: row.us for row in done.rows}
    assert alone[BASE.plain[1]] == (9.0, 9.0)  # its own time stands in the file, not the layer's
    told(distance((3, 3, 3, 3)))
    again = run(user)
    assert (again.made, again.left) == (0, 0) and again.rows == done.rows
    assert numbers(run(user, force=True).rows, 64) == (3, 3, 3, 3)


def test_a_failure_of_the_layers_is_a_warning(user: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products have rows without them; layers come with the next run."""

    def fails_later(self: LayerTuner, first: int, last: int, in_force: Iterable[Row]) -> list[Row]:
        begun.append(last)
        if len(begun) > 1:
            raise torch.OutOfMemoryError("no memory for layers")
        return rows(self, first, last, in_force)

    told(distance((3, 3, 3, 3)))
    rows, begun = LayerTuner.rows, list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(LayerTuner, "rows", fails_later)
        with pytest.warns(UserWarning, match="not chosen together: no memory") as warned:
            done = run(user, 17)
    assert (done.made, done.left, len(warned)) == (16, 0, 1)
    assert begun == [64, 48] and {m for row in done.rows for m in row.timed if row.in_layer} == {64}
    assert all(row.in_layer for row in run(user, 17).rows)


@pytest.mark.parametrize("reason", ["no faster", "noise", "slower alone", "wrong alone", "wrong together", "no number"])
def test_what_there_is_stays(told: Callable[..., None], reason: str) -> None:
    jitter = itertools.cycle((96.0, 99.9, 103.0, 97.0, 104.0, 99.9, 95.0))

    def time(these: tuple[int, ...]) -> float:
        if reason == "noise" and these == (2, 3, 2, 2):
            return next(jitter)  # the least is well ahead, the median barely
        return {"no faster": 100.0}.get(reason, 90.0) if these == (2, 3, 2, 2) else 100.0

    def results(these: tuple[int, ...]) -> torch.Tensor:
        value = {"wrong together": 0.1, "no number": float("nan")}.get(reason, 0.0)
        return torch.full((2, 8), value if these == (2, 3, 2, 2) else 0.0, dtype=torch.float16)

    us = (11, 12) if reason == "slower alone" else (8, 8.5)
    error = 0.5 if reason == "wrong alone" else 1e-4
    told(time, [FakeAlgorithm(2, us[0], WGMMA_TILE), FakeAlgorithm(3, us[1], WGMMA_TILE, error)], results)
    tuner = LayerTuner(BASE, torch.device("cuda:0"))
    alone = [Row(p, 33, 128, Own(WGMMA_TILE, "2"), (64, 128), (8.0, 8.0), (10.0, 10.0), {"tile": 2}) for p in BASE.plain]
    found = tuner.rows(49, 64, alone)
    assert numbers(found, 64) == (2, 2, 2, 2)
    assert all((r.first, r.last, r.timed, r.in_layer, r.config["tile"]) == (49, 64, (64,), True, 2) for r in found)


hopper = pytest.mark.skipif(
    not have_gpu() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU with warpgroup instructions"
)


@hopper
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_layers_give_what_the_same_products_give_with_layernorms(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another GPU than the current one, where there are several."""
    layer, device = Layer(*products_of_shape(192, 320, "gelu", dtype)), torch.device("cuda", torch.cuda.device_count() - 1)
    rows = [Row(p, 1, 1024, choice_of(next(a for a in Bench(p, 64, device).own() if a.kernel == WGMMA_TILE))) for p in layer.plain]
    try:
        deferred = Layers(layer, device)
        assert deferred.defers_norms(rows, 1) and deferred.defers_norms(rows, 1024)
        assert not deferred.defers_norms([replace(rows[0], algorithm=None), *rows[1:]], 64)  # cuBLASLt's
        monkeypatch.setenv("FTBERT_DEFERRED_NORM", "100")
        assert Layers(layer, device).defers_norms(rows, 64) and not Layers(layer, device).defers_norms(rows, 512)
        monkeypatch.setenv("FTBERT_DEFERRED_NORM", "off")
        plain = Layers(layer, device)
        assert not plain.defers_norms(rows, 1)
        for m in (1, 128, 300):
            one, other = (layers.record(rows, m) for layers in (deferred, plain))
            assert all(0 < recorded.microseconds() < 1e5 for recorded in (one, other))
            assert one.result.shape == (m, 192) and layer_tuning.same(one.result, other.result)
            assert not torch.equal(one.result, other.result)
            assert not layer_tuning.same(one.result, other.result.flip(1))
    finally:
        gemm_table.install(device, again=True)


@hopper
def test_tune_chooses_for_the_layer(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model runs what was chosen, and computes the same."""
    reference = make_bert(hidden_size=256, num_attention_heads=4, intermediate_size=512)
    call = packed([17, 15, 32])
    want = ftbert.load(reference, device="cuda", dtype=torch.float32).forward_packed(*call)
    arguments = ["tune", "--hidden", "256", "--inter", "512", "--tokens", "49..80", "--json"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "not chosen together" not in printed.err
    done = json.loads(printed.out)
    assert done["left"] == 0
    path = user_table(Machine.of(torch.device("cuda")))
    assert path is not None
    rows = [row for row in read_table(path)[1] if not row.product.layernorm]
    assert len({row.product for row in rows}) == 4 and all(row.in_layer for row in rows)
    assert measured(path) >= 8
    put_in_force(torch.cuda.current_device(), rows)
    model = ftbert.load(reference, device="cuda", dtype=torch.float16)
    assert (model.forward_packed(*call).float() - want).abs().max() < 0.02
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == done["rows"]
