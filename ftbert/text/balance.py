"""Whether GPUs wait for the tokenizer, seen while a call runs: then its caller is told, once a model, and tokenising
goes to as many processes as that pays for. On a CPU the host is the device, and nothing is to be balanced."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ftbert.caller import warn_caller
from ftbert.cores import cores
from ftbert.packed_model import PackedModel, kept
from ftbert.text.seats import ProcessSeat, Seats

_FIRST_LOOK = 0.5  # seconds: in less the start of a process does not pay
_ENOUGH = 0.9  # of what the GPUs compute: then they hardly wait
_CALLS = 4  # of a process before its speed is believed
_HEADROOM = 1.1
NANOTOKEN = "`pip install 'nanotoken>=0.1,<0.2'` tokenises a hundred times faster"


def processes_that_pay(gpus: float, here: float, process: float, free_cores: int) -> int:
    """How many processes shall tokenise; 0 where as many as there are cores for are no faster than threads here. gpus,
    here, process: tokens/s that all GPUs compute, that threads of this process give them, that one process gives."""
    number = min(free_cores, math.ceil(_HEADROOM * gpus / process))
    return number if number * process > _HEADROOM * here else 0


class Balance:
    """Of one call. computed: thread-safe; all else is for the thread that draws the batches."""

    def __init__(self, model: PackedModel, seats: Seats, now: Callable[[], float] = time.perf_counter) -> None:
        self._model, self._seats, self._now = model, seats, now
        self._gpus = [one.device for one in model.replicas]
        self._free_cores = cores().number - len(self._gpus)  # a thread launches for each
        self._tokens, self._busy, self._lock = 0, 0.0, threading.Lock()
        self._first: float | None = None  # when the first batch was done: all is counted from there
        self._last = self._waited = 0.0
        self._done = self._gpus[0].type != "cuda"
        self._here = self._wanted = 0.0  # tokens/s, once GPUs were seen to wait
        self._processes: list[ProcessSeat] = []

    def computed(self, tokens: int, seconds: float) -> None:
        """A GPU has computed so many tokens in so many seconds."""
        with self._lock:
            if self._first is None:
                self._first, self._waited = self._now(), self._seats.waited
                return
            self._tokens, self._busy, self._last = self._tokens + tokens, self._busy + seconds, self._now()

    def look(self) -> None:
        """Acts on what was seen so far. Costs nothing."""
        if self._done:
            return
        if not self._wanted:
            self._see_who_waits()
        elif len(self._processes) == 1:
            self._start_the_others(self._processes[0])
        elif all(seat.calls for seat in self._processes):
            self._seats.leave_this_process()
            self._done = True

    def _see_who_waits(self) -> None:
        if self._first is None or not self._busy:
            return
        seconds = self._last - self._first
        if seconds < _FIRST_LOOK or self._seats.waited - self._waited < seconds / 2:
            return
        here, gpus = self._tokens / seconds, self._tokens / self._busy * len(self._gpus)
        if here > _ENOUGH * gpus:
            return
        self._here, self._wanted = here, gpus
        kept(self._model, "told of its tokenizer", lambda: warn_caller(self._words()))
        if self._free_cores > 1 and self._seats.used() is not None and _runs_python():
            self._add(1)
        else:
            self._done = True

    def _start_the_others(self, first: ProcessSeat) -> None:
        if first.calls < _CALLS:
            return
        rate = first.tokens_made / first.seconds
        more = processes_that_pay(self._wanted, self._here, rate, self._free_cores) - 1
        if more < 1:
            self._done = True  # the one process stays, beside the threads
        else:
            self._add(more)

    def _add(self, number: int) -> None:
        for _ in range(number):
            try:
                seat = ProcessSeat()
            except OSError:  # no memory or no more processes: threads go on
                self._done = True
                return
            self._processes.append(seat)
            self._seats.add(seat)

    def _words(self) -> str:
        names = ", ".join(map(str, self._gpus))
        rates = f"it gives {self._here:,.0f} tokens/s, and {self._wanted:,.0f} could be computed"
        if self._free_cores > 1:
            rates += "; from here on other processes tokenise too, as far as that pays"
        return f"{names} wait{'s' * (len(self._gpus) == 1)} for the tokenizer: {rates}; {self._advice()}"

    def _advice(self) -> str:
        used = self._seats.used()
        if used is not None and used[0].is_wordpiece and not used[1] and not _has_nanotoken():
            return NANOTOKEN
        return f"more than {cores().number} cores, or fewer GPUs for this process, would fit better"


def _has_nanotoken() -> bool:
    return find_spec("nanotoken") is not None or os.environ.get("FTBERT_TOKENIZER") == "tokenizers"


def _runs_python() -> bool:
    """Whether sys.executable starts Python: in a program that embeds it, it may be that program."""
    return not getattr(sys, "frozen", False) and Path(sys.executable or "").name.startswith("python")
