"""Tokens, budgets, packed batches and tokenising ahead, without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from stub_model import threads_left

from ftbert.text import Batch, Tokens, Window, batches_of, by_token_budget, joined, pack, tokens_of
from ftbert.text.ahead import ahead, calls_of, in_turn


def ragged(count: int, most: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, rng.integers(0, most)).tolist() for _ in range(count)]


def letters(texts: Sequence[Any]) -> Tokens:
    return tokens_of([[ord(letter) for letter in text] for text in texts])


@pytest.mark.parametrize(("max_tokens", "batch_size"), [(1, None), (50, None), (50, 3), (10**9, 7), (10**9, None)])
def test_the_budget_is_kept_and_filled(max_tokens: int, batch_size: int | None) -> None:
    lengths = np.random.default_rng(0).integers(0, 40, 500)
    order = np.argsort(-lengths, kind="stable")
    runs = list(by_token_budget(order, lengths, max_tokens, batch_size))
    assert np.array_equal(np.concatenate(runs), order)
    for run, after in zip(runs, [*runs[1:], None], strict=True):
        total = lengths[run].sum()
        assert total <= max_tokens or len(run) == 1
        assert batch_size is None or len(run) <= batch_size
        if after is not None:  # no room for the next one
            assert total + lengths[after[0]] > max_tokens or len(run) == batch_size
    assert list(by_token_budget(order[:0], lengths, 8)) == []


def test_pack_takes_the_rows_in_their_order() -> None:
    rows, types = ragged(60, 9), [[row % 2] * len(ids) for row, ids in enumerate(ragged(60, 9))]
    tokens = tokens_of(rows, types)
    chosen = np.random.default_rng(1).permutation(60)[:25]
    batch = pack(tokens, chosen)
    assert batch.ids.tolist() == [token for row in chosen for token in rows[row]]
    assert batch.types is not None
    assert batch.types.tolist() == [kind for row in chosen for kind in types[row]]
    assert np.diff(batch.cu_seqlens).tolist() == [len(rows[row]) for row in chosen]
    assert (batch.longest, batch.ids.dtype, batch.cu_seqlens.dtype) == (max(len(rows[row]) for row in chosen), np.int64, np.int32)


def test_joined_tokens_are_those_of_all_parts() -> None:
    rows = ragged(40, 6)
    parts = [tokens_of(rows[:7]), tokens_of([]), tokens_of(rows[7:30], [[1] * len(row) for row in rows[7:30]]), tokens_of(rows[30:])]
    whole = joined(parts)
    assert [row.tolist() for row in whole.rows()] == rows
    assert whole.types is not None
    assert whole.types.sum() == sum(map(len, rows[7:30]))
    assert len(joined([])) == 0


def test_batches_know_their_window() -> None:
    windows = [("a", tokens_of(ragged(30, 9))), ("b", tokens_of([])), ("c", tokens_of(ragged(5, 9, 1)))]
    pieces = list(batches_of(windows, 40))
    heads = [piece for piece in pieces if isinstance(piece, Window)]
    assert [(head.item, head.texts) for head in heads] == [("a", 30), ("b", 0), ("c", 5)]
    assert sum(head.batches for head in heads) == sum(isinstance(piece, Batch) for piece in pieces)


def test_ahead_equals_in_turn() -> None:
    windows = [(number, ["ab" * (number % 5), "c"] * (number * 37)) for number in range(12)]
    for (one, left), (other, right) in zip(ahead(windows, letters), in_turn(windows, letters), strict=True):
        assert one == other
        assert [row.tolist() for row in left.rows()] == [row.tolist() for row in right.rows()]
    assert threads_left() == 0


@pytest.mark.parametrize("where", ["source", "tokeniser"])
def test_an_error_comes_behind_the_windows_before_it(where: str) -> None:
    def source() -> Iterator[tuple[int, list[str]]]:
        yield 0, ["a"] * 1000
        yield 1, ["b"] * 1000
        if where == "source":
            raise KeyError("broken")
        yield 2, ["x"] * 1000

    def encode(texts: Sequence[Any]) -> Tokens:
        if texts[0] == "x":
            raise KeyError("broken")
        return letters(texts)

    seen = []
    with pytest.raises(KeyError, match="broken"):
        for item, _ in ahead(source(), encode):
            seen.append(item)  # noqa: PERF402 - the items before the error are the point
    assert seen == [0, 1]


def test_what_waits_is_bounded() -> None:
    drawn, release, closed = [], threading.Event(), threading.Event()

    def source() -> Iterator[tuple[int, list[str]]]:
        try:
            for number in range(1000):
                drawn.append(number)
                yield number, ["a"]
        finally:
            closed.set()

    arriving = ahead(source(), letters)
    next(arriving)
    release.wait(0.2)
    assert len(drawn) <= 4  # one computed, one packed, one waiting, one in hand
    arriving.close()
    assert closed.is_set() and threads_left() == 0


def test_calls_are_short() -> None:
    texts = ["a" * size for size in [10, 100_000, 5, *[100] * 2000]]
    parts = calls_of(texts)
    assert [text for part in parts for text in texts[part]] == texts
    assert all(sum(map(len, texts[part])) <= 1 << 16 or part.stop - part.start == 1 for part in parts)
    assert calls_of([]) == []
