"""A GPU for the tuner's tests: algorithms that take the time they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ftbert.tuning import WITH_LAYERNORM, Bench, Product, run
from ftbert.tuning import product_tuner as tuning

QKV = Product("fp16", 2304, 768, bias=True)


class FakeAlgorithm:
    """Takes `us` for each m, whatever the GPU. It is asked in each turn: `us` may be disturbed in some."""

    def __init__(self, number: int, us: Callable[[int], float]) -> None:
        self.data, self.us, self.error = (number,) * 8, us, 1e-4
        self.id, self.tile, self.split_k = 66, number, 1
        self.tile_rows = self.tile_columns = 128
        self.kernel = self.variant = ""  # cuBLASLt's
        self.stages = self.reduction = self.swizzle = self.custom = self.inner_shape = self.cluster = 0


def own_algorithm(kernel: str, number: int, us: float) -> FakeAlgorithm:
    """A kernel of ftbert's own; the variant's name is the number."""
    algorithm = FakeAlgorithm(number, lambda m: us)
    algorithm.kernel, algorithm.variant = kernel, str(number)
    return algorithm


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch,
    algorithms: list[FakeAlgorithm],
    own: Sequence[FakeAlgorithm] = (),
    in_force: FakeAlgorithm | None = None,
    proposed: Callable[[int], FakeAlgorithm | None] | None = None,
) -> None:
    """Has these algorithms, of which cuBLASLt proposes the first, or what is `proposed` at an m (None: nothing), and
    these kernels of our own. in_force: what runs."""

    class FakeBench:
        launches, sms = 4, 132

        def __init__(self, product: Product, m: int, device: object) -> None:
            self.product, self.m = product, m

        def heuristics(self, most: int = 8) -> list[FakeAlgorithm]:
            first = proposed(self.m) if proposed else algorithms[0]
            return [first] if first else []

        first_proposal = Bench.first_proposal

        def chosen(self) -> FakeAlgorithm:
            return in_force or algorithms[0]

        def own(self) -> list[FakeAlgorithm]:
            return [a for a in own if a.kernel != WITH_LAYERNORM or self.product.layernorm]

        def enumerate(self) -> list[FakeAlgorithm]:
            return algorithms

        def times(self, chosen: list[FakeAlgorithm], rounds: int = 5, launches: int = 0) -> list[list[float]]:
            return [[a.us(self.m) * (1 + 0.001 * (i % 2)) for i in range(rounds)] for a in chosen]  # disturbs all alike

        def error(self, algorithm: FakeAlgorithm) -> float:
            return algorithm.error

    for module in (tuning, run):
        monkeypatch.setattr(module, "Bench", FakeBench)
    monkeypatch.setattr(run, "known_rows", list)
