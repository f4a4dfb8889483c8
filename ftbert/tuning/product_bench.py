"""One matrix product on a GPU: its algorithms, each timed as the encoder will meet it (ftbert/tuning/)."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ftbert.dtypes import DTYPES
from ftbert.formats import formats
from ftbert.tuning.c_calls import Algorithm
from ftbert.tuning.gemm_rows import Own, Product
from ftbert.tuning.gemm_table import described, tuner_module

_AT_ONCE = 64  # graphs that exist at a time
_AHEAD = 0.02  # less is no reason for a row
_READ_ROWS = 128  # up to a multiple of them kernels may read a (csrc/gemm/product.h)
_EIGHT_BITS = ("e4m3", "e4m3"), ("byte_rows", "int8")
_WEIGHT_BYTES = 160 << 20  # more than any L2 cache, and about what a BERT-base has


def choice_of(algorithm: Algorithm) -> Own | tuple[int, ...]:
    """What a row says of it; equal for equal algorithms."""
    return Own(algorithm.kernel, algorithm.variant) if algorithm.kernel else tuple(algorithm.data)


class NothingProposed(RuntimeError):
    """cuBLASLt has nothing to compare with, and nothing to run where no table has the product."""


class Bench:
    """One product for one m on one GPU, with operands of its own. RuntimeError: no GPU, or a build without CUDA."""

    def __init__(self, product: Product, m: int, device: str | torch.device = "cuda") -> None:
        module = tuner_module()
        if not torch.cuda.is_available():
            raise RuntimeError("tuning needs a GPU; on the CPU there is nothing to tune")
        device = torch.device(device)
        self.product, self.m = product, m
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        scaled = product.types[:2] in _EIGHT_BITS
        computed = {*DTYPES, "e4m3"} if scaled and product.types[0] == "e4m3" else {*DTYPES}
        if unknown := [type for type in product.types[2 * scaled :] if type not in computed]:
            raise RuntimeError(f"{product}: nothing computes {', '.join(unknown)} yet, so there is nothing to time")
        index, (of_a, of_b, of_c) = self.device.index, (formats()[type].numbers for type in product.types)
        self._workspace = _operand("workspace", module.workspace_bytes(index), torch.uint8, self.device)
        size = of_b.itemsize
        # Products in a timed graph: 250 us of them. Where a product is long, its own operands sweep the L2 cache.
        long = 4 + 2e-6 * m * product.n * product.k / (500 if size <= 2 else 40)  # us, at so many TFLOP/s
        fitting = max(2, _WEIGHT_BYTES // (product.n * product.k * size))
        self.launches = min(fitting, 128, max(4, round(250 / long)))
        self._bytes = of_a == torch.uint8  # byte rows by int8
        if self._bytes:
            self._a, self._b = _byte_rows(m, product.k, self.device), _int8(product, self.launches, self.device)
        else:
            elements = max(_WEIGHT_BYTES // size, self.launches * product.n * product.k)
            self._b = _operand("b", elements, of_b, self.device)
            self._a = _operand("a", -(-m // _READ_ROWS) * _READ_ROWS * product.k, of_a, self.device)
        of_bias = torch.float16 if of_c.itemsize == 1 else of_c
        self._bias = _operand("bias", 3 * product.n, of_bias, self.device)  # and gamma, beta
        self._ones = torch.ones(product.n, device=self.device)  # scales
        self._tuner = module.Tuner(index, described(product, m), self._workspace.data_ptr(), self._ones.data_ptr())
        self._c = _operand("c", -(-self._tuner.c_bytes // of_c.itemsize), of_c, self.device)

    def heuristics(self, most: int = 8) -> list[Algorithm]:
        """What cuBLASLt proposes, its best guess first; it never gives more than 8."""
        return list(self._tuner.heuristics(most))

    def first_proposal(self) -> Algorithm:
        """What runs without a table, unless a product of ours is guessed to be faster. Of a product with scales it is
        there to compare with: models run ours alone."""
        found = self.heuristics(1)
        if not found:
            raise NothingProposed(f"cuBLASLt proposes nothing for {self.product} with m={self.m}")
        return found[0]

    def algorithm(self, words: tuple[int, ...]) -> Algorithm:
        """cuBLASLt's that a row names; it may not run here."""
        return tuner_module().Algorithm(words)

    def own(self) -> list[Algorithm]:
        """Variants of ftbert's own kernels that can do it, bias and activation included; kernels WITH_NORM: the norm
        too."""
        return list(self._tuner.own())

    def chosen(self) -> Algorithm:
        """What a model in this process runs for this product and m."""
        return self._tuner.chosen()

    def times(self, algorithms: Sequence[Algorithm], rounds: int = 5, launches: int = 0) -> list[list[float]]:
        """Microseconds of each, `rounds` times, in turns: what disturbs the clocks disturbs all alike. Infinite for an
        algorithm that cannot run after all. launches: products in a graph, if not 250 us of them."""
        found: list[list[float]] = []
        for first in range(0, len(algorithms), _AT_ONCE):
            found += in_turns([self.record(a, launches) for a in algorithms[first : first + _AT_ONCE]], rounds)
        return found

    def record(self, algorithm: Algorithm, launches: int = 0) -> Recording:
        """This product in a CUDA graph, for `in_turns`."""
        a, b, bias, c = self._a.data_ptr(), self._b.data_ptr(), self._vectors(), self._c.data_ptr()
        return Recording(self, self._tuner.record(algorithm, a, b, launches or self.launches, bias, c))

    def microseconds(self, algorithm: Algorithm, rounds: int = 5) -> float:
        """Median time of one product; infinite for an algorithm that cannot run after all."""
        return statistics.median(self.times([algorithm], rounds)[0])

    def _vectors(self) -> int:
        """The address of bias, gamma and beta; 0 where the product has none of them."""
        return self._bias.data_ptr() if self.product.bias or self.product.normed else 0

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the operands hold, [m, k] and [n, k]."""
        m, n, k = self.m, self.product.n, self.product.k
        if not self._bytes:
            return self._a[: m * k].view(m, k), self._b[: n * k].view(n, k)
        row = -(-k // 16) * 16
        return (self._a[:, :k].float() - _ZERO) * _byte_scale(k), self._b[: n * row].view(n, row)[:, :k]

    def error(self, algorithm: Algorithm) -> float:
        """Largest absolute difference to the product in float32 of what the operands hold, over the size of its largest
        element; of two results the larger one."""
        p = self.product
        held_a, held_b = self._numbers()
        cols = p.n // 2 if p.gated else p.n
        c = self._c[: self.m * cols].view(self.m, cols)
        made, norm = [c], None
        if p.normed:
            c.copy_(torch.randn(c.shape, device=self.device, generator=torch.Generator(self.device).manual_seed(1)))
            norm = (c.clone(), self._bias[p.n : 2 * p.n], self._bias[2 * p.n : 3 * p.n])
            self._c[self.m * p.n : self._tuner.c_bytes // c.element_size()].fill_(float("nan"))  # the product's place
            if p.prenorm:
                beside = -(-c.nbytes // 256) * 256 // c.element_size()
                made.append(self._c[beside : beside + c.numel()].view(c.shape))
        else:
            c.fill_(float("nan"))
        self._tuner.run(algorithm, self._a.data_ptr(), self._b.data_ptr(), self._vectors(), c.data_ptr())
        worst, largest = [0.0, 0.0], [0.0, 0.0]
        for first in range(0, self.m, 4096):
            want = _reference(held_a[first : first + 4096], held_b, self._bias if p.bias else None)
            activated = _activated(want[:, ::2] if p.gated else want, p.activation)
            wanted = [activated * want[:, 1::2] if p.gated else activated]
            if norm is not None:
                residual, gamma, beta = (tensor.float() for tensor in (norm[0][first : first + 4096], *norm[1:]))
                total = wanted[0] + residual
                wanted = [total] * p.prenorm + [torch.nn.functional.layer_norm(total, (p.n,), gamma, beta, 1e-5)]
            for i, (got, expected) in enumerate(zip(made, wanted, strict=True)):
                difference = (got[first : first + 4096].float() - expected).abs().max().item()
                worst[i] = max(worst[i], difference if difference == difference else float("inf"))
                largest[i] = max(largest[i], expected.abs().max().item())
        return max(worst[i] / largest[i] for i in range(len(made)))


@dataclass(frozen=True)
class Recording:
    """A product that a Bench has recorded, over the Bench's operands."""

    bench: Bench
    graph: Any  # of ftbert/tuning/c_calls.py; None: the algorithm cannot run after all

    def microseconds(self) -> float:
        """Replays it: the time of one product, or infinity."""
        return math.inf if self.graph is None else float(self.graph.microseconds())


