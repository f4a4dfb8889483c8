"""The products of a layer chosen together (ftbert/layer_tuning.py), where its LayerNorms are folded into them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import have_gpu, make_bert
from fake_gpu import FakeAlgorithm, fake_gpu
from test_cuda import packed
from test_tuning import HERE, measured
from test_tuning import cache as cache

import ftbert
from ftbert import gemm_table, layer_tuning, tune, tuning
from ftbert.cli import main
from ftbert.gemm_rows import Product, Row
from ftbert.gemm_table import Machine, put_in_force, read_table, user_table
from ftbert.layer_tuning import Layer, Layers, LayerTuner, layers_of
from ftbert.tuning import Bench, products_of_shape, without_layernorm

QKV, OUT, UP, DOWN = BASE = Layer(*products_of_shape(768, 3072, "gelu", "fp16"))
Time = Callable[[tuple[int, ...]], float]  # of a layer, by its products' numbers, 0 for one of cuBLASLt's


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_layers_are_put_together_from_products(activation: str) -> None:
    base, large = (products_of_shape(n, 4 * n, activation, "bf16") for n in (768, 1024))
    assert layers_of([*base, *reversed(large)]) == [Layer(*base), Layer(*large)]
    assert layers_of(base[:3]) == layers_of(base[1:]) == []  # not all of it
    assert layers_of(products_of_shape(768, 3072, activation, "fp32")) == []
    assert layers_of([without_layernorm(p) if p.layernorm else p for p in base]) == []  # the LayerNorm comes first
    assert layers_of([Product("bf16", 2304, 768), *base[1:]]) == []  # the general attention path


def folding(number: int, us: float) -> FakeAlgorithm:
    algorithm = FakeAlgorithm(number, lambda m: us)
    algorithm.id, algorithm.folds = -1, True
    return algorithm


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """told(time, own): whole layers take that long, by the numbers of their products; ftbert's are these."""

    def make(time: Time, own: Iterable[FakeAlgorithm], results: Callable[[tuple[int, ...]], torch.Tensor] | None = None) -> None:
        fake_gpu(monkeypatch, [FakeAlgorithm(1, lambda m: 10.0)], list(own))
        monkeypatch.setattr(layer_tuning, "Bench", tuning.Bench)
        monkeypatch.setattr(Machine, "of", staticmethod(lambda device: HERE))
        for name in ("install", "put_in_force"):
            monkeypatch.setattr(tune, name, lambda *arguments, **named: None)

        class Recorded:
            def __init__(self, rows: list[Row]) -> None:
                numbers = {row.product: row.algorithm[0] if row.algorithm else 1 for row in rows}
                self.numbers = tuple(numbers[product] for product in BASE.plain)
                self.result = results(self.numbers) if results else torch.zeros(2, 8, dtype=torch.float16)

            def microseconds(self) -> float:
                return time(self.numbers)

        class FakeLayers:
            def __init__(self, layer: Layer, device: object) -> None:
                assert layer == BASE

            def folds(self, rows: Iterable[Row]) -> bool:
                return True

            def record(self, rows: list[Row], m: int) -> Recorded:
                return Recorded(rows)

        monkeypatch.setattr(layer_tuning, "Layers", FakeLayers)

    return make


def numbers(rows: list[Row], m: int) -> tuple[int, ...]:
    return tuple(next(r.algorithm[0] for r in rows if r.product == p and r.first <= m <= r.last and r.algorithm)
                 for p in BASE.plain)  # fmt: skip


OWN = [folding(number, 7 + 0.5 * number) for number in (2, 3, 4)]  # alone 2 is the fastest


def run(path: Path, force: bool = False) -> tune.Tuned:
    return tune.tune(BASE, 33, 64, device="cuda:0", path=path, force=force, show_progress_bar=False)


