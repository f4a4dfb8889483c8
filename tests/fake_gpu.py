"""A GPU for the tuner's tests: algorithms that take the time they are told to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from ftbert.tuning import WITH_NORM, Bench, Product, run
from ftbert.tuning import product_tuner as tuning

QKV = Product("fp16", 2304, 768, bias=True)


@dataclass(eq=False)
class FakeAlgorithm:
    """One of cuBLASLt's, or of our `kernel` the variant with this number. us: its microseconds on any GPU, or by m;
    asked in each turn, and disturbed in some."""

    number: int
    us: float | Callable[[int], float]
    kernel: str = ""
    error: float = 1e-4

    def __post_init__(self) -> None:
        self.variant = str(self.number) if self.kernel else ""
        self.data, self.id = (self.number,) * 8, 66

    def takes(self, m: int) -> float:
        return self.us(m) if callable(self.us) else self.us


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch,
    algorithms: list[FakeAlgorithm],
    own: Sequence[FakeAlgorithm] = (),
    in_force: FakeAlgorithm | None = None,
    refused: Sequence[int] = (),
) -> None:
    """Has these algorithms, which cuBLASLt proposes in this order (at the `refused` m nothing), and these kernels of our
    own. in_force: what runs."""

    class FakeBench:
        launches = 4

        def __init__(self, product: Product, m: int, device: object) -> None:
            self.product, self.m = product, m

        def heuristics(self, most: int = 8) -> list[FakeAlgorithm]:
            return [] if self.m in refused else algorithms[:most]

        first_proposal = Bench.first_proposal

        def chosen(self) -> FakeAlgorithm:
            return in_force or algorithms[0]

        def own(self) -> list[FakeAlgorithm]:
            return [a for a in own if a.kernel not in WITH_NORM or self.product.normed]

        def algorithm(self, words: tuple[int, ...]) -> FakeAlgorithm:
            return FakeAlgorithm(words[0], math.inf)

        def times(self, chosen: list[FakeAlgorithm], rounds: int = 5, launches: int = 0) -> list[list[float]]:
            return [[a.takes(self.m) * (1 + 0.001 * (i % 2)) for i in range(rounds)] for a in chosen]  # all alike

        def error(self, algorithm: FakeAlgorithm) -> float:
            return algorithm.error

    for module in (tuning, run):
        monkeypatch.setattr(module, "Bench", FakeBench)
    monkeypatch.setattr(run, "is_known", lambda row: True)
    monkeypatch.setattr(run, "put_in_force", lambda device, rows: None)
