"""Tokenising in other processes: the same ids, whatever happens to a process; when it pays, by rates that are given."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import tokenizer as trained
from stub_model import WORDS, StubModel, threads_left, write_tokenizer
from stub_model import pooling as stub_pooling

from ftbert.text import FastTokenizer, Tokens, balance, computing, embedding, text_options
from ftbert.text import seats as seats_module
from ftbert.text.ahead import ahead, in_turn
from ftbert.text.balance import Balance, processes_that_pay
from ftbert.text.seats import ProcessSeat, Seat, Seats

# Encoded alike where they are whole and where they are cut.
TEXTS = ["the cat sat", "", "über A\n", "🙂 two  spaces", "x" * 5000, "a b " * 3000, "[CLS] <s> the </s>"]
PAIRS = [("the cat", "sat on a mat " * 40), ("", "a"), "a single text"]


def fast(kind: str, folder: Path) -> FastTokenizer:
    if kind == "words":
        return FastTokenizer.from_stored((write_tokenizer(folder) / "tokenizer.json").read_text(), True, True)
    return FastTokenizer(trained(kind).backend_tokenizer, False)


def same(found: Tokens | None, want: Tokens) -> bool:
    if found is None or (found.types is None) != (want.types is None):
        return False
    types = want.types is None or np.array_equal(found.types, want.types)  # type: ignore[arg-type]
    return bool(types and np.array_equal(found.ids, want.ids) and np.array_equal(found.starts, want.starts))


@pytest.fixture(scope="module")
def seat() -> Iterator[ProcessSeat]:
    made = ProcessSeat()
    yield made
    made.close()
    assert made.process.poll() == 0


def test_another_process_gives_the_same_ids(seat: ProcessSeat, tmp_path: Path) -> None:
    """Three tokenizers in one process."""
    for kind in ("words", "bytes", "mark"):
        tokenizer = fast(kind, tmp_path)
        for texts, length, side in [(TEXTS, 16, "right"), (TEXTS, 7, "left"), ([], 9, "right"), (PAIRS, 12, "right")]:
            assert same(seat.tokens(tokenizer, texts, length, side), tokenizer.tokens(texts, length, side)), kind
    assert seat.calls == 12 and seat.tokens_made and seat.seconds > 0


def test_what_a_process_cannot_do_is_the_callers(seat: ProcessSeat, tmp_path: Path) -> None:
    tokenizer, seats = fast("words", tmp_path), Seats(0, 1)
    seats.add(seat)
    assert seat.tokens(tokenizer, ["a", "\ud800"], 9, "right") is None
    with pytest.raises((TypeError, UnicodeError)):  # as without seats
        seats.run(lambda texts: tokenizer.tokens(texts, 9, "right"), ["a", "\ud800"])
    assert same(seat.tokens(tokenizer, ["a"], 9, "right"), tokenizer.tokens(["a"], 9, "right"))  # it goes on


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    tokenizer, seats = fast("words", tmp_path), Seats(2, 1)
    windows = [(place, random.Random(place).choices(WORDS[4:], k=600)) for place in range(6)]

    def encode(texts: Any) -> Tokens:
        return tokenizer.tokens(texts, 9, "right")

    want = list(in_turn(windows, encode))
    killed = ProcessSeat()
    seats.add(killed)
    seats.leave_this_process()
    found = []
    for item, tokens in ahead(windows, encode, seats):
        found.append((item, tokens))
        if killed.calls and killed.process.poll() is None:
            killed.process.kill()
            killed.process.wait()
    assert killed.calls and [item for item, _ in found] == [item for item, _ in want]
    assert all(same(one, other) for (_, one), (_, other) in zip(found, want, strict=True))
    assert threads_left() == 0


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """Also where that is killed."""
    program = (
        "import os, time; from ftbert.text.seats import ProcessSeat; made = ProcessSeat();"
        "print(made.process.pid, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "the process goes on"
        time.sleep(0.02)


def test_it_needs_no_torch() -> None:
    program = "import sys, ftbert.text.token_worker; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


@given(gpus=st.floats(1e3, 1e8), here=st.floats(1e3, 1e8), process=st.floats(1e3, 1e7), cores=st.integers(1, 256))
def test_processes_that_pay(gpus: float, here: float, process: float, cores: int) -> None:
    number = processes_that_pay(gpus, here, process, cores)
    assert 0 <= number <= cores
    if number:
        assert number * process > here  # faster than it was
        assert (number - 1) * process < 1.1 * gpus  # none that nobody waits for
    assert not processes_that_pay(gpus, here, process, cores - 1) or number  # a core more never ends them


def test_processes_of_two_gpus() -> None:
    """The rates of docs/several_gpus.md: 24 cores, of which 22 are free."""
    assert processes_that_pay(5.1e6, 3.3e6, 0.6e6, 22) == 10
    assert processes_that_pay(5.1e6, 3.3e6, 0.6e6, 6) == 0  # no faster than the threads
    assert processes_that_pay(5.1e6, 3.3e6, 0.6e6, 7) == 7


class TimedSeat(ProcessSeat):
    """A seat whose process is at work at a speed that a test gives."""

    process_speed = 0.0

    def __init__(self) -> None:
        self.seconds, self.tokens_made, self.calls = 0.0, 0, 0

    def work(self) -> None:
        self.calls, self.seconds, self.tokens_made = 4, 1.0, int(self.process_speed)

    def hang_up(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Call:
    """A call whose clock a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 2, cores: int = 24) -> None:
        monkeypatch.setattr(balance, "cores", lambda: SimpleNamespace(number=cores))
        monkeypatch.setattr(balance, "ProcessSeat", TimedSeat)
        monkeypatch.setattr(balance, "find_spec", lambda _: None)
        monkeypatch.delenv("FTBERT_TOKENIZER", raising=False)
        self.replicas = [SimpleNamespace(device=torch.device("cuda", place)) for place in range(gpus)]
        self.seats, self.time = Seats(4), 0.0
        self.balance = Balance(self, self.seats, lambda: self.time)  # type: ignore[arg-type]

    def use(self, pairs: bool = False, wordpiece: bool = True) -> Call:
        self.seats._all[0].used = (SimpleNamespace(is_wordpiece=wordpiece), pairs)  # type: ignore[assignment]
        return self

    def run(self, seconds: float, tokens: float, busy: float, waited: float) -> list[str]:
        """So long: tokens a second, and the shares of it that each GPU computed and that nothing was tokenised. What
        was said."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(10):
                self.time += seconds / 10
                self.seats.waited += waited * seconds / 10
                self.balance.computed(int(tokens * seconds / 10), busy * len(self.replicas) * seconds / 10)
                self.balance.look()
        return [str(one.message) for one in said]

    @property
    def processes(self) -> list[TimedSeat]:
        return [seat for seat in self.seats._all if isinstance(seat, TimedSeat)]


def test_who_waits_is_told_once_with_both_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch).use()
    said = call.run(2, 3_000_000, busy=0.6, waited=0.9)
    assert said == [
        "cuda:0, cuda:1 wait for the tokenizer: it gives 3,000,000 tokens/s, and 5,000,000 could be computed; from here "
        "on other processes tokenise too, as far as that pays; `pip install 'nanotoken>=0.1,<0.2'` tokenises a hundred "
        "times faster"
    ]
    call.balance = Balance(call, call.seats, lambda: call.time)  # type: ignore[arg-type]  # the next call of this model
    assert call.run(2, 3_000_000, busy=0.6, waited=0.9) == []


@pytest.mark.parametrize(
    ("seconds", "busy", "waited"),
    [(0.4, 0.6, 0.9), (2, 0.95, 0.9), (2, 0.6, 0.3)],
    ids=["a short call", "busy GPUs", "what reads the texts is slow"],
)
def test_nothing_is_told(monkeypatch: pytest.MonkeyPatch, seconds: float, busy: float, waited: float) -> None:
    call = Call(monkeypatch).use()
    assert call.run(seconds, 3_000_000, busy, waited) == [] and not call.processes


@pytest.mark.parametrize("why", ["pairs", "no WordPiece", "installed", "left out"])
def test_nanotoken_is_no_remedy(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    call = Call(monkeypatch, gpus=1, cores=2).use(pairs=why == "pairs", wordpiece=why != "no WordPiece")
    if why == "installed":
        monkeypatch.setattr(balance, "find_spec", lambda _: SimpleNamespace())
    if why == "left out":
        monkeypatch.setenv("FTBERT_TOKENIZER", "tokenizers")
    (said,) = call.run(2, 1000, busy=0.5, waited=0.9)
    assert said == (
        "cuda:0 waits for the tokenizer: it gives 1,000 tokens/s, and 2,000 could be computed; more than 2 cores, or "
        "fewer GPUs for this process, would fit better"
    )
    assert not call.processes  # a core that launches, and one that tokenises


@pytest.mark.parametrize(("speed", "number"), [(0.6e6, 10), (5e6, 2), (0.1e6, 1)], ids=["ten", "two", "no more"])
def test_as_many_processes_as_pay(monkeypatch: pytest.MonkeyPatch, speed: float, number: int) -> None:
    """The first one's speed says how many."""
    monkeypatch.setattr(TimedSeat, "process_speed", speed)
    call = Call(monkeypatch).use()
    call.run(1, 3_000_000, busy=0.6, waited=0.9)
    assert len(call.processes) == 1 and not call.seats._only_processes
    call.processes[0].work()
    call.run(1, 3_000_000, busy=0.6, waited=0.9)
    assert len(call.processes) == number and not call.seats._only_processes
    for process in call.processes:
        process.work()
    call.run(1, 3_000_000, busy=0.6, waited=0.9)
    assert len(call.processes) == number and call.seats._only_processes == (number > 1)
    call.seats.close()
    assert all(process.closed for process in call.processes)


