"""Products that contain the norm behind them (wgmma_layernorm, wgmma_prenorm): alone, and forced on whole models by a
table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference as exact
import torch
from calls import (
    check_against_transformers,
    check_every_mask,
    check_on_threads,
    first_kept,
    inputs,
    kernels,
    packed,
    ragged,
)
from compare import assert_close
from conftest import Place, first_of, make_bert
from families import make_model
from norm_rules import RMS, RULES, Rule
from own_kernels import VARIANTS, WORDS, have_warpgroups, supports

import ftbert
from ftbert._library import load_library
from ftbert.converters.families import find_family
from ftbert.tuning import (
    WITH_LAYERNORM,
    WITH_NORM,
    WITH_PRENORM,
    Bench,
    Machine,
    Own,
    Product,
    Row,
    gemm_table,
    products,
)
from ftbert.tuning.gemm_table import add_rows

pytestmark = pytest.mark.skipif(
    not have_warpgroups(), reason="no GPU with warpgroup instructions"
)

load_library()
ops = torch.ops.ftbert
HALF = torch.float16
DTYPES = pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
EACH = pytest.mark.parametrize("kernel,variant", [(kernel, variant) for kernel in WITH_NORM for variant in VARIANTS.get(kernel, [])])
SHAPES: dict[str, dict[str, Any]] = {
    "384": {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536},
    "1024": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 320},
}
# Pre-norm: without biases and betas, RMSNorm rounded before its weight, with both.
PRE = ["modernbert", "eurobert", "roberta-prelayernorm"]
PRE_SHAPE = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "intermediate_size": 256, "vocab_size": 120}
Force = Callable[..., None]
CASES = pytest.mark.parametrize("kernel,rule", [(kernel, rule) for kernel in WITH_NORM for rule in RULES[kernel]])


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).cuda()


class Operands:
    """Of one product: random, and what comes out in float64."""

    def __init__(self, m: int, n: int, k: int, rule: Rule, bias: bool, dtype: torch.dtype) -> None:
        self.rule = rule
        self.a, self.weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype, scale=1 / math.sqrt(k), seed=1)
        self.residual = random(m, n, dtype=dtype, seed=2)
        self.bias = random(n, dtype=dtype, seed=3) if bias else None
        self.gamma = 1 + 0.2 * random(n, dtype=dtype, seed=4)
        self.beta = random(n, dtype=dtype, seed=5) if rule.beta else None

    def run(self, kernel: str, variant: str, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
        """norm and sum; without the latter from a kernel that keeps none"""
        kind, offset, rounding, _ = self.rule
        norm, total, _ = ops.linear_norm(
            self.a, self.weight, self.bias, self.residual, self.gamma, self.beta, eps, variant, kind, offset, rounding,
            kernel == WITH_PRENORM,
        )  # fmt: skip
        return norm, total

    def expected(self, eps: float = 1e-5) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.a.double() @ self.weight.double().T + self.residual.double()
        total = total if self.bias is None else total + self.bias.double()
        gamma, beta = self.gamma.double(), 0.0 if self.beta is None else self.beta.double()
        if self.rule.kind == "rms":
            return exact.rmsnorm(total, gamma, beta, eps, self.rule.offset), total
        return exact.layernorm(total, gamma, beta, eps), total


def asked(kernel: str, dtype: torch.dtype, n: int, k: int, bias: bool) -> Product:
    return Product(WORDS[dtype], n, k, bias, layernorm=kernel == WITH_LAYERNORM, prenorm=kernel == WITH_PRENORM)


@pytest.mark.parametrize("m", [1, 63, 64, 130, 1000, 4500])
@pytest.mark.parametrize("n,k", [(384, 384), (768, 3072), (1024, 136), (1152, 64), (192, 8), (1536, 256), (2048, 64)])
@CASES
@DTYPES
def test_equals_float64(kernel: str, rule: Rule, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    eps, ran = torch.finfo(dtype).eps, []
    for bias in (True, False):
        one = Operands(m, n, k, rule, bias, dtype)
        norm, total = one.expected()
        for variant in VARIANTS[kernel]:
            if not supports(kernel, variant, asked(kernel, dtype, n, k, bias), m):
                with pytest.raises(RuntimeError, match="cannot do"):
                    one.run(kernel, variant)
                continue
            ran.append(variant)
            got, kept = one.run(kernel, variant)
            assert_close(got, norm, atol=3 * eps, rtol=2 * eps, what=f"variant {variant}")
            if kernel == WITH_PRENORM:
                assert_close(kept, total, atol=eps, rtol=eps, what=f"sum, variant {variant}")
            again = one.run(kernel, variant)
            assert torch.equal(got, again[0]) and torch.equal(kept, again[1]), variant
    assert ran


@EACH
@DTYPES
def test_far_from_zero_and_with_a_row_that_is_no_number(kernel: str, variant: str, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for rule in RULES[kernel]:
        one = Operands(300, 768, 64, rule, False, dtype)
        if rule.kind == "layer":
            one.residual = one.residual * 8 + 256
        norm, _ = one.expected(1e-12)
        assert_close(one.run(kernel, variant, 1e-12)[0], norm, atol=1e-4 + 8 * eps, rtol=2 * eps)
        whole = one.residual
        for bad in (float("nan"), float("inf")):
            one.residual = whole.clone()
            one.residual[77, 5] = bad
            got, total = one.run(kernel, variant, 1e-12)
            assert got[77].isnan().all() or rule.kind == "rms"
            assert got[77, 5].isnan() and (kernel == WITH_LAYERNORM or not total[77, 5].isfinite())
            others = [i for i in range(300) if i != 77]
            assert_close(got[others], norm[others], atol=1e-4 + 8 * eps, rtol=2 * eps)


def test_on_several_streams_at_once() -> None:
    """Blocks wait for each other: with two such kernels on a GPU all of one must come before the other's."""
    ran = [(kernel, variant) for kernel in WITH_NORM for variant in VARIANTS[kernel]]
    all_of_them = [Operands(m, 768, 768, Rule(), True, HALF) for m in (300, 5000, 9000, 64)]
    alone = [{each: one.run(*each)[0] for each in ran} for one in all_of_them]
    streams = [torch.cuda.Stream() for _ in all_of_them]
    torch.cuda.synchronize()
    together = []
    for _ in range(20):
        for each in ran:
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    together.append((i, each, all_of_them[i].run(*each)[0]))
    torch.cuda.synchronize()
    assert all(torch.equal(got, alone[i][each]) for i, each, got in together)


