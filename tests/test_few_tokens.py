"""The kernel with a block for each tile, wgmma_tile or mma_tile, forced on whole models by a table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import SHAPES, check_against_transformers, check_on_threads, check_sizes, inputs, layernorms, packed
from compare import assert_close
from conftest import Place, make_bert
from families import WIDE, make_wide
from own_kernels import VARIANTS, WORDS, tile_kernel

import ftbert
from ftbert.tuning import Bench, Row, choice_of, gemm_table, products, without_norm

TILE = tile_kernel()
pytestmark = pytest.mark.skipif(not TILE, reason="no GPU with a kernel that defers norms")

HALF = torch.float16
Load = Callable[..., ftbert.Model]
DEFERRED = pytest.mark.parametrize("deferred", [False, True], ids=["layernorms", "deferred"])


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """load(reference, dtype, first, deferred=False): its products run these own ones, `first` and those after it, one
    each."""
    device = torch.device("cuda", torch.cuda.current_device())

    def make(reference: Any, dtype: torch.dtype = HALF, first: int = 0, deferred: bool = False) -> ftbert.Model:
        monkeypatch.setenv("FTBERT_DEFERRED_NORM", "2048" if deferred else "off")
        model = ftbert.load(reference, device="cuda", dtype=dtype)
        rows = {}
        for i, product in enumerate(products(model.config, WORDS[dtype])):
            plain = without_norm(product)
            able = [a for a in Bench(plain, 64).own() if a.kernel == TILE]
            rows[plain] = Row(plain, 1, 2048, choice_of(able[(first + i) % len(able)]))
        # These and no others: rows without times would give way to the package's.
        gemm_table.put_in_force(device.index, rows.values())
        for row in rows.values():
            assert all(choice_of(Bench(row.product, m).chosen()) == row.algorithm for m in (1, 80, 1024)), str(row)
        state = model.info()["deferred_layernorm"]
        assert state == ("of 1 to 2048 tokens" if deferred else "no: switched off")
        return model

    yield make
    monkeypatch.undo()
    gemm_table.install(device, again=True)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(load: Load, shape: str, dtype: torch.dtype) -> None:
    reference = make_bert(**SHAPES[shape])
    check_sizes(reference, lambda i: load(reference, dtype, 4 * i), dtype, shape)


@DEFERRED
@pytest.mark.parametrize("first", range(len(VARIANTS.get(TILE, []))))
def test_every_one_in_a_model(load: Load, first: int, deferred: bool) -> None:
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    model = load(reference, first=first, deferred=deferred)
    assert layernorms(lambda: model.forward_packed(*packed([64, 30]))) == (1 if deferred else 4)
    for one in (inputs(3, 50)["right"], inputs(20, 90)["holes"]):
        check_against_transformers(reference, model, one, Place("cuda", HALF))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", range(len(VARIANTS.get(TILE, []))))
@pytest.mark.parametrize("family", WIDE)
def test_every_one_in_other_families(load: Load, family: str, first: int, dtype: torch.dtype) -> None:
    """Against float32: deferred norms have at most 1.5 times the error of norms that are kernels."""
    reference = make_wide(family)
    exact = ftbert.load(reference, device="cuda", dtype=torch.float32)
    models = [load(reference, dtype, first, deferred) for deferred in (True, False)]
    for lengths in ([64, 30], [7, 128, 120, 128]):
        want, *got = (model.forward_packed(*packed(lengths)).double() for model in (exact, *models))
        deferred, plain = ((one - want).square().mean().sqrt().item() for one in got)
        assert deferred <= 1.5 * plain, f"{lengths}: rms error {deferred:.2g}, with norms as kernels {plain:.2g}"


@DEFERRED
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu", "tanh"])
def test_activations(load: Load, activation: str, deferred: bool) -> None:
    reference = make_bert(**SHAPES["192"], hidden_act=activation)
    check_against_transformers(reference, load(reference, deferred=deferred), inputs(2, 50)["right"], Place("cuda", HALF))


@DEFERRED
def test_recorded_and_direct_runs_agree(load: Load, deferred: bool) -> None:
    """A recording runs more tokens than there are: those past the end must not matter, whatever they are."""
    model = load(make_bert(**SHAPES["192"]), deferred=deferred)
    other = model.to()
    other.use_cuda_graphs(False)
    draw = random.Random(0)
    for i in range(40):
        lengths = [draw.randint(0, 90) for _ in range(draw.randint(1, 6))]
        if not sum(lengths):
            continue
        call = packed(lengths, seed=i)
        want = other.forward_packed(*call)
        for _ in range(3):
            assert_close(model.forward_packed(*call), want, atol=64 * torch.finfo(HALF).eps, what=str(lengths))


@DEFERRED
def test_what_lies_in_the_buffers_does_not_leak(load: Load, deferred: bool) -> None:
    """A short call after one full of NaN in the same recording."""
    model = load(make_bert(**SHAPES["192"]), deferred=deferred)
    long, short = packed([33, 60]), packed([31, 52], seed=1)  # both in 96 tokens
    want = [model.forward_packed(*short).clone() for _ in range(3)][-1]
    bad = (torch.full_like(long[0], 10**9), *long[1:])  # outside the vocabulary: rows of NaN
    for _ in range(3):
        assert model.forward_packed(*bad).isnan().all()
        assert torch.equal(model.forward_packed(*short), want)


@DEFERRED
def test_an_infinite_neighbour_does_not_leak(load: Load, deferred: bool) -> None:
    model = load(make_bert(**SHAPES["192"]), deferred=deferred)
    model.use_cuda_graphs(False)
    ids, cu, longest = packed([30, 7, 64])
    want = model.forward_packed(ids, cu, longest)
    ids[30:37] = 10**9  # outside the vocabulary: rows of NaN
    got = model.forward_packed(ids, cu, longest)
    assert got[30:37].isnan().all()
    assert torch.equal(got[:30], want[:30]) and torch.equal(got[37:], want[37:])


@DEFERRED
@pytest.mark.parametrize("graphs", [True, False])
def test_threads_and_streams(load: Load, graphs: bool, deferred: bool) -> None:
    model = load(make_bert(**SHAPES["base"], num_hidden_layers=4), first=9, deferred=deferred)
    model.use_cuda_graphs(graphs)
    check_on_threads(model, [packed([8 * i + 3, 2 * i + 1], seed=i) for i in range(8)], threads=4, rounds=60)
