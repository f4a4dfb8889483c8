"""int8 on GPUs from 8.0 on: byte rows as kernels store them, products of these with exact sums, whole models. What a
GPU stores is compared with the CPU's rows, what it multiplies with the stored operands in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from byte_row_parts import byte_rows, parts
from conftest import Place
from own_kernels import WHOLE_TILES, WORDS, multiplies, supports
from torch import Tensor

import ftbert
from ftbert._library import build_info, load_library
from ftbert.quantization import quantize
from ftbert.tuning import Bench, Product

load_library()
ops = torch.ops.ftbert
COLS = [32, 40, 128, 384, 768, 1000, 1024, 2048, 3072, 8192, 9000]  # a shape of threads each, the last of long rows


@pytest.fixture
def gpu(place: Place) -> Place:
    if place.device == "cpu" or place.dtype == torch.float32 or not multiplies("int8"):
        pytest.skip("for 16-bit streams on GPUs from 8.0 on")
    return place


def random(place: Place, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(place.dtype)


def like_the_cpus(made: Tensor, x: Tensor, smooth: Tensor | None) -> None:
    """The rows of x, float32: a number between two bytes may fall to either, of few it does."""
    cols, made = x.shape[1], made.cpu()
    wanted = ops.byte_rows(x, smooth)
    (got, scale, zero), (want, of_cpu, zero_of_cpu) = parts(made, cols), parts(wanted, cols)
    torch.testing.assert_close(scale, of_cpu, rtol=1e-6, atol=0, equal_nan=True)
    assert (zero - zero_of_cpu).abs().max() <= 1
    apart = ((got.int() - zero[:, None]) - (want.int() - zero_of_cpu[:, None])).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("smoothed", [False, True])
def test_rows_are_those_of_the_cpu(gpu: Place, cols: int, smoothed: bool) -> None:
    for rows in (1, 7, 700):
        x = random(gpu, rows, cols) + 0.5
        x[0] = 0
        smooth = torch.rand(cols) + 0.5 if smoothed else None
        made = ops.byte_rows(x.cuda(), None if smooth is None else smooth.cuda())
        like_the_cpus(made, x.float(), smooth)
        assert torch.equal(made[-1:], ops.byte_rows(x[-1:].cuda(), None if smooth is None else smooth.cuda()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cols", [64, 768, 9000])
def test_what_is_not_finite_stays_in_its_row(gpu: Place, cols: int, bad: float) -> None:
    x = random(gpu, 5, cols)
    clean = ops.byte_rows(x.cuda())
    x[2, 33 % cols] = bad
    made = ops.byte_rows(x.cuda())
    assert parts(made.cpu(), cols)[1].isnan().tolist() == [False, False, True, False, False]
    others = [0, 1, 3, 4]
    assert torch.equal(made[others], clean[others])


@pytest.mark.parametrize("kind", ["layer", "rms", "none"])
@pytest.mark.parametrize("keep_sum", [False, True])
@pytest.mark.parametrize("cols", COLS)
def test_norms_store_them_beside_the_stream(gpu: Place, kind: str, keep_sum: bool, cols: int) -> None:
    x, input = (random(gpu, 9, cols, seed=seed).cuda() for seed in (0, 1))
    gamma = None if kind == "none" else random(gpu, cols).cuda()
    smooth = torch.rand(cols) + 0.5
    copy = torch.full((9, (cols + 8 + 63) // 64 * 64), 7, dtype=torch.uint8, device="cuda")
    word = "layer" if kind == "none" else kind  # without gamma there is no norm
    plain = ops.add_bias_input_layernorm(x, None, input, gamma, None, 1e-5, word, sum=keep_sum)
    made = ops.add_bias_input_layernorm(
        x, None, input, gamma, None, 1e-5, word, sum=keep_sum, copy=copy, copy_scale=smooth.cuda()
    )
    assert torch.equal(made[1 if keep_sum else 0], plain[1 if keep_sum else 0])
    total = x.double().cpu() + input.double().cpu()
    wanted = total
    if kind != "none" and gamma is not None:
        centred = total - total.mean(1, keepdim=True) if kind == "layer" else total
        wanted = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * gamma.double().cpu()
    like_the_cpus(copy, wanted.float(), smooth)


def test_embeddings_of_a_table_in_int8(gpu: Place) -> None:
    """Behind a norm too, with byte rows beside the result; an id outside the table gives a row that is none."""
    for cols in (40, 100, 768):
        generator = torch.Generator().manual_seed(cols)
        word = torch.randint(-127, 128, (50, cols), generator=generator, dtype=torch.int8)
        scales, ids = torch.rand(50, generator=generator) + 0.1, torch.randint(0, 50, (9,), generator=generator)
        other, gamma = random(gpu, 3, cols), random(gpu, cols)
        exact = word.double()[ids] * scales.double()[ids, None] + other[0].double()
        spread = exact - exact.mean(1, keepdim=True)
        normed = spread / (spread.square().mean(1, keepdim=True) + 1e-5).sqrt() * gamma.double()
        for of_norm, want in ((None, exact), (gamma.cuda(), normed)):
            got = ops.embeddings_layernorm(
                ids.cuda(), None, None, torch.zeros(9, dtype=torch.int32).cuda(), word.cuda(), None, other.cuda(), of_norm,
                None, 1e-5, word_scale=scales.cuda(),
            )  # fmt: skip
            largest = want.abs().amax(1, keepdim=True)
            assert ((got.double().cpu() - want).abs() <= 3 * gpu.eps * (want.abs() + largest)).all()
    copy = torch.empty(9, 832, dtype=torch.uint8, device="cuda")
    table = random(gpu, 50, 768).cuda()
    ids[3] = 50
    ops.embeddings_layernorm(ids.cuda(), None, None, torch.zeros(9, dtype=torch.int32).cuda(), table, None, None,
                             gamma.cuda(), None, 1e-5, copy=copy)  # fmt: skip
    assert parts(copy.cpu(), 768)[1].isnan().nonzero().flatten().tolist() == [3]


class Case:
    """Byte rows [m], a weight int8 [n, k] with scales, results of order 1."""

    def __init__(self, place: Place, m: int, n: int, k: int, most: int = 127) -> None:
        generator = torch.Generator().manual_seed(m + n + k)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, shape, generator=generator)

        self.place, self.m, self.n, self.k = place, m, n, k
        self.q, self.zero, self.weight = whole(0, 255, m, k), whole(0, 255, m), whole(-most, most, n, k).to(torch.int8)
        self.scale = torch.rand(m, generator=generator) / 100
        self.scales = torch.rand(n, generator=generator) / math.sqrt(k) / 50
        self.bias = torch.randn(n, generator=generator).to(place.dtype)

    def call(self, activation: str = "none", gated: bool = False, bias: bool = True, variant: str = "") -> Tensor:
        rows = byte_rows(self.q, self.scale, self.zero).cuda()
        vector = self.bias.cuda() if bias else None
        made = ops.int8_product(
            rows, self.weight.cuda(), self.scales.cuda(), vector, activation, gated, self.place.dtype, variant
        )
        return made.cpu()  # type: ignore[no-any-return]

    def sums(self, bias: bool = True) -> Tensor:
        total = (self.q - self.zero[:, None]).double() @ self.weight.double().T
        total = total * self.scale.double()[:, None] * self.scales.double()
        return total + self.bias.double() if bias else total

    def variants(self, gated: bool = False) -> Iterator[str]:
        asked = Product(f"byte_rows int8 {WORDS[self.place.dtype]}", self.n, self.k, True, gated=gated)
        for variant in WHOLE_TILES:
            if supports("mma_tile", variant, asked, self.m):
                yield variant


SHAPES = [
    (1, 384, 32), (8, 768, 64), (17, 1152, 40), (63, 400, 104), (65, 768, 768), (129, 264, 1000), (300, 1040, 1032),
    (1000, 8, 128), (1027, 2304, 768), (2300, 1040, 3072), (4100, 3072, 768),
]  # fmt: skip


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_sums_are_exact_and_rounded_once(gpu: Place, m: int, n: int, k: int) -> None:
    """With scales of 1 and weights so small that no sum is past 16 bits' whole numbers, whatever the tile."""
    case = Case(gpu, m, n, k, most=1)
    case.zero, case.scale, case.scales = torch.full((m,), 128), torch.full((m,), 2.0**-6), torch.ones(n)
    case.bias = torch.zeros(n, dtype=gpu.dtype)
    want = case.sums().to(gpu.dtype)
    found = list(case.variants())
    assert found == WHOLE_TILES
    for variant in found:
        assert torch.equal(case.call(variant=variant), want), variant


