"""Products of up to eight rows with the norm before and the sum behind them, and products by weights in Q8_0 of any
number of rows, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import have_gpu
from own_kernels import VARIANTS, WORDS, supports, tile_kernel
from torch import Tensor
from torch.nn.functional import gelu, silu

import ftbert
from ftbert._library import load_library
from ftbert.decoding.decoder import decoder_of
from ftbert.tuning import Product

load_library()
# Of this GPU: which brings the weight by Hopper's accelerator, or each lane what it multiplies.
KERNELS = [
    kernel
    for kernel in ("few_rows", "few_rows_lanes")
    if have_gpu() and supports(kernel, "8x8", Product("fp16", 64, 64), 1)
]
pytestmark = pytest.mark.skipif(not KERNELS, reason="no GPU with a kernel for few rows")

ops = torch.ops.ftbert
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
STORED = pytest.mark.parametrize("q8", [False, True], ids=["16", "q8_0"])
EPS = 1e-5


@dataclass(frozen=True)
class Rule:
    kind: str
    offset: float = 0
    rounding: str = "once"
    beta: bool = False


RULES = {
    "none": None,
    "layer": Rule("layer"),
    "layer with beta": Rule("layer", beta=True),
    "llama": Rule("rms", rounding="before_gamma"),
    "gemma": Rule("rms", offset=1.0),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Weight:
    """values and scales, or one tensor of dtype; what they stand for in float64"""

    def __init__(self, n: int, k: int, q8: bool, dtype: torch.dtype) -> None:
        self.scales: Tensor | None = None
        if q8:
            generator = torch.Generator().manual_seed(n + k)
            self.stored = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8).cuda()
            self.scales = ((1 + torch.rand(n, k // 32, generator=generator)) / (127 * math.sqrt(k))).half().cuda()
            self.exact = self.stored.cpu().double() * self.scales.cpu().double().repeat_interleave(32, 1)
        else:
            self.stored = (random(n, k, seed=1) / math.sqrt(k)).to(dtype).cuda()
            self.exact = self.stored.cpu().double()


def few_rows(
    a: Tensor, weight: Weight, bias: Tensor | None = None, activation: str = "none", gated: bool = False, residual: Tensor | None = None,
    about: Sequence[Any] = (), counter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """about: gamma, beta, eps, kind, offset and rounding of the norm before the product"""
    out: Tensor = ops.linear_own(
        a, weight.stored, bias, activation, KERNELS[0], "8x8", gated, weight.scales, residual, *about, counter=counter
    )
    return out


def normed(x: Tensor, rule: Rule | None, gamma: Tensor | None, beta: Tensor | None, dtype: torch.dtype) -> Tensor:
    if rule is None or gamma is None:
        return x
    centred = x - x.mean(1, keepdim=True) if rule.kind == "layer" else x
    y = centred / (centred.square().mean(1, keepdim=True) + EPS).sqrt()
    if rule.rounding == "before_gamma":
        y = y.to(dtype).double()
    y = y * (gamma.cpu().double() + rule.offset)
    return y if beta is None else y + beta.cpu().double()


def as_q8_1(x: Tensor) -> Tensor:
    blocks = x.view(x.shape[0], -1, 32)
    scale = blocks.abs().amax(2, keepdim=True) / 127
    return (torch.where(scale > 0, blocks / scale, 0).round() * scale).view(x.shape)


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """By the result's rounding, and by a few numbers of Q8_1 that a different rounding of the norm puts elsewhere."""
    error = (got.cpu().double() - expected).square().mean() / expected.square().mean()
    assert error < (2e-5 if dtype == torch.bfloat16 else 1e-6), f"normalised mean square error {error:.2e}"


