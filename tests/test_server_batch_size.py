"""The size of a batch, with a clock of its own: what others do on the machine must not choose it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed: the extra ftbert[serve]")

from ftbert.server import loading  # noqa: E402
from ftbert.server.job import Kind  # noqa: E402
from ftbert.server.loading import batch_size  # noqa: E402
from ftbert.server.settings import Settings  # noqa: E402

MOST = 16384


class Machine:
    """seconds(tokens): of a batch alone. stretch(now): by how much others slow it down at that time."""

    def __init__(self, seconds: Callable[[int], float], stretch: Callable[[float], float] = lambda now: 1.0) -> None:
        self._seconds, self._stretch = seconds, stretch
        self.now, self.calls = 1000.0, 0

    def run(self, tokens: int) -> None:
        self.calls += 1
        left, step = self._seconds(tokens), 0.001
        while left > 0:
            part = min(step, left)
            self.now += part * self._stretch(self.now)
            left -= part

    def choose(self, given: int | None = None) -> tuple[int, float]:
        return batch_size(self.run, MOST, given, lambda: self.now)


def at_rates(rates: dict[int, float]) -> Callable[[int], float]:
    return lambda tokens: tokens / rates.get(tokens, 100_000.0)


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ({}, 256),  # of equal ones the smallest
        ({256: 80_000, 512: 90_000}, 1024),  # the others: 100,000 tokens/s
        ({256: 5_000, 512: 10_000, 1024: 10_000, 2048: 10_000, 4096: 10_000}, 512),  # 4096: 0.4 s
        ({256: 500, 512: 1_000}, 256),  # the smallest takes too long already
    ],
)
def test_it_is_the_smallest_good_batch(rates: dict[int, float], size: int) -> None:
    found, rate = Machine(at_rates(rates)).choose()
    assert (found, rate) == (size, pytest.approx(rates.get(size, 100_000.0)))
    assert Machine(at_rates(rates)).choose(4096)[0] == 4096


def model(overhead: float, rate: float) -> Callable[[int], float]:
    """A launch costs `overhead`, a token 1 / rate."""
    return lambda tokens: overhead + tokens / rate


MODELS = [model(0.002, 12_000), model(0.004, 30_000), model(0.0003, 500_000), model(0.02, 3_000), model(0.3, 400)]


@pytest.mark.parametrize("seconds", MODELS)
@pytest.mark.parametrize("seed", range(8))
def test_disturbances_do_not_choose(seconds: Callable[[int], float], seed: int) -> None:
    """Another process takes half of the machine for a while, a quarter of the time; the first second is slow, as a
    start is."""
    want, rate = Machine(seconds).choose()
    random = np.random.default_rng(seed)
    gaps = np.cumsum(random.exponential([0.6, 0.2] * 2000)) + 1000.0  # begin, end, begin ...

    def stretch(now: float) -> float:
        busy = int(np.searchsorted(gaps, now)) % 2 == 1
        return (3.0 if now < 1001.0 and seed % 2 else 1.0) * (2.0 if busy else 1.0)

    disturbed = Machine(seconds, stretch)
    got, found = disturbed.choose()
    assert got == want
    assert rate / 2 <= found <= rate * 1.001
    assert disturbed.now < 1030


def test_a_machine_that_is_slow_throughout_chooses_the_same() -> None:
    for seconds in MODELS[:3]:
        want, rate = Machine(seconds).choose()
        got, found = Machine(seconds, lambda now: 1.4).choose()
        assert (got, found) == (want, pytest.approx(rate / 1.4))


def test_the_start_does_not_take_long() -> None:
    for seconds in MODELS:
        quiet = Machine(seconds)
        quiet.choose()
        assert quiet.now - 1000.0 < 8.0


def test_a_size_that_is_given_takes_a_second() -> None:
    """Though no two timings are the same: no other size is compared with it."""
    for seconds in MODELS[:4]:
        slowing = Machine(seconds, lambda now: 1.0 + 3 * (now - 1000.0))
        size, rate = slowing.choose(256)
        assert size == 256 and rate == pytest.approx(256 / seconds(256), rel=0.5)
        assert slowing.now - 1000.0 < 2.0


def test_a_model_is_timed_with_batches_of_its_own() -> None:
    tokens = []
    compute = SimpleNamespace(launch=lambda batch: tokens.append((batch.tokens, batch.kind)) or (lambda: None))
    about = SimpleNamespace(text=SimpleNamespace(max_length=512), model=SimpleNamespace(vocab=100))
    settings = Settings((("m", "folder"),), batch_tokens=4096)
    size, rate = loading.timed(compute, Kind.LOGITS, about, settings)  # type: ignore[arg-type]
    assert size == 4096 and rate > 0 and set(tokens) == {(4096, Kind.LOGITS)}