@pytest.mark.parametrize("m,n,k", SHAPES)
@pytest.mark.parametrize("activation,gated", [("none", False), ("gelu", False), ("silu", True), ("gelu_tanh", True)])
def test_every_variant_and_ending(gpu: Place, m: int, n: int, k: int, activation: str, gated: bool) -> None:
    """Sums in int32 have no order: all variants give the same bits, and so does each call."""
    case = Case(gpu, m, n + n % 16 * gated, k)
    for bias in (True, False):
        sums = case.sums(bias)
        want = reference.gate(sums, activation) if gated else reference.activation(sums, activation)
        made = [case.call(activation, gated, bias, variant) for variant in case.variants(gated)]
        assert made and all(torch.equal(made[0], other) for other in made)
        assert torch.equal(made[0], case.call(activation, gated, bias))
        pair = sums[:, ::2].abs() * sums[:, 1::2].abs() if gated else 0
        off = gpu.eps * (3 + 3 * want.abs() + (3 * pair if gated else 2 * sums.abs()))
        assert ((made[0].double() - want).abs() <= off).all()


@pytest.mark.parametrize("q,zero,weight", [(255, 0, 127), (255, 255, -128), (0, 255, -128), (0, 255, 127)])
def test_the_largest_sums_do_not_overflow(gpu: Place, q: int, zero: int, weight: int) -> None:
    case = Case(gpu, 17, 32, 65792)
    case.q, case.zero = torch.full_like(case.q, q), torch.full_like(case.zero, zero)
    case.weight = torch.full_like(case.weight, weight)
    case.scale, case.scales = torch.full((17,), 2.0**-16), torch.full((32,), 2.0**-10)
    assert torch.equal(case.call(bias=False), case.sums(bias=False).to(gpu.dtype))