@DTYPES
@STORED
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("m,n,k", [(1, 8, 64), (1, 2048, 4096), (1, 72, 12288), (2, 40, 6144), (2, 320, 576), (3, 1056, 1088), (5, 24, 12288), (8, 1536, 704), (2, 16384, 640), (3, 16384, 1408), (4, 12288, 1408), (5, 12288, 1408)])
def test_norm_product_and_sum(m: int, n: int, k: int, rule: str, q8: bool, dtype: torch.dtype) -> None:
    found, weight = RULES[rule], Weight(n, k, q8, dtype)
    a = (random(m, k, seed=2) * 2 + 0.3).to(dtype).cuda()
    gamma = (1 + 0.2 * random(k, seed=3)).to(dtype).cuda() if found else None
    beta = random(k, seed=4).to(dtype).cuda() if found and found.beta else None
    bias, residual = random(n, seed=5).to(dtype).cuda(), random(m, n, seed=6).to(dtype).cuda()
    about: list[Any] = [gamma, beta, EPS]
    if found:
        about += [found.kind, found.offset, found.rounding]
    x = normed(a.cpu().double(), found, gamma, beta, dtype)
    x = as_q8_1(x) if q8 else x.to(dtype).double()
    sums = x @ weight.exact.T

    counter = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(*args: Any) -> Tensor:
        """Tiles are dealt evenly, or blocks take them as they get to them, twice with one counter."""
        out = few_rows(a, weight, *args, about=about)
        for _ in range(2):
            assert torch.equal(out, few_rows(a, weight, *args, about=about, counter=counter))
            assert counter.item() == 0
        return out

    assert_near(run(None), sums, dtype)
    biased = sums + bias.cpu().double()
    assert_near(run(bias, "none", False, residual), biased + residual.cpu().double(), dtype)
    assert_near(run(bias, "silu", True), silu(biased[:, ::2]) * biased[:, 1::2], dtype)
    assert_near(run(bias, "silu"), silu(biased), dtype)


@DTYPES
@STORED
def test_a_row_alone_is_the_row_among_others(q8: bool, dtype: torch.dtype) -> None:
    weight, gamma = Weight(512, 1024, q8, dtype), torch.ones(1024, dtype=dtype, device="cuda")
    a = random(8, 1024, seed=7).to(dtype).cuda()

    def run(rows: Tensor) -> Tensor:
        return few_rows(rows, weight, about=[gamma])

    together = run(a)
    for i in range(8):
        assert_near(run(a[i : i + 1].clone())[0], together[i].cpu().double(), dtype)


@DTYPES
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m,n,k", [(1, 64, 64), (8, 512, 576), (9, 512, 576), (200, 1536, 1024)])
def test_any_number_of_rows_by_a_weight_in_q8_0(m: int, n: int, k: int, gated: bool, dtype: torch.dtype) -> None:
    weight, bias = Weight(n, k, True, dtype), random(n, seed=5).to(dtype).cuda()
    a = random(m, k, seed=2).to(dtype).cuda()
    few = m <= 8
    exact = weight.exact if few else weight.exact.to(dtype).double()
    sums = (as_q8_1(a.cpu().double()) if few else a.cpu().double()) @ exact.T + bias.cpu().double()
    expected = silu(sums[:, ::2]) * sums[:, 1::2] if gated else sums
    got = ops.product(a, weight.stored, bias, "silu" if gated else "none", gated, weight.scales)
    assert_near(got, expected, dtype)


