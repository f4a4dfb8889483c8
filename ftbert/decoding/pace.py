"""How many tokens of prompts a step computes beside the texts that grow: by the time that steps take here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter

import torch

FIRST = 32  # tokens of the first step, of which nothing is known
_BITS = 4  # of a size that are not 0
_GROWTH = 4.0  # at most, from one measured step to the next
_STEPS = 7  # that are remembered
_RESTS = 8  # steps with prompts, and then one without


class Pace:
    """Prompts take `seconds` of a step at most, or as long as the step takes without them where that is longer.

    What a step takes is that of one without prompts, and so much more for each of their tokens; the last steps say how
    much. Of these the quick ones count: other work on the machine makes steps longer, never shorter. So that both are
    known of now, each ninth step of a long prompt has none of it. No constant is of a machine or a model.
    """

    def __init__(self, seconds: float | None, most: int) -> None:
        """seconds: None: no bound. most: tokens of a step, also where it takes no time."""
        self._seconds, self._most = seconds, most
        self._size = float(min(FIRST, most))
        self._alone: deque[float] = deque(maxlen=4)  # seconds of steps without prompts
        self._since = 0  # steps since one of those
        self._costs: deque[float] = deque(maxlen=_STEPS)  # seconds of a token, by step

    @property
    def bounded(self) -> bool:
        return self._seconds is not None

    @property
    def size(self) -> int:
        """Tokens of prompts in the next step: of few values, as products of each size are planned once."""
        if self._seconds is None:
            return self._most
        size = max(1, min(int(self._size), self._most))
        return size >> (shift := max(size.bit_length() - _BITS, 0)) << shift

    @property
    def rests(self) -> bool:
        """Whether the next step has no prompts, where texts grow."""
        return self.bounded and self._since >= _RESTS

    def took(self, seconds: float, tokens: int) -> None:
        """A step was computed in `seconds`, with `tokens` of prompts."""
        assert self._seconds is not None
        if not tokens:
            self._alone.append(seconds)
            self._since = 0
            return
        self._since += 1
        alone = _quick(self._alone) if self._alone else 0.0
        allowed = max(self._seconds, alone)
        spent = max(seconds - alone, seconds / 8)
        if tokens < self._size / 2 and spent <= allowed:
            return  # too few to say what more would take
        self._costs.append(max(spent / tokens, 1e-9))
        self._size = min(max(allowed / _quick(self._costs), 1.0), _GROWTH * self._size)


def _quick(seconds: Iterable[float]) -> float:
    """The second of four."""
    found = sorted(seconds)
    return found[len(found) // 4]


class Stopwatch:
    """Of one step: the device's time on a GPU, whose host is ahead, else the host's."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = perf_counter) -> None:
        """Starts."""
        self._clock, self._events = clock, list[torch.cuda.Event]()
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record(torch.cuda.current_stream(device))
        self._began, self._device = clock(), device
        self._ended = self._began

    def stop(self) -> None:
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._device))
        self._ended = self._clock()

    def seconds(self) -> float:
        """Waits on a GPU until it has stopped."""
        if not self._events:
            return self._ended - self._began
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3
