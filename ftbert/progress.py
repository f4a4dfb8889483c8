"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Counts texts and tokens and shows tokens/s. `show` None means: only if stderr is a terminal."""

    def __init__(self, total: int, show: bool | None, unit: str = " texts", label: str = "encode") -> None:
        self.texts = 0
        self.tokens = 0
        self._began = time.perf_counter()
        self._bar: Any = None
        if sys.stderr.isatty() if show is None else show:
            from tqdm import tqdm

            layout = (
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
            self._bar.update(texts if step is None else step)

    def close(self) -> None:
        """Leaves the finished bar on the screen."""
        if self._bar is not None:
            self._bar.close()
