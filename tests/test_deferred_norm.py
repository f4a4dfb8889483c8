"""Layers without norm kernels (csrc/layers/prepared.h) against those with them, and against float32; more of it in
test_few_tokens.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import SHAPES, check_on_threads, check_sizes, kernels, layernorms, packed
from compare import assert_close
from conftest import make_bert
from families import LAYERED, SIZES, WIDE, make_model, make_wide
from own_kernels import tile_kernel
from streams import sums, tilt

import ftbert
from ftbert.tuning import Product, Row, gemm_table

pytestmark = pytest.mark.skipif(not tile_kernel(), reason="no GPU with a kernel that defers norms")

HALF = torch.float16
Load = Callable[..., ftbert.Model]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Load]:
    """load(reference, dtype, deferred=True): the switch is read where a model is made. No table is in force: what is
    guessed is the same on every Hopper GPU, and can defer LayerNorms up to 768 tokens at least. From a folder: some of
    these models have larger errors in fp16 than a live one may have."""
    device = torch.device("cuda", torch.cuda.current_device())

    def make(reference: Any, dtype: torch.dtype = HALF, deferred: bool = True) -> ftbert.Model:
        monkeypatch.setenv("FTBERT_DEFERRED_NORM", "on" if deferred else "off")
        reference.save_pretrained(tmp_path / "model")
        model = ftbert.load(tmp_path / "model", device="cuda", dtype=dtype)
        gemm_table.put_in_force(device.index, [])
        if dtype != torch.float32:
            assert model.info()["deferred_layernorm"].startswith("of 1 to " if deferred else "no: switched off")
        return model

    yield make
    monkeypatch.undo()
    gemm_table.install(device, again=True)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(load: Load, shape: str, dtype: torch.dtype) -> None:
    reference = make_bert(**SHAPES[shape])
    model = load(reference, dtype)
    check_sizes(reference, lambda i: model, dtype, shape)


def norm_kernels(reference: Any, layers_left: int = 0) -> int:
    """That a call runs beside the embeddings': the last one, one before the first layer, and two of each layer that is not
    deferred. ModernBERT has none before the first layer, and where norms follow sums there is none."""
    return 1 + (reference.config.model_type in ("qwen3", "llama", "megatron-bert")) + 2 * layers_left


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*SHAPES, *WIDE])
def test_agrees_with_norm_kernels(load: Load, name: str, dtype: torch.dtype) -> None:
    """Packed calls with empty sequences, all tokens, first and last ones; each call gives the same bits every time."""
    reference = make_wide(name) if name in WIDE else make_bert(**SHAPES[name], num_hidden_layers=3)
    deferred, plain = load(reference, dtype), load(reference, dtype, deferred=False)
    eps = torch.finfo(dtype).eps
    for lengths in ([128], [1], [5, 0, 33, 1, 0, 64, 0], [0, 16, 16], [17] * 7, [1] * 128, [120] * 6, [3, 128] * 5):
        ids, cu, longest = packed(lengths)
        # Of chosen rows the last layer runs alone.
        for call, left in (("tokens", norm_kernels(reference)), *((one, norm_kernels(reference, 1)) for one in ("first", "last"))):
            want = plain.forward_packed(ids, cu, longest, want=call)
            run = partial(deferred.forward_packed, want=call)
            first = run(ids, cu, longest)
            assert_close(first, want, atol=32 * eps, rtol=8 * eps, what=f"{call}, {lengths}")
            rms = (first.float() - want.float()).square().mean().sqrt()
            assert rms <= 4 * eps, f"{call}, {lengths}: they differ by {rms:.2g} in the mean"
            assert layernorms(lambda run=run, of=(ids, cu, longest): run(*of)) == left, f"{call}, {lengths}"  # type: ignore[misc]
            for _ in range(5):
                assert torch.equal(run(ids, cu, longest), first), f"{call}, {lengths}"


@pytest.mark.skipif(tile_kernel() != "mma_tile", reason="another kernel than mma_tile defers norms")
def test_blocks_divide_the_steps_of_few_rows(load: Load) -> None:
    """By the down product's 3072 columns, in streams that each have room for their own sums."""
    model = load(make_bert(**SHAPES["base"], num_hidden_layers=2))
    calls = [packed(lengths, seed=len(lengths)) for lengths in ([40, 24], [128], [5], [64, 100, 40])]
    divided = (", 3, 4>", ", 2, 4>")  # the last two of a shape: blocks of a multiprocessor, and of a tile
    few = calls[2]  # other GPUs divide no steps of more rows
    assert sum(kernels(shape, partial(model.forward_packed, *few)) for shape in divided) == 2
    check_on_threads(model, calls, threads=4, rounds=60)


def test_more_tokens_take_the_other_path(load: Load) -> None:
    reference = make_bert(**SHAPES["192"])
    deferred, plain = load(reference), load(reference, deferred=False)
    assert deferred.info()["deferred_layernorm"] == "of 1 to 1024 tokens"
    for lengths in ([128] * 9, [100] * 30):
        assert torch.equal(deferred.forward_packed(*packed(lengths)), plain.forward_packed(*packed(lengths)))


