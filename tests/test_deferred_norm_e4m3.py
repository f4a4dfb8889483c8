"""Layers in E4M3 without norm kernels (csrc/gemm/gpu/deferred_norm.h) against those with them, and against float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import SHAPES, layernorms, packed
from conftest import make_bert
from families import make_model, make_wide
from fp8_models import quiet, save  # noqa: F401
from own_kernels import tile_kernel
from streams import sums, tilt

import ftbert
from ftbert.quantization import quantize
from ftbert.tuning import Own, Product, Row, gemm_table

pytestmark = pytest.mark.skipif(tile_kernel() != "wgmma_tile", reason="no GPU with a kernel that defers norms in E4M3")

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# Matrices that stay in 16 bits, each with E4M3 ahead of it and behind it: none, some, others.
KEPT: dict[str, tuple[str, ...]] = {
    "all": (),
    "mixed": ("layers.0.attention.out", "layers.1.ffn.up", "layers.2.attention.qkv"),
    "down": ("layers.0.attention.qkv", "layers.0.ffn.down", "layers.2.ffn.down"),
}
Load = Callable[..., ftbert.Model]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """load(reference, dtype, keep, deferred): quantized once; without `dtype` in float32 as it was. deferred: "on", "off",
    or "", where the rule decides."""
    plain, stored = tmp_path / "plain", tmp_path / "fp8"
    device = torch.device("cuda", torch.cuda.current_device())

    def make(
        reference: Any, dtype: torch.dtype | None = None, keep: Sequence[str] = (), deferred: str = "on"
    ) -> ftbert.Model:
        if deferred:
            monkeypatch.setenv("FTBERT_DEFERRED_NORM", deferred)
        else:
            monkeypatch.delenv("FTBERT_DEFERRED_NORM", raising=False)
        if not plain.exists():
            quantize(save(reference, plain), stored, keep=keep, any_loss=True, device="cuda")
        if dtype is None:
            return ftbert.load(plain, "cuda", torch.float32)
        model = ftbert.load(stored, "cuda", dtype)
        gemm_table.put_in_force(device.index, [])  # guessed products are the same on every GPU of a kind
        assert "e4m3" in model.info()["products"]
        return model

    yield make
    gemm_table.install(device, again=True)


def rms_error(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return (torch.cat(list(results)).double() - torch.cat(list(exact)).double()).square().mean().sqrt().item()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", ["192", "base", "nomic_bert"])
@DTYPES
def test_errors_are_those_with_norm_kernels(load: Load, name: str, dtype: torch.dtype, kept: str) -> None:
    """Packed calls with empty sequences, all tokens, first and last ones; each call gives the same bits every time."""
    layers, keep = {"num_hidden_layers": 3}, KEPT[kept]
    reference = make_wide(name, **layers) if name == "nomic_bert" else make_bert(**SHAPES[name], **layers)
    deferred, plain = load(reference, dtype, keep), load(reference, dtype, keep, deferred="off")
    assert deferred.info()["deferred_layernorm"].startswith("of 1 to ")
    exact = load(reference)
    calls = [packed(lengths) for lengths in ([128], [1], [5, 0, 33, 1, 0, 64, 0], [17] * 7, [120] * 3, [3, 128] * 4)]
    for want in ("tokens", "first", "last"):
        results = []
        for call in calls:
            run = partial(deferred.forward_packed, *call, want=want)
            results.append(run())
            assert layernorms(run) == (1 if want == "tokens" else 3), want  # of chosen rows the last layer runs alone
            assert all(torch.equal(run(), results[-1]) for _ in range(3)), want
        right = [exact.forward_packed(*call, want=want) for call in calls]
        theirs = rms_error([plain.forward_packed(*call, want=want) for call in calls], right)
        assert rms_error(results, right) <= 1.25 * theirs, want
    recorded = deferred.forward_packed(*calls[2])
    deferred.use_cuda_graphs(False)
    assert torch.equal(deferred.forward_packed(*calls[2]), recorded)


@pytest.mark.parametrize("factor", [0.03, 1, 30], ids=str)
@DTYPES
def test_sums_of_any_size(load: Load, dtype: torch.dtype, factor: float) -> None:
    """The scale of a sum is taken from the weights: of blocks whose results are far larger or smaller than the stream."""
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    with torch.no_grad():
        for module in sums(reference):
            module.weight *= factor
            module.bias *= factor
    check_one(load, reference, dtype, 1.25)


@pytest.mark.parametrize("block", ["attention.output.dense", "1.output.dense"])
@DTYPES
def test_one_block_far_larger_than_the_others(load: Load, dtype: torch.dtype, block: str) -> None:
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    with torch.no_grad():
        for name, module in reference.named_modules():
            if name.endswith(block):
                module.weight *= 40
    check_one(load, reference, dtype, 1.25)


@DTYPES
def test_sums_with_a_mean(load: Load, dtype: torch.dtype) -> None:
    """It is rounded with the sum, and taken off behind the product."""
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    tilt(reference, 0.5)
    check_one(load, reference, dtype, 1.5)


def check_one(load: Load, reference: Any, dtype: torch.dtype, most: float) -> None:
    call = packed([70, 30])
    deferred, plain, exact = (
        [load(reference, *how).forward_packed(*call)] for how in ((dtype,), (dtype, (), "off"), ())
    )
    mine, theirs = rms_error(deferred, exact), rms_error(plain, exact)
    assert mine <= most * theirs, f"rms error {mine:.3g}, with LayerNorm kernels {theirs:.3g}"


def test_what_it_does_not_do_says_why(load: Load) -> None:
    model = load(make_wide("modernbert", num_hidden_layers=2), torch.bfloat16)
    assert model.info()["deferred_layernorm"] == "no: sums that no norm precedes have no known scale in e4m3"


def test_a_projection_behind_the_embeddings_norm(load: Load) -> None:
    """What is added to is no LayerNorm's, whose gamma has another size."""
    sizes = {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
    model = load(make_model("electra", "encoder", 0, vocab_size=120, **sizes), torch.float16)
    assert model.info()["deferred_layernorm"] == "no: no LayerNorm with gamma and beta precedes the first layer"


@pytest.mark.parametrize("keep", [(), ("layers.0",), ("layers.1",)], ids=str)
def test_many_rows_keep_their_norm_kernels(load: Load, keep: Sequence[str]) -> None:
    """Where products alone run tiles that do not defer norms, and are faster by more than the norms take. Rows of a table
    that name no algorithm leave that to the rule, and others decide."""
    reference = make_bert(**SHAPES["base"], num_hidden_layers=2)
    model = load(reference, torch.float16, keep, deferred="")
    state = model.info()["deferred_layernorm"]
    first, last = (int(word.strip(",")) for word in state.split()[1:4:2])
    assert first == 1 and 256 <= last <= 1024 and (last < 1024 or keep)  # layers in 16 bits defer up to there
    up = Product("e4m3 e4m3 e4m3", 3072, 768, True, "gelu")
    for algorithm, words in ((None, state), (Own("wgmma_persistent", "128x128"), "no: no number")):
        gemm_table.put_in_force(torch.cuda.current_device(), [Row(up, 1, 1024, algorithm)])
        assert model.info()["deferred_layernorm"].startswith(words)