def test_a_system_without_room_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch).use()

    def full() -> Seat:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(balance, "ProcessSeat", full)
    assert call.run(2, 3_000_000, busy=0.6, waited=0.9) and not call.processes


def test_a_program_that_embeds_python_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch).use()
    monkeypatch.setattr(sys, "executable", "/usr/sbin/uwsgi")
    call.run(2, 3_000_000, busy=0.6, waited=0.9)
    assert not call.processes


def test_encode_goes_on_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, of a model that is taken for one on a GPU: the same vectors, and no process is left."""
    monkeypatch.setattr(torch.ops.ftbert, "pooling", stub_pooling, raising=False)
    model = StubModel(write_tokenizer(tmp_path / "model"))
    texts = [" ".join(random.Random(place).choices(WORDS[4:], k=20)) for place in range(6000)]
    want = model.encode(texts, max_tokens=2000)
    made: list[ProcessSeat] = []

    def waiting(model: Any, seats: Seats) -> Any:
        look: Callable[[], None] = lambda: None  # noqa: E731
        made.extend(ProcessSeat() for _ in range(2))
        for seat in made:
            seats.add(seat)
        seats.leave_this_process()
        return SimpleNamespace(computed=lambda *_: None, look=look)

    monkeypatch.setattr(computing, "Balance", waiting)
    work = embedding(model, text_options(model, max_tokens=2000))
    assert np.array_equal(computing.compute_all(model, texts, work, False), want)
    assert sum(seat.calls for seat in made) > 10
    assert all(seat.process.poll() is not None for seat in made) and threads_left() == 0


def test_a_fork_that_holds_the_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process does not see the end then; it is killed."""
    monkeypatch.setattr(seats_module, "_SECONDS_TO_END", 0.1)
    made = ProcessSeat()
    assert made.tokens(fast("words", tmp_path), ["a"], 9, "right") is not None
    held = os.dup(made._connection.fileno())  # type: ignore[union-attr]
    try:
        made.close()
        assert made.process.poll() is not None and made.process.poll() < 0  # type: ignore[operator]
    finally:
        os.close(held)