@pytest.mark.skipif(tile_kernel() != "wgmma_tile", reason="other tiles defer norms of so many tokens")
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "wide"), [(104, 2), (112, 2), (120, 2), (128, 2), (80, 0)])
def test_tiles_that_stand_behind_norms_alone(load: Load, length: int, wide: int, dtype: torch.dtype) -> None:
    """Of 256 columns, for 4096 of them by 769 rows and more, whose product alone takes another kernel. By 832 and 960 rows
    the last tile has half of its own."""
    reference = make_bert(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_hidden_layers=2)
    deferred, plain = load(reference, dtype), load(reference, dtype, deferred=False)
    call, eps = packed([length] * 8), torch.finfo(dtype).eps
    run = partial(deferred.forward_packed, *call)
    assert kernels("TileShape<256", run) == wide and layernorms(run) == 1
    want, got = plain.forward_packed(*call), run()
    assert_close(got, want, atol=32 * eps, rtol=8 * eps)
    assert (got.float() - want.float()).square().mean().sqrt() <= 4 * eps
    assert torch.equal(run(), got)


def test_products_that_are_not_its_own_take_the_other_path(load: Load) -> None:
    """A row of the table decides, whatever deferring would save."""
    model, device = load(make_bert(**SHAPES["base"], num_hidden_layers=2)), torch.cuda.current_device()
    product = Product("fp16", 2304, 768, bias=True)
    gemm_table.put_in_force(device, [Row(product, first, last, None) for first, last in ((1, 16), (129, 200))])
    assert model.info()["deferred_layernorm"] == "of 17 to 128, 193 to 1024 tokens"
    for tokens, left in ((16, 4), (17, 1), (128, 1), (129, 4), (193, 1)):
        call = packed([tokens] if tokens < 129 else [tokens - 100, 100])
        assert layernorms(lambda call=call: model.forward_packed(*call)) == left, tokens  # type: ignore[misc]


def check_error(load: Load, reference: Any, dtype: torch.dtype = HALF, what: str = "deferred") -> None:
    """Against float32: at most 1.5 times that of LayerNorm kernels."""
    call = packed([70, 30])
    exact = load(reference, torch.float32, deferred=False).forward_packed(*call).double()
    results = [load(reference, dtype, deferred).forward_packed(*call).double() for deferred in (True, False)]
    deferred, plain = ((result - exact).square().mean().sqrt().item() for result in results)
    assert deferred <= 1.5 * plain, f"{what}: rms error {deferred:.2g}, with LayerNorms {plain:.2g}"


def test_a_mean_far_from_zero(load: Load) -> None:
    """Where LayerNorm comes after the product, its mean is taken off a sum that was rounded with it."""
    biased, tilted = (make_bert(**SHAPES["base"], num_hidden_layers=2) for _ in range(2))
    with torch.no_grad():
        for i, linear in enumerate(sums(biased)):
            linear.bias += 8 * (-1) ** i
    tilt(tilted, 4)
    for name, reference in (("bias", biased), ("weights", tilted)):
        check_error(load, reference, what=name)


def make_large_means() -> Any:
    """Before the first LayerNorm each row has a mean near 96 and a standard deviation near 0.07, from the values' bias:
    one in the output's bias would be taken off when the model is loaded. Large betas show a wrong scale."""
    reference = make_bert(**SHAPES["base"], num_hidden_layers=1, layer_norm_eps=1e-12)
    attention, norm = reference.encoder.layer[0].attention, reference.embeddings.LayerNorm
    with torch.no_grad():
        for module in (attention.output.dense, norm):
            module.weight *= 0.05
            module.bias *= 0.05
        attention.self.value.bias.fill_(1)
        attention.output.dense.weight += 96 / attention.output.dense.in_features
        attention.output.LayerNorm.bias.copy_(3 * torch.randn(768, generator=torch.Generator().manual_seed(0)))
    return reference


def test_a_mean_far_larger_than_the_spread(load: Load) -> None:
    """A variance as the difference of float squares is wrong by factors up to 2.5 here: rms error 2.6 times as large."""
    check_error(load, make_large_means())


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [0.001, 0.03, 1, 30, 3000], ids=str)
def test_sums_of_any_size(load: Load, dtype: torch.dtype, factor: float) -> None:
    """Squares of a row are added as integers of two sizes; what LayerNorm makes of it does not depend on its size."""
    if dtype == HALF and factor > 100:
        pytest.skip("sums come near the largest number of fp16")
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2, layer_norm_eps=1e-12)
    norms = [norm for name, norm in reference.named_modules() if name.endswith("LayerNorm")]
    with torch.no_grad():
        for module in sums(reference) + (norms if factor < 1 else []):  # small sums: what they are added to is small
            module.weight *= factor
            module.bias *= factor
    check_error(load, reference, dtype)


def test_a_few_large_columns(load: Load) -> None:
    """Of one row, some blocks add squares of one size and some of the other."""
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    with torch.no_grad():
        for i, linear in enumerate(sums(reference)):
            linear.bias[7 + 100 * i] += 1000
            linear.bias[300 + i] -= 700
    check_error(load, reference)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["modernbert", "megatron-bert", "qwen3"])