def in_turns(recordings: Sequence[Any], rounds: int) -> list[list[float]]:
    """microseconds() of each, also of several benches, `rounds` times, in turns: what disturbs the clocks disturbs all
    alike."""
    turns = [[recording.microseconds() for recording in recordings] for _ in range(rounds)]
    return [list(times) for times in zip(*turns, strict=True)]


def is_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether ours, taken in turns with theirs, are faster by more than the noise and 2 %, and in the median too."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    noise = 1.5 * statistics.median(abs(r - ratio) for r in ratios)
    return ratio + max(noise, _AHEAD) < 1 and statistics.median(ours) < statistics.median(theirs)


def _operand(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers, kept from one Bench to the next: most of a Bench's time would go into making them. Those of b are
    small, so that no sum, nor a sum times its gate, is past the largest number of any type with a scale of 1."""
    have = _operands.get((name, dtype, device))
    if have is None or have.numel() < elements:
        # Of equal rows of a and b the products are squares, and their sums as large as k.
        generator = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()))
        size = 0.05 if name == "b" else 1.0
        have = torch.empty(elements, dtype=dtype, device=device)
        if dtype.itemsize == 1 and dtype.is_floating_point:
            for part in have.split(1 << 24):
                part.copy_(torch.empty(part.shape, device=device).normal_(0, size, generator=generator))
        elif dtype.is_floating_point:
            have.normal_(0, size, generator=generator)
        _operands[name, dtype, device] = have
    return have


# Of byte rows (csrc/core/format.h): a zero point, and a scale with which sums by a matrix of any int8 are of order 1.
_ZERO = 128


def _byte_scale(k: int) -> float:
    return 1 / (74 * 73 * math.sqrt(k))


def _byte_rows(m: int, k: int, device: torch.device) -> torch.Tensor:
    """uint8 [m, a row's bytes] of random numbers."""
    generator = torch.Generator(device=device).manual_seed(1)
    rows = torch.randint(0, 256, (m, (k + 8 + 63) // 64 * 64), dtype=torch.uint8, device=device, generator=generator)
    behind = torch.tensor([_byte_scale(k)]), torch.tensor([_ZERO], dtype=torch.int32)
    rows[:, k:-8] = 0
    rows[:, -8:] = torch.cat([one.view(torch.uint8) for one in behind]).to(device)
    return rows


def _int8(product: Product, count: int, device: torch.device) -> torch.Tensor:
    """At least `count` matrices of one random one's numbers as a GPU reads them."""
    generator = torch.Generator(device=device).manual_seed(2)
    shape = product.n, product.k
    matrix = torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator)
    packed = torch.ops.ftbert.pack_weight(matrix)
    return packed.repeat(max(count, _WEIGHT_BYTES // packed.numel())).view(torch.int8)  # type: ignore[no-any-return]


_operands: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}


def _reference(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        want = a.float() @ b.float().T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return want if bias is None else want + bias[: b.shape[0]].float()


def _activated(want: torch.Tensor, activation: str) -> torch.Tensor:
    if activation.startswith("gelu"):
        return torch.nn.functional.gelu(want, approximate="tanh" if activation == "gelu_tanh" else "none")
    return want if activation == "none" else getattr(torch.nn.functional, activation)(want)
