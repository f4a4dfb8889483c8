"""All layers of few tokens in one kernel (csrc/kernels/layer_stack.h) against transformers and against kernel by kernel."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import Place, have_gpu, make_bert
from families import SIZES, make_model
from test_cuda import check_on_threads, packed
from test_model import check_against_transformers, inputs

import ftbert
from ftbert.converters.weights import FAMILIES

pytestmark = pytest.mark.skipif(not have_gpu(), reason="no GPU")

SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
    "192": {"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 320},
    "64": {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 64},
    "960": {"hidden_size": 960, "num_attention_heads": 15, "intermediate_size": 1920},
}
HALF = torch.float16
Load = Callable[..., ftbert.Model]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(reference, dtype, one_kernel=False): the switch is read where a model is made."""

    def make(reference: Any, dtype: torch.dtype = HALF, one_kernel: bool = True) -> ftbert.Model:
        monkeypatch.setenv("FTBERT_ONE_KERNEL", "on" if one_kernel else "off")
        model = ftbert.load(reference, device="cuda", dtype=dtype)
        state = model.info()["one_kernel"]
        if not one_kernel:
            assert state == "off"
        elif "capability 9.0" in state:
            pytest.skip(f"one kernel: {state}")
        else:
            # How many blocks fit differs between chips of one name: large's 64 tiles of columns may go once or twice.
            whole = torch.cuda.get_device_properties(0).multi_processor_count >= 114
            most = (128,) if whole and reference.config.hidden_size < 1024 else (64, 128)
            assert state in [f"up to {tokens} tokens" for tokens in most]
        return model

    return make


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(load: Load, shape: str, dtype: torch.dtype) -> None:
    reference = make_bert(**SHAPES[shape])
    model = load(reference, dtype)
    sizes = [(1, seq) for seq in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128)] + [(8, 16), (3, 37), (128, 1)]
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
def test_agrees_with_kernel_by_kernel(load: Load, shape: str, dtype: torch.dtype) -> None:
    """Packed calls with empty sequences, all tokens and first ones; each call gives the same bits every time."""
    reference = make_bert(**SHAPES[shape], num_hidden_layers=3)
    one, many = load(reference, dtype), load(reference, dtype, one_kernel=False)
    eps = torch.finfo(dtype).eps
    for lengths in ([128], [1], [5, 0, 33, 1, 0, 64, 0], [0, 16, 16], [17] * 7, [1] * 128):
        ids, cu, longest = packed(lengths)
        for call in ("forward_packed", "forward_first_packed"):
            want = getattr(many, call)(ids, cu, longest)
            first = getattr(one, call)(ids, cu, longest)
            assert_close(first, want, atol=32 * eps, rtol=8 * eps, what=f"{call}, {lengths}")
            rms = (first.float() - want.float()).square().mean().sqrt()
            assert rms <= 4 * eps, f"{call}, {lengths}: they differ by {rms:.2g} in the mean"
            for _ in range(5):
                assert torch.equal(getattr(one, call)(ids, cu, longest), first), f"{call}, {lengths}"


def test_more_tokens_take_the_other_path(load: Load) -> None:
    reference = make_bert(**SHAPES["192"])
    one, many = load(reference), load(reference, one_kernel=False)
    for lengths in ([100, 29], [128, 128]):
        assert torch.equal(one.forward_packed(*packed(lengths)), many.forward_packed(*packed(lengths)))


def test_recorded_and_direct_runs_agree(load: Load) -> None:
    """A recording runs more tokens than there are: those past the end must not matter, whatever they are."""
    model = load(make_bert(**SHAPES["192"]))
    other = model.to()
    other.use_cuda_graphs(False)
    draw = random.Random(0)
    for i in range(40):
        lengths = [draw.randint(0, 20) for _ in range(draw.randint(1, 6))]
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
    results = [load(reference, one_kernel=one).forward_packed(ids, cu, longest).double() for one in (True, False)]
    exact = load(reference, torch.float32, one_kernel=False).forward_packed(ids, cu, longest).double()
    one, many = ((result - exact).square().mean().sqrt() for result in results)
    assert one <= 2 * many, f"rms error {one:.2g}, kernel by kernel {many:.2g}"


def test_one_layer(load: Load) -> None:
    reference = make_bert(**SHAPES["192"], num_hidden_layers=1)
    one, many = load(reference), load(reference, one_kernel=False)
    call = packed([17, 1, 64])
    for name in ("forward_packed", "forward_first_packed"):
        got, want = (getattr(model, name)(*call) for model in (one, many))
        assert_close(got, want, atol=32 * torch.finfo(HALF).eps, what=name)


def test_a_sequence_alone_and_among_others(load: Load) -> None:
    model = load(make_bert(**SHAPES["base"]))
    ids, cu, longest = packed([30, 7, 64, 1])
    whole, at = model.forward_packed(ids, cu, longest), cu.tolist()
    for start, end in zip(at, at[1:], strict=False):
        offsets = torch.tensor([0, end - start], dtype=torch.int32, device="cuda")
        alone = model.forward_packed(ids[start:end], offsets, end - start)
        assert_close(alone, whole[start:end], atol=64 * torch.finfo(HALF).eps, what=f"{start} to {end}")


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
    """Each grid takes the whole GPU: two at once must wait for each other, not for each other's blocks."""
    model = load(make_bert(**SHAPES["base"], num_hidden_layers=4))
    model.use_cuda_graphs(graphs)
    check_on_threads(model, [packed([8 * i + 3, 2 * i + 1], seed=i) for i in range(8)], threads=4, rounds=60)


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_it_takes(load: Load, family: str) -> None:
    """test_families.py compares them with transformers: the last size is the one kernel's wherever that can be."""
    load(make_bert(**SHAPES["192"]))  # skips where no model would
    state = ftbert.load(make_model(family, "encoder", SIZES[-1]), device="cuda", dtype=HALF).info()["one_kernel"]
    pre = ("megatron-bert", "roberta-prelayernorm", "xlm-roberta-xl")
    assert ("LayerNorm comes first" if family in pre else "relative" if family == "mpnet" else "up to 128") in state


def test_what_it_does_not_do_says_why(load: Load) -> None:
    load(make_bert(**SHAPES["192"]))  # skips where no model would
    sizes = SHAPES["192"]
    for words, changes in {
        "multiples of 64": {"hidden_size": 96, "num_attention_heads": 3},
        "less than hidden": {"intermediate_size": 128},
        "1 to 24 layers": {"num_hidden_layers": 25},
        "cannot be divided": {"intermediate_size": 64 * 21},
        "32 or 64 elements": {"hidden_size": 256, "num_attention_heads": 2},
        "attention path": {"num_attention_heads": 12},
    }.items():
        model = ftbert.load(make_bert(**sizes | changes), device="cuda", dtype=HALF)
        assert words in model.info()["one_kernel"]
    assert "16-bit" in ftbert.load(make_bert(**sizes), device="cuda", dtype=torch.float32).info()["one_kernel"]
    general = ftbert.load(make_bert(**sizes), device="cuda", dtype=HALF, attention="general")
    assert "general" in general.info()["one_kernel"]
