"""Layers without LayerNorm kernels (csrc/folded_layers.h) against those with them, and against float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, have_gpu, make_bert
from families import SIZES, make_model
from test_cuda import check_on_threads, packed, profiled
from test_few_tokens import SHAPES
from test_model import check_against_transformers, inputs

import ftbert
from ftbert.converters.weights import FAMILIES

pytestmark = pytest.mark.skipif(
    not have_gpu() or torch.cuda.get_device_capability() != (9, 0), reason="no GPU with warpgroup instructions"
)

HALF = torch.float16
Load = Callable[..., ftbert.Model]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(reference, dtype, folded=False): the switch is read where a model is made."""

    def make(reference: Any, dtype: torch.dtype = HALF, folded: bool = True) -> ftbert.Model:
        monkeypatch.setenv("FTBERT_FOLDED_NORM", "1024" if folded else "off")
        model = ftbert.load(reference, device="cuda", dtype=dtype)
        if dtype != torch.float32:
            assert model.info()["folded_layernorm"].startswith("where" if folded else "no: switched off")
        return model

    return make


def layernorms(call: Callable[[], object]) -> int:
    """Kernels that do nothing else, but for the embeddings'."""
    call()
    with profiled() as profile:
        call()
        torch.cuda.synchronize()
    return sum("add_bias_input_layernorm" in event.name for event in profile.events())


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(load: Load, shape: str, dtype: torch.dtype) -> None:
    reference = make_bert(**SHAPES[shape])
    model = load(reference, dtype)
    sizes = [(1, seq) for seq in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128)] + [(8, 16), (3, 37), (128, 1), (7, 128)]
    for batch, seq in sizes:
        if batch * seq * SHAPES[shape]["hidden_size"] < 512:
            continue  # too few values for a mean error to be compared
        for name, one in inputs(batch, seq).items():
            try:
                check_against_transformers(reference, model, one, Place("cuda", dtype))
            except AssertionError as error:
                raise AssertionError(f"{shape}, {batch}x{seq}, mask {name}: {error}") from error


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu", "tanh"])
def test_activations(load: Load, activation: str) -> None:
    reference = make_bert(**SHAPES["192"], hidden_act=activation)
    check_against_transformers(reference, load(reference), inputs(2, 50)["right"], Place("cuda", HALF))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_agrees_with_layernorm_kernels(load: Load, shape: str, dtype: torch.dtype) -> None:
    """Packed calls with empty sequences, all tokens and first ones; each call gives the same bits every time."""
    reference = make_bert(**SHAPES[shape], num_hidden_layers=3)
    folded, plain = load(reference, dtype), load(reference, dtype, folded=False)
    assert layernorms(lambda: folded.forward_packed(*packed([30, 40]))) == 1
    eps = torch.finfo(dtype).eps
    for lengths in ([128], [1], [5, 0, 33, 1, 0, 64, 0], [0, 16, 16], [17] * 7, [1] * 128, [120] * 8, [3, 128] * 7):
        ids, cu, longest = packed(lengths)
        for call in ("forward_packed", "forward_first_packed"):
            want = getattr(plain, call)(ids, cu, longest)
            first = getattr(folded, call)(ids, cu, longest)
            assert_close(first, want, atol=32 * eps, rtol=8 * eps, what=f"{call}, {lengths}")
            rms = (first.float() - want.float()).square().mean().sqrt()
            assert rms <= 4 * eps, f"{call}, {lengths}: they differ by {rms:.2g} in the mean"
            for _ in range(5):
                assert torch.equal(getattr(folded, call)(ids, cu, longest), first), f"{call}, {lengths}"


def test_one_layernorm_is_left(load: Load) -> None:
    reference = make_bert(**SHAPES["base"], num_hidden_layers=3)
    call = packed([17, 64, 3, 100])
    for folded, count in ((True, 1), (False, 6)):
        model = load(reference, folded=folded)
        assert layernorms(lambda model=model: model.forward_packed(*call)) == count  # type: ignore[misc]


def test_more_tokens_take_the_other_path(load: Load) -> None:
    reference = make_bert(**SHAPES["192"])
    folded, plain = load(reference), load(reference, folded=False)
    for lengths in ([128] * 9, [100] * 30):
        assert torch.equal(folded.forward_packed(*packed(lengths)), plain.forward_packed(*packed(lengths)))


def test_recorded_and_direct_runs_agree(load: Load) -> None:
    """A recording runs more tokens than there are: those past the end must not matter, whatever they are."""
    model = load(make_bert(**SHAPES["192"]))
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


def test_what_lies_in_the_buffers_does_not_leak(load: Load) -> None:
    """A short call after one full of NaN in the same recording."""
    model = load(make_bert(**SHAPES["192"]))
    long, short = packed([33, 60]), packed([31, 52], seed=1)  # both in 96 tokens
    want = [model.forward_packed(*short).clone() for _ in range(3)][-1]
    bad = (torch.full_like(long[0], 10**9), *long[1:])  # outside the vocabulary: rows of NaN
    for _ in range(3):
        assert model.forward_packed(*bad).isnan().all()
        assert torch.equal(model.forward_packed(*short), want)


