"""Progress: a bar on a terminal; elsewhere nothing, or a line from time to time."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

_SECONDS = 30  # between two lines


class Progress:
    """Counts texts and tokens and shows tokens/s. `show` None means: only if stderr is a terminal. total None: not
    known, the bar counts texts. lines: without a bar a line on stderr every 30 s, unless `show` is False."""

    def __init__(
        self,
        total: int | None,
        show: bool | None,
        unit: str = " texts",
        label: str = "encode",
        *,
        lines: bool = False,
        begin: int = 0,
    ) -> None:
        """begin: how much of the total was done before."""
        self.texts = 0
        self.tokens = 0
        self._began = time.perf_counter()
        self._bar: Any = None
        self._total, self._begin, self._done = total, begin, begin
        self._label, self._unit = label, unit
        self._expected: deque[tuple[int, int]] = deque()
        self._done_of_first = 0  # texts of the first expectation
        self._next_line: float | None = None
        if sys.stderr.isatty() if show is None else show:
            from tqdm import tqdm

            layout = None if total is None else ("{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]")
            self._bar = tqdm(total=total, unit=unit, desc=label, bar_format=layout, unit_scale=True, initial=begin)
        elif lines and show is None:
            self._next_line = self._began + _SECONDS

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._began

    def add(self, texts: int, tokens: int, step: int | None = None) -> None:
        """More is done; `step` moves the bar when it counts something else than texts."""
        self.texts += texts
        self.tokens += tokens
        step = texts if step is None else step
        self._done += step
        if self._bar is not None:
            speed = f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"
            counted = f"{self.texts:,}{self._unit}, " if self._total is not None else ""
            self._bar.set_postfix_str(counted + speed, refresh=False)
            self._bar.update(texts if self._total is None else step)
        elif self._next_line is not None and time.perf_counter() >= self._next_line:
            self._next_line = time.perf_counter() + _SECONDS
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """What is done, how fast, and how long the rest takes where the total is known."""
        seconds = max(self.seconds, 1e-9)
        found = f"{self._label}: {self.texts:,}{self._unit} in {_clock(seconds)}, {self.texts / seconds:,.0f}/s, "
        found += f"{self.tokens / seconds:,.0f} tokens/s"
        if self._total and self._done > self._begin:
            left = (self._total - self._done) * seconds / (self._done - self._begin)
            found += f"; {100 * self._done / self._total:.0f} %, {_clock(left)} left"
        return found

    def expect(self, texts: int, step: int) -> None:
        """The next `texts` stand for `step` of the total; from any thread."""
        self._expected.append((texts, step))

    def add_expected(self, texts: int, tokens: int) -> None:
        """As `add`, by what was expected of the texts in turn; a batch lies within one expectation."""
        while self._expected and self._done_of_first >= self._expected[0][0]:
            self._expected.popleft()
            self._done_of_first = 0
        many, step = self._expected[0] if self._expected else (1, 0)
        before, self._done_of_first = self._done_of_first, self._done_of_first + texts
        self.add(texts, tokens, step * self._done_of_first // many - step * before // many)

    def close(self) -> None:
        """Leaves the finished bar on the screen."""
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