def test_means_of_a_stream_that_is_kept(load: Load, family: str, dtype: torch.dtype) -> None:
    """LayerNorm takes them off what a product has made of them; RMSNorm leaves them, so they must not be taken off it."""
    reference = make_wide(family, num_hidden_layers=2)
    tilt(reference, 2)
    check_error(load, reference, dtype, family)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
@pytest.mark.parametrize(("family", "key"), [("modernbert", "norm_eps"), ("qwen3", "rms_norm_eps")])
def test_eps_and_gammas_of_norms_before_blocks(load: Load, family: str, key: str, eps: float) -> None:
    """Gammas are stored times a power of two, of which eps knows nothing."""
    reference = make_wide(family, **{key: eps})
    with torch.no_grad():
        for name, module in reference.named_modules():
            factor = 8 if name.endswith(("mlp_norm", "post_attention_layernorm")) else 0.3
            if name.endswith(("norm", "layernorm")) and not isinstance(module, torch.nn.Identity):
                module.weight *= factor
    check_error(load, reference)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [0.01, 1, 30, 3000], ids=str)
def test_streams_of_any_size(load: Load, dtype: torch.dtype, factor: float) -> None:
    """What RMSNorm makes of a row does not depend on its size."""
    if dtype == HALF and factor > 100:
        pytest.skip("sums come near the largest number of fp16")
    reference = make_wide("qwen3", num_hidden_layers=2, rms_norm_eps=1e-12)
    with torch.no_grad():
        for module in (reference.get_input_embeddings(), *sums(reference)):
            module.weight *= factor
    check_error(load, reference, dtype)


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
@pytest.mark.parametrize(("family", "key"), [("modernbert", "norm_eps"), ("qwen3", "rms_norm_eps")])
def test_rows_of_zeros_and_rows_that_are_no_numbers(load: Load, family: str, key: str, eps: float) -> None:
    """Without biases a text of embeddings that are 0 stays 0, and nothing of one text gets into another."""
    reference = make_wide(family, **{key: eps})
    with torch.no_grad():
        reference.get_input_embeddings().weight[7] = 0
    model = load(reference)
    model.use_cuda_graphs(False)
    ids, cu, longest = packed([40, 25, 31])
    want = model.forward_packed(ids, cu, longest)
    assert want.isfinite().all()
    for id_, check in ((7, lambda rows: not rows.any()), (10**9, lambda rows: rows.isnan().all())):
        ids[40:65] = id_
        got = model.forward_packed(ids, cu, longest)
        assert check(got[40:65]), id_
        assert torch.equal(got[:40], want[:40]) and torch.equal(got[65:], want[65:])


@pytest.mark.parametrize("family", LAYERED)
def test_which_families_it_takes(family: str) -> None:
    """test_families.py compares them with transformers: the last size is one for this wherever that can be."""
    sizes = {"head_dim": 32} if family in ("qwen3", "ministral", "gemma", "gemma3_text") else {}
    model = ftbert.load(make_model(family, "encoder", SIZES[-1], **sizes), device="cuda", dtype=HALF)
    layers = model.config.layers
    if any(layer.attention.relative_bias or layer.attention.position_scores for layer in layers) or family == "gemma2":
        expected = "no: attention has a bias or takes the general path"
    else:
        expected = "no: a block's result has a norm of its own" if family == "gemma3_text" else "of 1 to"
    assert model.info()["deferred_layernorm"].startswith(expected)


def test_what_it_does_not_do_says_why(load: Load) -> None:
    sizes = SHAPES["192"]
    for words, changes in {
        "multiples of 8": {"intermediate_size": 324},
        "general path": {"num_attention_heads": 12},
        "more than 4096": {"hidden_size": 4160, "num_attention_heads": 65, "num_hidden_layers": 1},
    }.items():
        model = ftbert.load(make_bert(**sizes | changes), device="cuda", dtype=HALF)
        assert words in model.info()["deferred_layernorm"]
    assert "16-bit" in ftbert.load(make_bert(**sizes), device="cuda", dtype=torch.float32).info()["deferred_layernorm"]
    general = ftbert.load(make_bert(**sizes), device="cuda", dtype=HALF, attention="general")
    assert "general" in general.info()["deferred_layernorm"]


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = make_bert(**SHAPES["192"])
    for value, words in (("100", "of 1 to 100 tokens"), ("off", "switched off"), ("0", "switched off")):
        monkeypatch.setenv("FTBERT_DEFERRED_NORM", value)
        assert words in ftbert.load(reference, device="cuda", dtype=HALF).info()["deferred_layernorm"]
    for value in ("", "yes", "-1", "1e3"):
        monkeypatch.setenv("FTBERT_DEFERRED_NORM", value)
        with pytest.raises(RuntimeError, match=f'FTBERT_DEFERRED_NORM is "{value}"; expected off, on'):
            ftbert.load(reference, device="cuda", dtype=HALF)