@pytest.mark.parametrize("m", [1, 65, 130, 1000])
@EACH
def test_rows_past_the_last_are_not_written(kernel: str, variant: str, m: int) -> None:
    """Behind what a Bench stores lies room that it fills with NaN, for a product without its norm."""
    product = asked(kernel, HALF, 768, 64, True)
    bench = Bench(product, m)
    size, stored = -(-2 * m * 768 // 256) * 128, 1 + product.prenorm  # in elements
    assert bench.error(next(a for a in bench.own() if (a.kernel, a.variant) == (kernel, variant))) < 4e-3
    assert bench._c[stored * size :][: m * 768].isnan().all()


def test_a_norm_that_no_kernel_contains_is_refused() -> None:
    one = Operands(64, 768, 64, RMS[0], False, HALF)
    with pytest.raises(RuntimeError, match="cannot do .*: no kernel of ours does this norm"):
        one.run(WITH_LAYERNORM, "64x192")


@pytest.fixture
def force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Force]:
    """force(config, variant, of_down): the products before a norm run that variant, at every m, or the second one
    another; "": none does."""
    path, device = tmp_path / "table.json", torch.device("cuda")
    monkeypatch.setenv("FTBERT_GEMM_TABLE", str(path))
    monkeypatch.setenv("FTBERT_DEFERRED_NORM", "off")

    def put(config: Any, variant: str, of_down: str | None = None) -> None:
        document, rows = config.to_dict(), []
        for dtype in ("fp16", "bf16"):
            out, down = (p for p in products(find_family(document).config(document), dtype) if p.normed)
            for product, of in ((out, variant), (down, variant if of_down is None else of_down)):
                rows.append(Row(product, 1, 1 << 20, own(product, of) if of else None))
        path.unlink(missing_ok=True)
        add_rows(path, Machine.of("cuda"), rows)
        gemm_table.install(device, again=True)

    yield put
    monkeypatch.undo()
    gemm_table.install(device, again=True)


def own(product: Product, variant: str) -> Own:
    kernel = WITH_PRENORM if product.prenorm else WITH_LAYERNORM
    if not any((a.kernel, a.variant) == (kernel, variant) for a in Bench(product, 64).own()):
        pytest.skip(f"{product} has no variant {variant}")
    return Own(kernel, variant)


@DTYPES
@pytest.mark.parametrize("variant", VARIANTS.get(WITH_LAYERNORM, []))
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_transformers(force: Force, shape: str, variant: str, dtype: torch.dtype) -> None:
    reference = make_bert(**SHAPES[shape])
    force(reference.config, variant)
    model = ftbert.load(reference, device="cuda", dtype=dtype)
    for batch, seq in ((1, 1), (2, 17), (7, 64), (40, 128)):
        check_every_mask(reference, model, batch, seq, Place("cuda", dtype))


@pytest.mark.parametrize("own_graphs", [False, True])
def test_runs_where_the_table_says_so_and_gives_the_same_bits(force: Force, own_graphs: bool) -> None:
    reference = make_bert(**SHAPES["384"], num_hidden_layers=3)
    call = packed([17, 64, 3, 100])
    got = {}
    for variant in ("", "128x192 single", "64x192"):
        force(reference.config, variant)
        model = ftbert.load(reference, device="cuda", dtype=HALF)
        model.use_cuda_graphs(own_graphs)
        assert kernels("wgmma_norm", lambda model=model: model.forward_packed(*call)) == (6 if variant else 0)  # type: ignore[misc]
        got[variant] = model.forward_packed(*call).clone()
        for _ in range(5):
            assert torch.equal(model.forward_packed(*call), got[variant])
    for variant in ("128x192 single", "64x192"):
        assert_close(got[variant], got[""], atol=64 * torch.finfo(HALF).eps)


