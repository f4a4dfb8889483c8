"""Where a call of the tokenizer runs: in a thread of this process, or in a process of its own. Imports no torch.

`tokenizers` divides a call among the cores itself, but what it leaves to Python (lists of ids, freeing) waits for the
lock that the threads which feed GPUs need too. Another process has a lock of its own, and one core.
"""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from ftbert.text.tokens import Tokens

T = TypeVar("T")

_SECONDS_TO_END = 5
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_thread = threading.local()  # .seat: of the call that this thread makes


class Encoder(Protocol):
    """A tokenizer, as seats know it; `FastTokenizer` is one."""

    @property
    def is_wordpiece(self) -> bool: ...

    def stored(self) -> tuple[str, bool, bool]: ...


class Seat:
    """Of one call at a time, in this process. used: the tokenizer of the last call; its texts were pairs."""

    used: tuple[Encoder, bool] | None = None

    def tokens(self, tokenizer: Encoder, texts: Sequence[Any], length: int, side: str) -> Tokens | None:
        """None: the caller's thread does it."""
        self.used = tokenizer, not all(isinstance(text, str) for text in texts)
        return None

    def hang_up(self) -> None:
        """What belongs to it is told to end."""

    def close(self) -> None:
        """What belongs to it has ended."""


class ProcessSeat(Seat):
    """In a process of its own, which starts here and is ready some tenths of a second later. A call that it cannot do,
    and all calls once it is gone, are the caller's. seconds, tokens, calls: of what it did."""

    def __init__(self) -> None:
        self.seconds, self.tokens_made, self.calls = 0.0, 0, 0
        self._known: list[Encoder] = []
        ours, its = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ftbert.text.token_worker", str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, **_ONE_THREAD},
                start_new_session=True,  # Ctrl-C is for this process, which closes its seats
            )  # fmt: skip
        self._connection: Connection | None = Connection(ours.detach())

    def tokens(self, tokenizer: Encoder, texts: Sequence[Any], length: int, side: str) -> Tokens | None:
        super().tokens(tokenizer, texts, length, side)
        if self._connection is None:
            return None
        number = next((at for at, known in enumerate(self._known) if known is tokenizer), len(self._known))
        stored = None
        if number == len(self._known):
            self._known.append(tokenizer)
            stored = tokenizer.stored()
        try:
            self._connection.send((number, stored, (list(texts), length, side)))
            answer = self._connection.recv()
        except (EOFError, OSError):  # it was killed
            self.close()
            return None
        if answer is None:
            return None
        seconds, ids, starts, types = answer
        self.seconds, self.tokens_made, self.calls = self.seconds + seconds, self.tokens_made + len(ids), self.calls + 1
        return Tokens(ids.astype(np.int64), starts, None if types is None else types.astype(np.int64))

    def hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        self.hang_up()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_SECONDS_TO_END)
            return
        self.process.kill()  # a fork of this process still holds the socket, say
        self.process.wait()


class Seats:
    """A number of seats in this process, and those that are added. most: of all. waited: seconds in which texts that
    were read had no tokens yet, as whoever draws windows counts them."""

    def __init__(self, here: int, others: int = 0) -> None:
        self.most = here + others
        self._all: list[Seat] = [Seat() for _ in range(here)]
        self._free: queue.SimpleQueue[Seat] = queue.SimpleQueue()
        self._only_processes = False
        self.waited = 0.0
        for seat in self._all:
            self._free.put(seat)

    def run(self, encode: Callable[[Sequence[Any]], T], texts: Sequence[Any]) -> T:
        """Encodes on a seat that is free, or waits for one."""
        _thread.seat = seat = self._free.get()
        try:
            return encode(texts)
        finally:
            _thread.seat = None
            if isinstance(seat, ProcessSeat) or not self._only_processes:
                self._free.put(seat)

    def add(self, seat: Seat) -> None:
        """One more, from now on."""
        self._all.append(seat)
        self._free.put(seat)

    def leave_this_process(self) -> None:
        """Calls to come are the other processes'."""
        self._only_processes = True

    def used(self) -> tuple[Encoder, bool] | None:
        """A tokenizer that was called, and whether with pairs; None without one."""
        return next((seat.used for seat in self._all if seat.used is not None), None)

    def close(self) -> None:
        """Every process ends; nobody runs any more."""
        for seat in self._all:
            seat.hang_up()
        for seat in self._all:
            seat.close()


def seat_of_this_thread() -> Seat | None:
    return getattr(_thread, "seat", None)
