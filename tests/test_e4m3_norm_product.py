"""Products of E4M3 matrices that contain the norm behind them, against a product and a norm of its own."""

from __future__ import annotations

import math

import pytest
import reference as exact
import torch
from norm_rules import LAYER, RULES, Rule
from own_kernels import VARIANTS, WORDS, have_warpgroups, supports
from torch import Tensor

from ftbert._library import load_library
from ftbert.tuning import WITH_LAYERNORM, WITH_NORM, WITH_PRENORM, Bench, Product

pytestmark = pytest.mark.skipif(
    not have_warpgroups(), reason="no GPU with warpgroup instructions"
)

load_library()
ops = torch.ops.ftbert
E4M3 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
CASES = pytest.mark.parametrize("kernel,rule", [(kernel, rule) for kernel in WITH_NORM for rule in RULES[kernel]])
ABLE = ["128x192 together", "64x192", "128x128", "128x256 together"]
Results = tuple[Tensor, Tensor, Tensor]  # norm, sum, E4M3 copy; of no rows where the kernel makes none


class Operands:
    """whole: small whole numbers and scales that are powers of two, so that a product in 16 bits is exact."""

    def __init__(
        self, m: int, n: int, k: int, rule: Rule, dtype: torch.dtype, bias: bool = True, whole: bool = False, by_rows: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(m + n + k)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        def numbers(rows: int) -> Tensor:
            given = random(rows, k)
            return (given.round().clamp(-1, 1) if whole else given).to(E4M3).cuda()

        self.rule, self.dtype = rule, dtype
        self.a, self.weight = numbers(m), numbers(n)
        scales = torch.exp2(-torch.randint(2, 5, (n,), generator=generator)) if whole else random(n).exp() / math.sqrt(k)
        self.weight_scale = (scales if by_rows else scales[:1]).float().contiguous().cuda()
        self.a_scale = torch.tensor([0.5 if whole else 0.37], device="cuda")
        self.copy_scale = torch.tensor([0.0123], device="cuda")
        self.residual, self.bias = random(m, n).to(dtype).cuda(), random(n).to(dtype).cuda() if bias else None
        self.gamma = (1 + 0.2 * random(n)).to(dtype).cuda()
        self.beta = random(n).to(dtype).cuda() if rule.beta else None

    def run(
        self, kernel: str, variant: str, copied: bool = True, said: Tensor | None = None, turn: int = 0, eps: float = 1e-5
    ) -> Results:
        kind, offset, rounding, _ = self.rule
        out: Results = ops.linear_norm(
            self.a, self.weight, self.bias, self.residual, self.gamma, self.beta, eps, variant, kind, offset, rounding,
            kernel == WITH_PRENORM, self.a_scale, self.weight_scale, self.copy_scale if copied else None, said, turn,
        )  # fmt: skip
        return out

    def apart(self, kernel: str, copied: bool = True, eps: float = 1e-5) -> Results:
        """The same by two kernels."""
        kind, offset, rounding, _ = self.rule
        made = ops.linear_e4m3(self.a, self.a_scale, self.weight, self.weight_scale, None, self.dtype, "none")
        copy = torch.zeros(made.shape if copied else (0, made.shape[1]), device="cuda").to(E4M3)
        out, total = ops.add_bias_input_layernorm(
            made, self.bias, self.residual, self.gamma, self.beta, eps, kind, offset, rounding, kernel == WITH_PRENORM,
            copy if copied else None, self.copy_scale if copied else None,
        )  # fmt: skip
        return out, total, copy

    def check_float64(self, kernel: str, got: Results, eps: float = 1e-5) -> None:
        step = torch.finfo(self.dtype).eps
        scales = self.a_scale.double() * self.weight_scale.double()
        total = self.a.double() @ self.weight.double().T * scales + self.residual.double()
        total = total if self.bias is None else total + self.bias.double()
        gamma, beta = self.gamma.double(), 0.0 if self.beta is None else self.beta.double()
        if self.rule.kind == "rms":
            norm, size = exact.rmsnorm(total, gamma, beta, eps, self.rule.offset), total.square().mean(-1, True).sqrt()
        else:
            norm, size = exact.layernorm(total, gamma, beta, eps), total.std(-1, unbiased=False, keepdim=True)
        # What the instruction's sums, which keep 14 bits, are off: as in test_e4m3_product.py.
        noise = (0.02 * math.sqrt(self.a.shape[1]) * scales).expand(total.shape[1])
        sizes = (gamma + self.rule.offset).abs()
        off = sizes * (noise + noise.mean()) / size + 0.01 * (norm - beta).abs() + 3 * step * (1 + norm.abs())
        made, kept, copy = got
        if made.numel():
            assert ((made.double() - norm).abs() <= off).all()
        if kernel == WITH_PRENORM:
            assert ((kept.double() - total).abs() <= noise + step * (1 + total.abs())).all()
        if copy.numel():
            scale = self.copy_scale.double()
            largest = 448 * scale
            wrong = (copy.double() * scale - norm.clamp(-largest, largest)).abs()
            assert (wrong <= off + 2**-4 * (norm.abs() + off) + 2**-10 * scale).all()


def able(kernel: str, one: Operands, m: int) -> list[str]:
    n, k = one.weight.shape
    asked = Product(
        f"e4m3 e4m3 {WORDS[one.dtype]}", n, k, one.bias is not None, layernorm=kernel == WITH_LAYERNORM, prenorm=kernel == WITH_PRENORM
    )
    return [variant for variant in VARIANTS[kernel] if supports(kernel, variant, asked, m)]


def same_bits(one: Results, other: Results) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def assert_near(got: Tensor, want: Tensor, apart: Tensor, seldom: float) -> None:
    """E4M3 of numbers that are `apart`: at most one step more, and seldom at all."""
    size = torch.maximum(got.float().abs(), want.float().abs())
    off = (got.float() - want.float()).abs()
    assert (off <= (size / 8).clamp(2.0**-9) + apart).all() and (off > 0).float().mean() <= seldom


@pytest.mark.parametrize("m", [1, 63, 130, 4500])
@pytest.mark.parametrize(
    "n,k", [(384, 384), (512, 48), (768, 768), (768, 3072), (1024, 144), (1152, 64), (192, 16), (1536, 256), (2048, 64)]
)
@CASES
@DTYPES
def test_equals_float64(kernel: str, rule: Rule, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    for bias, by_rows in ((True, True), (False, False)):
        one = Operands(m, n, k, rule, dtype, bias, by_rows=by_rows)
        variants = able(kernel, one, m)
        fitting = [v for v in ABLE if n % int(v.split()[0].split("x")[1]) == 0 and n // int(v.split()[0].split("x")[1]) <= 8]
        assert sorted(variants) == sorted(fitting) and variants
        for variant in VARIANTS[kernel]:
            if variant not in variants:
                with pytest.raises(RuntimeError, match="cannot do"):
                    one.run(kernel, variant)
                continue
            got = one.run(kernel, variant)
            one.check_float64(kernel, got)
            plain = one.run(kernel, variant, copied=False)
            one.check_float64(kernel, plain)
            assert plain[2].numel() == 0 and plain[0].shape == (m, n)
            if kernel == WITH_LAYERNORM:
                assert torch.equal(got[0], plain[0])
            else:
                assert got[0].numel() == 0 and torch.equal(got[1], plain[1])
            assert same_bits(got, one.run(kernel, variant)) and same_bits(plain, one.run(kernel, variant, copied=False))


@pytest.mark.parametrize("m", [1, 77, 500, 3000])
@pytest.mark.parametrize("n,k", [(384, 512), (768, 768), (1024, 1024), (1536, 128)])
@CASES
@DTYPES
def test_equals_a_product_and_a_norm(kernel: str, rule: Rule, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Where the product is exact in 16 bits: the same sum, and a norm whose blocks told each other squares of 16 bits, so
    that its scale is off by up to 2^-17. What is rounded before gamma may then be the next number. Where beta makes a
    small number of it, that shows."""
    one = Operands(m, n, k, rule, dtype, whole=True)
    want, plain = one.apart(kernel), one.apart(kernel, copied=False)
    step = torch.finfo(dtype).eps
    apart = (2**-17 if rule.rounding == "once" else step) * (
        (plain[0].float() - (0 if one.beta is None else one.beta.float())).abs() + step
    )
    for variant in able(kernel, one, m):
        got, other = one.run(kernel, variant), one.run(kernel, variant, copied=False)
        assert torch.equal(got[1], want[1]) and torch.equal(other[1], plain[1])
        assert_near(got[2], want[2], apart / one.copy_scale, seldom=0.002)
        for a, b in ((got[0], want[0]), (other[0], plain[0])):
            assert a.shape == b.shape
            if a.numel():
                assert ((a.float() - b.float()).abs() <= step * (b.float().abs() + 2**-6) + apart).all()
                assert (a != b).float().mean() < 0.03


@pytest.mark.parametrize("variant", ABLE)
@pytest.mark.parametrize("kernel", WITH_NORM)
@DTYPES
def test_what_is_no_number_stays_in_its_row(kernel: str, variant: str, dtype: torch.dtype) -> None:
    for rule in RULES[kernel]:
        one = Operands(300, 768, 96, rule, dtype)
        clean = one.run(kernel, variant)
        others = [i for i in range(300) if i != 77]
        for where in ("a", "residual"):
            a, residual = one.a, one.residual
            if where == "a":
                one.a = a.clone()
                one.a.view(torch.uint8)[77, 5] = 0x7F
            else:
                one.residual = residual.clone()
                one.residual[77, 5] = math.nan
            got = one.run(kernel, variant)
            one.a, one.residual = a, residual
            made = [t.float() for t in (got[0], got[2]) if t.numel()]
            assert all(t[77].isnan().all() for t in made)
            for t, before in zip(got, clean, strict=True):
                if t.numel():
                    assert torch.equal(t.view(torch.uint8)[others], before.view(torch.uint8)[others])


@pytest.mark.parametrize("copied", [True, False])
def test_products_of_one_stream_share_what_they_tell(copied: bool) -> None:
    """Of other tiles, kernels and rows, and more of them than there are marks."""
    said = torch.empty(8 * 5120, dtype=torch.long, device="cuda")
    each = [
        (one, kernel, variant, one.run(kernel, variant, copied))
        for one in (Operands(m, 768, 256, Rule(), torch.float16) for m in (5000, 64, 900))
        for kernel in WITH_NORM
        for variant in able(kernel, one, len(one.a))
    ]
    for turn in range(600):
        one, kernel, variant, want = each[turn % len(each)]
        assert same_bits(one.run(kernel, variant, copied, said, turn), want), turn


def test_on_several_streams_at_once() -> None:
    """Blocks wait for each other: with two such kernels on a GPU all of one must come before the other's."""
    ran = [(kernel, variant) for kernel in WITH_NORM for variant in ABLE if variant in VARIANTS[kernel]]
    all_of_them = [Operands(m, 768, 768, Rule(), torch.float16) for m in (300, 5000, 9000, 64)]
    alone = [{each: one.run(*each) for each in ran if each[1] in able(each[0], one, len(one.a))} for one in all_of_them]
    streams = [torch.cuda.Stream() for _ in all_of_them]
    torch.cuda.synchronize()
    together = []
    for _ in range(10):
        for each in ran:
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    together.append((i, each, all_of_them[i].run(*each)))
    torch.cuda.synchronize()
    assert all(same_bits(got, alone[i][each]) for i, each, got in together)


@pytest.mark.parametrize("kernel", WITH_NORM)
def test_the_tuner_times_it(kernel: str) -> None:
    bench = Bench(Product("e4m3 e4m3 fp16", 768, 512, True, layernorm=kernel == WITH_LAYERNORM, prenorm=kernel == WITH_PRENORM), 2048)
    containing = [one for one in bench.own() if one.kernel == kernel]
    assert sorted(one.variant for one in containing) == sorted(v for v in VARIANTS[kernel] if v in ABLE)
    for one in containing:
        assert bench.error(one) < 0.02 and 0 < bench.microseconds(one) < 1000


def test_what_is_not_aligned_or_fits_no_kernel_is_refused() -> None:
    one = Operands(64, 768, 64, LAYER[0], torch.float16)
    said = torch.empty(64, dtype=torch.long, device="cuda")
    with pytest.raises(RuntimeError, match="said: expected"):
        one.run(WITH_LAYERNORM, "64x192", said=said)
    with pytest.raises(RuntimeError, match="cannot do"):
        one.run(WITH_LAYERNORM, "128x192 single")
    one.weight_scale = torch.ones(769, device="cuda")[1:]
    with pytest.raises(RuntimeError, match="scales aligned to 16 bytes"):
        one.run(WITH_LAYERNORM, "64x192")
    one = Operands(64, 768, 64, RULES[WITH_PRENORM][-1], torch.float16)
    with pytest.raises(RuntimeError, match="cannot do .*: no kernel of ours does this norm"):
        one.run(WITH_LAYERNORM, "64x192")