def test_a_mean_far_from_zero(load: Load) -> None:
    """Where LayerNorm comes after the product, its mean is taken off a sum that was rounded with it."""
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    with torch.no_grad():
        for layer in reference.encoder.layer:
            layer.attention.output.dense.bias += 8
            layer.output.dense.bias -= 8
    ids, cu, longest = packed([70, 30])
    results = [load(reference, folded=folded).forward_packed(ids, cu, longest).double() for folded in (True, False)]
    exact = load(reference, torch.float32, folded=False).forward_packed(ids, cu, longest).double()
    folded, plain = ((result - exact).square().mean().sqrt() for result in results)
    assert folded <= 2 * plain, f"rms error {folded:.2g}, with LayerNorms {plain:.2g}"


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [0.01, 1, 30, 3000], ids=str)
def test_sums_of_any_size(load: Load, dtype: torch.dtype, factor: float) -> None:
    """Squares of a row are added as integers of two sizes; what LayerNorm makes of it does not depend on its size."""
    if dtype == HALF and factor > 100:
        pytest.skip("beyond fp16's range, with LayerNorm kernels")
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    with torch.no_grad():
        for layer in reference.encoder.layer:
            for linear in (layer.attention.output.dense, layer.output.dense):
                linear.weight *= factor
                linear.bias *= factor
            for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm):
                norm.eps = 1e-12
        reference.config.layer_norm_eps = 1e-12
    ids, cu, longest = packed([70, 30])
    results = [load(reference, dtype, folded).forward_packed(ids, cu, longest).double() for folded in (True, False)]
    exact = load(reference, torch.float32, folded=False).forward_packed(ids, cu, longest).double()
    folded, plain = ((result - exact).square().mean().sqrt() for result in results)
    assert folded <= 1.5 * plain, f"rms error {folded:.2g}, with LayerNorms {plain:.2g}"


def test_one_layer(load: Load) -> None:
    reference = make_bert(**SHAPES["192"], num_hidden_layers=1)
    folded, plain = load(reference), load(reference, folded=False)
    call = packed([17, 1, 64])
    for name in ("forward_packed", "forward_first_packed"):
        got, want = (getattr(model, name)(*call) for model in (folded, plain))
        assert_close(got, want, atol=32 * torch.finfo(HALF).eps, what=name)


def test_hidden_states_and_first_tokens(load: Load) -> None:
    reference = make_bert(**SHAPES["192"])
    model = load(reference)
    ids = torch.randint(0, 120, (4, 32), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        want = reference.to("cuda", torch.float32)(ids, output_hidden_states=True)
    got = torch.ops.ftbert.forward_hidden_states(model.encoder, ids, None, None)
    for mine, exact in zip(got, want.hidden_states, strict=True):
        assert_close(mine, exact, atol=64 * torch.finfo(HALF).eps, rtol=64 * torch.finfo(HALF).eps)
    first = model.module.forward_first(ids)[0]
    assert_close(first, want.last_hidden_state[:, 0], atol=64 * torch.finfo(HALF).eps, rtol=64 * torch.finfo(HALF).eps)


def test_an_infinite_neighbour_does_not_leak(load: Load) -> None:
    model = load(make_bert(**SHAPES["192"]))
    model.use_cuda_graphs(False)
    ids, cu, longest = packed([30, 7, 64])
    want = model.forward_packed(ids, cu, longest)
    ids[30:37] = 10**9  # outside the vocabulary: rows of NaN
    got = model.forward_packed(ids, cu, longest)
    assert got[30:37].isnan().all()
    assert torch.equal(got[:30], want[:30]) and torch.equal(got[37:], want[37:])


@pytest.mark.parametrize("graphs", [True, False])
def test_threads_and_streams(load: Load, graphs: bool) -> None:
    model = load(make_bert(**SHAPES["base"], num_hidden_layers=4))
    model.use_cuda_graphs(graphs)
    check_on_threads(model, [packed([8 * i + 3, 2 * i + 1], seed=i) for i in range(8)], threads=4, rounds=60)


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_it_takes(family: str) -> None:
    """test_families.py compares them with transformers: the last size is one for this wherever that can be."""
    state = ftbert.load(make_model(family, "encoder", SIZES[-1]), device="cuda", dtype=HALF).info()["folded_layernorm"]
    pre = ("megatron-bert", "roberta-prelayernorm", "xlm-roberta-xl")
    assert ("LayerNorm comes first" if family in pre else "bias" if family == "mpnet" else "where its") in state


def test_what_it_does_not_do_says_why(load: Load) -> None:
    sizes = SHAPES["192"]
    for words, changes in {
        "multiples of 8": {"intermediate_size": 324},
        "general path": {"num_attention_heads": 12},
    }.items():
        model = ftbert.load(make_bert(**sizes | changes), device="cuda", dtype=HALF)
        assert words in model.info()["folded_layernorm"]
    assert "16-bit" in ftbert.load(make_bert(**sizes), device="cuda", dtype=torch.float32).info()["folded_layernorm"]
    general = ftbert.load(make_bert(**sizes), device="cuda", dtype=HALF, attention="general")
    assert "general" in general.info()["folded_layernorm"]
