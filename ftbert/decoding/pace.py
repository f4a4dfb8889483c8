"""How many tokens of prompts a step computes beside the texts that grow: by the time that steps take here."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

FIRST = 32  # tokens of the first step, of which nothing is known
_CHANGE = 4.0  # at most, from one measured step to the next


class Pace:
    """Prompts take `seconds` of a step at most, or as long as the step takes without them where that is longer.

    What a step takes is that of one without prompts, and so much more for each of their tokens; the last steps say how
    much. No constant is of a machine or a model.
    """

    def __init__(self, seconds: float | None, most: int) -> None:
        """seconds: None: no bound. most: tokens of a step, also where it takes no time."""
        self._seconds, self._most = seconds, most
        self._size = float(min(FIRST, most))
        self._alone: float | None = None  # seconds of a step without prompts

    @property
    def bounded(self) -> bool:
        return self._seconds is not None

    @property
    def size(self) -> int:
        """Tokens of prompts in the next step."""
        return self._most if self._seconds is None else max(1, min(int(self._size), self._most))

    def took(self, seconds: float, tokens: int) -> None:
        """A step was computed in `seconds`, with `tokens` of prompts."""
        assert self._seconds is not None
        if not tokens:
            self._alone = seconds if self._alone is None else 0.7 * self._alone + 0.3 * seconds
            return
        alone = self._alone or 0.0
        allowed = max(self._seconds, alone)
        spent = max(seconds - alone, seconds / 8)
        if tokens < self._size / 2 and spent <= allowed:
            return  # too few to say what more would take
        change = min(max(allowed / max(spent, 1e-9), 1 / _CHANGE), _CHANGE)
        self._size = min(max(1.0, tokens * change), float(self._most))


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