def test_a_layer_runs_what_it_is_the_fastest_with(cache: Path, told: Callable[..., None]) -> None:
    best = (2, 4, 3, 2)
    told(lambda these: 100.0 + sum(a != b for a, b in zip(these, best, strict=True)), OWN)
    path = cache / "t.json"
    done = run(path)
    assert numbers(done.rows, 48) == numbers(done.rows, 64) == best
    assert (done.made, done.left) == (8, 0) and done.layer_gains == pytest.approx([0.02, 0.02])
    assert all(row.in_layer and row.followed == (row.product in BASE.plain[1::2]) for row in done.rows)
    assert "in 2 ranges whole layers are faster" in str(done) and "2.0% in the median" in str(done)
    alone = {row.product: row.us for row in done.rows}
    assert alone[BASE.plain[1]] == (9.0, 9.0)  # its own time stands in the file, not the layer's
    again = run(path)
    assert (again.made, again.left, again.layer_gains) == (0, 0, []) and again.rows == done.rows
    assert len(run(path, force=True).layer_gains) == 2


def test_a_run_cut_short_goes_on_with_its_layers(
    cache: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(lambda these: 100.0 - (these == (3, 2, 2, 2)), OWN)
    path, rows = cache / "t.json", LayerTuner.rows
    begun: list[int] = []

    def once(self: LayerTuner, first: int, last: int, in_force: Iterable[Row]) -> list[Row]:
        begun.append(last)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return rows(self, first, last, in_force)

    monkeypatch.setattr(LayerTuner, "rows", once)
    with pytest.raises(KeyboardInterrupt):
        run(path)
    kept = read_table(path)[1]
    assert numbers(kept, 64) == (3, 2, 2, 2) and numbers(kept, 48) == (2, 2, 2, 2)
    done = run(path)
    assert begun == [64, 48, 48] and (done.made, done.left) == (0, 0)
    assert numbers(done.rows, 48) == (3, 2, 2, 2)


SLOW = [folding(number, 9 + number) for number in (2, 3)]


@pytest.mark.parametrize("reason", ["no faster", "noise", "slower alone", "wrong alone", "wrong together", "no number"])
def test_what_there_is_stays(cache: Path, told: Callable[..., None], reason: str) -> None:
    def time(these: tuple[int, ...]) -> float:
        return {"no faster": 100.0, "noise": 99.8}.get(reason, 90.0) if these == (2, 3, 2, 2) else 100.0

    def results(these: tuple[int, ...]) -> torch.Tensor:
        value = {"wrong together": 0.1, "no number": float("nan")}.get(reason, 0.0)
        return torch.full((2, 8), value if these == (2, 3, 2, 2) else 0.0, dtype=torch.float16)

    own = SLOW if reason == "slower alone" else [folding(2, 8), folding(3, 8.5)]
    own[1].wrong = reason == "wrong alone"
    told(time, own, results)
    tuner = LayerTuner(BASE, torch.device("cuda:0"))
    before = [Row(p, 33, 128, (2,) * 8, (64, 128), (8.0, 8.0), (10.0, 10.0), {"tile": 2}) for p in BASE.plain]
    found = tuner.rows(49, 64, before)
    assert tuner.gains == [] and numbers(found, 64) == (2, 2, 2, 2)
    assert all((r.first, r.last, r.timed, r.in_layer, r.config["tile"]) == (49, 64, (64,), True, 2) for r in found)


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
        assert folded.folds(rows) and not folded.folds([replace(rows[0], algorithm=None), *rows[1:]])  # cuBLASLt's
        monkeypatch.setenv("FTBERT_FOLDED_NORM", "off")
        plain = Layers(layer, device)
        assert not plain.folds(rows)
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
    done = json.loads(capsys.readouterr().out)
    assert done["left"] == 0 and len(done["layer_gains"]) <= 2
    path = user_table(Machine.of(torch.device("cuda")))
    assert path is not None
    rows = [row for row in read_table(path)[1] if not row.product.layernorm]
    assert len({row.product for row in rows}) == 4 and all(row.in_layer for row in rows)
    assert measured(path) >= 8
    put_in_force(torch.cuda.current_device(), rows)
    got = ftbert.load(reference, device="cuda", dtype=torch.float16).forward_packed(*call)
    assert (got.float() - want).abs().max() < 0.02
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["layer_gains"] == []