@DTYPES
@pytest.mark.parametrize("variant", VARIANTS.get("wgmma_q8_0", []))
@pytest.mark.parametrize("m,n,k", [(1, 16, 64), (37, 272, 704), (300, 1040, 1088), (513, 2048, 4096)])
def test_each_tile_of_a_product_by_q8_0(m: int, n: int, k: int, variant: str, dtype: torch.dtype) -> None:
    """Weights rounded to the stream's type, as without q8_0. A row is the same to the bit whichever rows are beside it,
    and NaN and infinity stay in their row."""
    word = WORDS[dtype]
    if not supports("wgmma_q8_0", variant, Product(f"{word} q8_0 {word}", n, k), m):
        pytest.skip("no GPU with warpgroup instructions")
    weight, bias = Weight(n, k, True, dtype), random(n, seed=5).to(dtype).cuda()
    a = random(m, k, seed=2).to(dtype).cuda()
    sums = a.cpu().double() @ weight.exact.to(dtype).double().T

    def run(a: Tensor, *args: Any) -> Tensor:
        out: Tensor = ops.linear_own(a, weight.stored, *args, scales=weight.scales)
        return out

    of_bias, tile = sums + bias.cpu().double(), ("wgmma_q8_0", variant)
    assert_near(run(a, bias, "silu", *tile, True), silu(of_bias[:, ::2]) * of_bias[:, 1::2], dtype)
    assert_near(run(a, bias, "gelu", *tile), gelu(of_bias), dtype)
    whole = run(a, None, "none", *tile)
    assert_near(whole, sums, dtype)
    assert torch.equal(run(a[m // 3 :].clone(), None, "none", *tile), whole[m // 3 :])
    a[0, 0], a[0, 1] = math.nan, math.inf
    broken = run(a, None, "none", *tile)
    assert broken[0].isnan().all() and torch.equal(broken[1:], whole[1:])


@pytest.fixture(scope="module")
def large() -> Any:
    """A decoder whose products have more tiles than the GPU multiprocessors, and rings that are filled several times."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=3, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=2048, max_position_embeddings=512)  # fmt: skip
    with torch.device("cuda"):
        return LlamaForCausalLM(config).half().eval()


@pytest.mark.parametrize("dtype,most", [("fp16", 1e-4), ("q8_0", 2e-3)])
@pytest.mark.parametrize("texts", [1, 2, 8, 24])
def test_steps_of_a_large_decoder(large: Any, texts: int, dtype: str, most: float) -> None:
    """Kernels that start while the kernel ahead still runs, also from graphs: steps give the result of a single call,
    and the same bits again."""
    steps, model = 40, ftbert.load(large, device="cuda", dtype=dtype)
    recorded = dtype != "q8_0" or texts <= 8 or tile_kernel() == "wgmma_tile"  # else the weights need memory of the call
    ids = torch.randint(2048, (texts, 12 + steps), generator=torch.Generator().manual_seed(texts)).cuda()
    slots, rows = torch.arange(texts, dtype=torch.int32), torch.arange(texts + 1, dtype=torch.int32)

    def stepped() -> Tensor:
        decoder = decoder_of(model, texts, 64)
        decoder.forward(ids[:, :12].flatten(), rows * 12, slots, False)
        found = [decoder.forward(ids[:, 12 + i].contiguous(), rows, slots, False).clone() for i in range(steps)]
        assert (decoder.recorded() > 0) == recorded
        return torch.stack(found, 1)

    whole = decoder_of(model, texts, 64).forward(ids.flatten(), rows * (12 + steps), slots, True)
    want = whole.view(texts, 12 + steps, -1)[:, 12:].double()
    got = stepped()
    assert (got.double() - want).square().mean() / want.square().mean() < most
    assert torch.equal(got, stepped())


def test_more_chosen_rows_than_tokens() -> None:
    """Of a model in q8_0, whose last layer then multiplies more rows than the others."""
    from conftest import make_bert

    model = ftbert.load(make_bert(hidden_size=128, intermediate_size=256), device="cuda", dtype="q8_0")
    ids, cu = torch.tensor([5, 6, 7]).cuda(), torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3]).int().cuda()
    want = model.forward_packed(ids, cu, 2)[[0, 1]]
    got = model.module.forward_batch(ids, None, None, cu, 2, ["first"])[0]
    assert (got[[0, 9]].double() - want.double()).square().mean() / want.double().square().mean() < 1e-3


def test_a_gpu_has_one_kernel_for_few_rows() -> None:
    assert len(KERNELS) == 1


def test_what_it_cannot_do_is_refused() -> None:
    weight = Weight(64, 64, False, torch.float16)
    rows = torch.ones(9, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError, match=f"{KERNELS[0]} 8x8 cannot do m=9"):
        few_rows(rows, weight)
    with pytest.raises(RuntimeError, match=f"{KERNELS[0]} 8x8 cannot do m=1"):
        ops.linear_own(rows[:1, :40].clone(), weight.stored[:, :40].clone(), None, "none", KERNELS[0], "8x8")
    q8 = Weight(40, 64, True, torch.float16)
    with pytest.raises(RuntimeError, match="wgmma_q8_0 16x64 cannot do m=9 n=40 k=64"):
        ops.linear_own(rows, q8.stored, None, "none", "wgmma_q8_0", "16x64", scales=q8.scales)
    with pytest.raises(RuntimeError, match=f"{KERNELS[0]} 8x8 cannot do m=1"):  # a sum and an activation
        few_rows(rows[:1], weight, None, "silu", False, rows[:1])


def test_a_row_that_is_not_finite_stays_so_and_alone() -> None:
    weight = Weight(64, 64, True, torch.float16)
    rows = torch.ones(3, 64, dtype=torch.float16, device="cuda")
    rows[1, 5] = float("nan")
    got = ops.product(rows, weight.stored, scales=weight.scales)
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()
