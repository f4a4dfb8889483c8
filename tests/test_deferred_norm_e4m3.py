"""Layers in E4M3 without norm kernels (csrc/gemm/gpu/deferred_norm.h) against those with them, and against float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import SHAPES, layernorms, packed
from conftest import make_bert
from families import make_wide
from fp8_models import quiet, save  # noqa: F401
from own_kernels import tile_kernel
from streams import sums, tilt

import ftbert
from ftbert.quantization import quantize

pytestmark = [
    pytest.mark.skipif(tile_kernel() != "wgmma_tile", reason="no GPU with a kernel that defers norms in E4M3"),
    pytest.mark.usefixtures("quiet"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
# Matrices that stay in 16 bits: none; one of each kind, with E4M3 ahead of it and behind it.
KEPT = [(), ("layers.0.attention.out", "layers.1.ffn.up", "layers.2.ffn.down", "layers.2.attention.qkv")]
Load = Callable[..., ftbert.Model]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """load(reference, dtype, keep, deferred): quantized once; without `dtype` in float32 as it was. deferred: "on", "off",
    or "", where the rule decides."""
    plain, stored = tmp_path / "plain", tmp_path / "fp8"

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
        assert "e4m3" in model.info()["products"]
        return model

    return make


def rms_error(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return (torch.cat(list(results)).double() - torch.cat(list(exact)).double()).square().mean().sqrt().item()


@pytest.mark.parametrize("keep", KEPT, ids=["all", "mixed"])
@pytest.mark.parametrize("name", ["192", "base", "nomic_bert"])
@DTYPES
def test_errors_are_those_with_norm_kernels(load: Load, name: str, dtype: torch.dtype, keep: Sequence[str]) -> None:
    """Packed calls with empty sequences, all tokens, first and last ones; each call gives the same bits every time."""
    layers = {"num_hidden_layers": 3}
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
    deferred.use_cuda_graphs(False)
    assert torch.equal(deferred.forward_packed(*calls[0]), deferred.forward_packed(*calls[0]))


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


def test_many_rows_keep_their_norm_kernels(load: Load) -> None:
    """Where products alone run tiles that do not defer norms, and are faster by more than the norms take."""
    model = load(make_bert(**SHAPES["base"], num_hidden_layers=2), torch.float16, deferred="")
    assert model.info()["deferred_layernorm"] == "of 1 to 704 tokens"