@pytest.mark.parametrize("variant", VARIANTS.get(WITH_PRENORM, []))
@pytest.mark.parametrize("family", PRE)
@DTYPES
def test_pre_norm_models(force: Force, family: str, variant: str, dtype: torch.dtype) -> None:
    """As far from float32 as with norms of their own, the same bits in each run. The last layer has none before a next."""
    reference = make_model(family, "encoder", 0, **PRE_SHAPE, num_hidden_layers=4, max_position_embeddings=256)
    call = packed([17, 64, 3, 100, 129])
    force(reference.config, "")
    want = ftbert.load(reference, device="cuda", dtype=torch.float32).forward_packed(*call)
    error = {}
    for of in ("", variant):
        force(reference.config, of)
        model = ftbert.load(reference, device="cuda", dtype=dtype)
        assert kernels("wgmma_norm", lambda model=model: model.forward_packed(*call)) == (7 if of else 0)  # type: ignore[misc]
        got = model.forward_packed(*call).clone()
        for _ in range(5):
            assert torch.equal(model.forward_packed(*call), got)
        error[of] = (got.float() - want).abs().mean().item()
    assert error[variant] <= 1.25 * error[""]


@pytest.mark.parametrize("family", ["bert", "eurobert"])
def test_more_turns_than_marks(force: Force, family: str) -> None:
    """A product is known by its turn, which begins anew after 255."""
    shape = SHAPES["384"] | {"intermediate_size": 64, "num_hidden_layers": 140, "vocab_size": 120}
    reference = make_bert(**shape) if family == "bert" else make_model(family, "encoder", 0, **shape, max_position_embeddings=128)
    call, got = packed([33, 100, 128]), {}
    for variant in ("", "128x192 together"):
        force(reference.config, variant)
        got[variant] = ftbert.load(reference, device="cuda", dtype=HALF).forward_packed(*call).float()
    cosine = torch.cosine_similarity(got["128x192 together"], got[""], dim=-1)
    assert cosine.min() > 0.999


@pytest.mark.parametrize(
    "variants",
    [("128x192 single", "128x128"), ("128x128", "128x192 single"), ("64x128", ""), ("", "128x192 together"),
     ("64x192", "128x128 single")],
)  # fmt: skip
def test_products_of_different_tiles_share_what_they_tell(force: Force, variants: tuple[str, str]) -> None:
    reference = make_bert(**SHAPES["384"], num_hidden_layers=5)
    force(reference.config, *variants)
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    for one in (inputs(3, 50)["right"], inputs(64, 100)["holes"]):
        check_against_transformers(reference, model, one, Place("cuda", HALF))


@pytest.mark.parametrize("variants", [("128x192 together", "128x128"), ("64x192", ""), ("", "128x256 together")])
def test_pre_norm_products_of_different_tiles_share_what_they_tell(force: Force, variants: tuple[str, str]) -> None:
    reference = make_model("modernbert", "encoder", 0, **PRE_SHAPE, num_hidden_layers=5, max_position_embeddings=128)
    call, got = packed([50, 100, 17]), {}
    for of in (("", ""), variants):
        force(reference.config, *of)
        got[of] = ftbert.load(reference, device="cuda", dtype=HALF).forward_packed(*call).float()
    assert torch.cosine_similarity(got[variants], got["", ""], dim=-1).min() > 0.9999


@pytest.mark.parametrize("mask", ["full", "right", "mostly empty"])
@pytest.mark.parametrize("family,variant", [("bert", "128x192 single"), ("bert", "64x128"), ("modernbert", "64x192")])
def test_the_last_layer_of_first_tokens_alone(force: Force, family: str, variant: str, mask: str) -> None:
    """It has as many rows as texts, empty ones too, which can be more than there are tokens."""
    reference = make_bert(**SHAPES["384"]) if family == "bert" else make_model(family, "encoder", 0, **PRE_SHAPE)
    force(reference.config, variant)
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    ids, kept = ragged(mask, Place("cuda", HALF), batch=200, seq=31)
    whole, first = model.module(ids, kept)[0], first_of(model.module, ids, kept)[0]
    assert_close(first, first_kept(whole, kept), atol=16 * torch.finfo(HALF).eps, rtol=16 * torch.finfo(HALF).eps)


def test_threads_and_streams(force: Force) -> None:
    reference = make_bert(**SHAPES["384"])
    force(reference.config, "128x192 single")
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    check_on_threads(model, [packed(lengths) for lengths in ([3], [64] * 40, [128] * 70, [100, 7])], threads=4, rounds=30)
