"""How many tokens a batch has: the smallest with nearly all of the best tokens/s, by timings that others disturb.

A disturbance only adds time, so of several timings of one size the shortest is the truth, once it was seen twice. Sizes
take turns, so that a slow second is one of all of them. A timing of a short batch is of several in a row, so that it
does not fall between two turns of another process on the same core, which a long one cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# A batch is the smallest with this share of the best tokens/s; larger ones only add waiting: none takes longer than
# this, in seconds, since the most urgent newcomer waits for it.
ENOUGH, LONGEST = 0.95, 0.25
_SMALLEST = 256
# Seconds of a timing at least, and after which no other round begins.
_SPAN, _SECONDS = 0.04, 5.0
# Two timings are the same within this share. Rounds at least.
_SAME, _ROUNDS = 0.02, 3
# So often is a size timed again that took too long, before larger ones are given up.
_TRIES = 3


def batch_size(
    run: Callable[[int], None], most: int, given: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """(tokens, tokens/s at that size). run: computes a batch of so many tokens. given: the size, where it is chosen."""
    sizes = [min(given, most)] if given else [*(_SMALLEST << k for k in range(20) if _SMALLEST << k < most), most]
    until = clock() + _SECONDS
    timings = _first(run, sizes, clock, until)
    while clock() < until and not all(map(_settled, timings.values())):
        for size, found in timings.items():
            found.append(_timed(run, size, clock, max(1, round(_SPAN / min(found)))))
    seconds = {size: min(found) for size, found in timings.items()}
    rates = {size: size / one for size, one in seconds.items() if one <= LONGEST or size == sizes[0]}
    size = next(size for size, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
    return size, rates[size]


def _first(
    run: Callable[[int], None], sizes: list[int], clock: Callable[[], float], until: float
) -> dict[int, list[float]]:
    """A timing of each size that comes into question, after a call that is slow. The last may take too long, which
    others find out."""
    timings: dict[int, list[float]] = {}
    for size in sizes:
        run(size)
        best = _timed(run, size, clock)
        for _ in range(_TRIES):
            if LONGEST < best < 4 * LONGEST:
                best = min(best, _timed(run, size, clock))
        if timings and best > 2 * LONGEST:
            break
        timings[size] = [best]
        if best > LONGEST or clock() > until:
            break
    return timings


def _settled(timings: list[float]) -> bool:
    first, second = sorted(timings)[:2] if len(timings) > _ROUNDS else (0.0, 1.0)
    return second <= (1 + _SAME) * first


def _timed(run: Callable[[int], None], size: int, clock: Callable[[], float], times: int = 1) -> float:
    """Seconds of a batch, of several in a row."""
    began = clock()
    for _ in range(times):
        run(size)
    return max((clock() - began) / times, 1e-9)
