"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any


class Progress:
    """Counts texts and tokens and shows tokens/s. `show` None means: only if stderr is a terminal. total None: not
    known, the bar counts texts."""

    def __init__(self, total: int | None, show: bool | None, unit: str = " texts", label: str = "encode") -> None:
        self.texts = 0
        self.tokens = 0
        self._began = time.perf_counter()
        self._bar: Any = None
        self._total = total
        self._expected: deque[tuple[int, int]] = deque()
        self._done = 0  # texts of the first expectation
        if sys.stderr.isatty() if show is None else show:
            from tqdm import tqdm

            layout = None if total is None else (
                "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}{postfix}]"
            )
            self._bar = tqdm(total=total, unit=unit, desc=label, bar_format=layout, unit_scale=True)

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.perf_counter() - self._began

    def add(self, texts: int, tokens: int, step: int | None = None) -> None:
        """More is done; `step` moves the bar when it counts something else than texts."""
        self.texts += texts
        self.tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s", refresh=False)
            self._bar.update(texts if step is None or self._total is None else step)

    def expect(self, texts: int, step: int) -> None:
        """The next `texts` stand for `step` of the total; from any thread."""
        self._expected.append((texts, step))

    def add_expected(self, texts: int, tokens: int) -> None:
        """As `add`, by what was expected of the texts in turn; a batch lies within one expectation."""
        while self._expected and self._done >= self._expected[0][0]:
            self._expected.popleft()
            self._done = 0
        many, step = self._expected[0] if self._expected else (1, 0)
        before, self._done = self._done, self._done + texts
        self.add(texts, tokens, step * self._done // many - step * before // many)

    def close(self) -> None:
        """Leaves the finished bar on the screen."""
        if self._bar is not None:
            self._bar.close()
