"""Waiting for signals that are blocked in every thread."""

from __future__ import annotations

import signal
from collections.abc import Set


def wait_for_signal(wanted: Set[int], seconds: float, others: Set[int] = frozenset()) -> int | None:
    """The first of `wanted` within so many seconds. One of `others` ends the waiting too.

    CPython's sigtimedwait returns what happens to be on the stack where a process is stopped and continued and the time
    is over meanwhile: only a number that was asked for is a signal.
    """
    got = signal.sigtimedwait(wanted | others, seconds)
    return got.si_signo if got is not None and got.si_signo in wanted else None