def test_rows_stand_alone(gpu: Place) -> None:
    """A row that is no number stays one, one of zeros gives the bias, and neither changes its neighbours."""
    case = Case(gpu, 40, 72, 136)
    before = {variant: case.call(variant=variant) for variant in case.variants()}
    case.scale[3], case.scale[20] = math.nan, 0.0
    case.q[20] = case.zero[20] = 0
    others = [i for i in range(40) if i not in (3, 20)]
    for variant, was in before.items():
        after = case.call(variant=variant)
        assert after[3].isnan().all() and torch.equal(after[20], case.bias), variant
        assert torch.equal(after[others], was[others]), variant
    case.q, case.zero, case.scale, case.m = case.q[7:8], case.zero[7:8], case.scale[7:8], 1
    assert torch.equal(case.call(), before[next(iter(before))][7:8])
    case.q, case.zero, case.scale, case.m = case.q[:0], case.zero[:0], case.scale[:0], 0
    assert case.call().shape == (0, 72)


@pytest.mark.parametrize("n,k,words", [(12, 64, "multiples of 8"), (64, 60, "multiples of 8"), (64, 24, "32 to 65793")])
def test_other_sizes_are_refused(gpu: Place, n: int, k: int, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"{words}"):
        Case(gpu, 3, n, k).call()


@pytest.mark.parametrize("m", [64, 4096])
def test_the_tuner_times_it(gpu: Place, m: int) -> None:
    bench = Bench(Product(f"byte_rows int8 {WORDS[gpu.dtype]}", 768, 520, True, "gelu"), m)
    assert [one.variant for one in bench.own()] == WHOLE_TILES and bench.chosen().kernel == "mma_tile"
    for one in bench.own():
        assert bench.error(one) < 4 * gpu.eps and 0 < bench.microseconds(one) < 2000


@pytest.fixture(scope="module")
def folder(tiny_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("int8")
    plain = tiny_bert(home)
    quantize(plain, home / "int8", dtype="int8", any_loss=True)
    return plain, home / "int8"


def test_a_model_from_the_checkpoint_of_cpus(gpu: Place, folder: tuple[Path, Path]) -> None:
    """Near float32 and nearer the CPU's int8; batch = single; what stands in padding is nothing; saved as it came."""
    plain, stored = folder
    model = ftbert.load(stored, "cuda", gpu.dtype)
    ids = torch.randint(5, 70, (6, 19), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(19)[None] < torch.tensor([19, 3, 1, 17, 8, 0])[:, None]

    def states(one: Any, ids: Tensor, device: str = "cuda") -> Tensor:
        return one(ids.to(device), mask.long().to(device)).last_hidden_state.cpu()  # type: ignore[no-any-return]

    got, exact = states(model, ids), states(ftbert.load(plain), ids, "cpu")
    off = float((got.float() - exact).norm() / exact.norm())
    assert 1e-4 < off < 0.1 and "int8" in model.info()["products"] and got.dtype == gpu.dtype
    assert torch.equal(states(model, torch.where(mask, ids, 9)), got) and torch.equal(states(model, ids), got)
    for row, length in ((1, 3), (3, 17)):
        alone = model(ids[row : row + 1, :length].cuda()).last_hidden_state.cpu()
        torch.testing.assert_close(alone[0].float(), got[row, :length].float(), rtol=0, atol=0.05 * exact.abs().max().item())
    if build_info()["cpu_int8"] != "none":
        of_cpu = states(ftbert.load(stored), ids, "cpu")
        assert float((got.float() - of_cpu).norm() / exact.norm()) < max(off, 4 * gpu.eps)
