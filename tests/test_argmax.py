"""The id of the largest logit: the first of equal ones, -1 where it is no finite number."""

from __future__ import annotations

import pytest
import torch
from conftest import Place, places_here
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbert._library import load_library

load_library()
ops = torch.ops.ftbert

HERE = places_here()
INFINITY, NAN = float("inf"), float("nan")
# On both sides of: a pack of 16 bytes, a block's threads, a part of the CPU's, all loads of a block and of a cluster.
SIZES = [1, 2, 3, 7, 8, 9, 64, 511, 512, 513, 2048, 4095, 4096, 4097, 8200, 16384, 32000, 32001, 65536, 70000]


def expected(logits: torch.Tensor) -> list[int]:
    """The definition; torch's argmax may take any of equal ones."""
    logits = logits.cpu().double()
    most, vocab = logits.amax(-1, keepdim=True), logits.shape[1]  # NaN where there is one
    first = torch.arange(vocab).where(logits == most, vocab).amin(-1)
    return list(first.where(most[:, 0].isfinite(), -1).tolist())


def ids_of(logits: torch.Tensor) -> list[int]:
    got = ops.argmax(logits)
    assert got.dtype == torch.int64 and got.device == logits.device and got.shape == logits.shape[:1]
    return list(got.tolist())


@pytest.mark.parametrize("vocab", SIZES)
def test_the_first_of_equal_ones(place: Place, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    many = torch.randint(-3, 4, (5, vocab), generator=generator)  # the largest stands in many places
    one = torch.randn(5, vocab, generator=generator)
    negative = -one.abs() - 1
    for logits in (many, one, negative, torch.zeros(2, vocab), torch.zeros(2, vocab) * -1):
        given_ = logits.to(place.dtype).to(place.device)
        assert ids_of(given_) == expected(given_)


@pytest.mark.parametrize("vocab", [5, 512, 4104, 32000, 66666])
def test_the_largest_may_stand_anywhere(place: Place, vocab: int) -> None:
    places = torch.randint(vocab, (40,), generator=torch.Generator().manual_seed(0))
    places[0], places[1] = 0, vocab - 1
    logits = torch.full((40, vocab), -7.0, dtype=place.dtype, device=place.device)
    logits[torch.arange(40), places.to(place.device)] = -6.5
    assert ids_of(logits) == places.tolist()


@settings(max_examples=60, deadline=None)
@given(
    place=st.sampled_from(HERE), rows=st.integers(1, 300), vocab=st.one_of(st.integers(1, 600), st.sampled_from([4096, 8192, 12345])), seed=st.integers(0, 999),
    odd=st.lists(st.tuples(st.floats(0, 0.999), st.floats(0, 0.999), st.sampled_from([NAN, -NAN, INFINITY, -INFINITY, 0.0, -0.0, 4.0])), max_size=12),
    low=st.sampled_from([-INFINITY, -2.0, -0.0]),
)  # fmt: skip
def test_what_is_no_number(place: Place, rows: int, vocab: int, seed: int, odd: list[tuple[float, float, float]], low: float) -> None:
    """Any rows among which some hold NaN, of either sign, infinities, zeros of either sign; some nothing above `low`."""
    rows = min(rows, 300_000 // vocab)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (rows, vocab), generator=generator).float()
    logits[torch.rand(rows, generator=generator) < 0.3] = low
    for row, column, value in odd:
        logits[int(row * rows), int(column * vocab)] = value
    given_ = logits.to(place.dtype).to(place.device)
    assert ids_of(given_) == expected(given_)


@pytest.mark.parametrize("vocab", [1, 9, 4096, 32000, 50001])
def test_one_wrong_number_is_found_wherever_it_stands(place: Place, vocab: int) -> None:
    columns = sorted({0, 1, 7, 8, vocab // 2, vocab - 2, vocab - 1} & set(range(vocab)))
    for wrong, allowed in ((NAN, False), (-NAN, False), (INFINITY, False), (-INFINITY, vocab > 1)):
        logits = torch.full((len(columns), vocab), 2.0, dtype=place.dtype, device=place.device)
        for row, column in enumerate(columns):
            logits[row, column] = wrong
        want = [(1 if column == 0 else 0) if allowed else -1 for column in columns]
        assert ids_of(logits) == want, wrong
    nothing = torch.full((3, vocab), -INFINITY, dtype=place.dtype, device=place.device)
    assert ids_of(nothing) == [-1] * 3


def test_the_ends_of_a_dtype(place: Place) -> None:
    """The largest and the smallest finite numbers, and subnormal ones, are numbers as others."""
    facts = torch.finfo(place.dtype)
    values = [facts.min, -facts.tiny, -facts.smallest_normal / 4, 0.0, facts.smallest_normal / 4, facts.tiny, 1.0, facts.max]
    row = torch.tensor(values, dtype=torch.float64).to(place.dtype).to(place.device)
    for count in range(1, len(values) + 1):
        assert ids_of(row[:count][None].contiguous()) == [count - 1]
        assert ids_of(row[:count].flip(0)[None].contiguous()) == [0]


def test_rows_that_begin_anywhere(place: Place) -> None:
    """Whose address is no multiple of 16 bytes."""
    memory = torch.randn(3 * 4096 + 3, generator=torch.Generator().manual_seed(1)).to(place.dtype).to(place.device)
    for first in range(4):
        logits = memory[first : first + 3 * 4096].view(3, 4096)
        assert ids_of(logits) == expected(logits)


def test_many_rows(place: Place) -> None:
    logits = torch.randn(70_000, 3, generator=torch.Generator().manual_seed(2)).to(place.dtype).to(place.device)
    assert ids_of(logits) == expected(logits)
    assert ops.argmax(logits[:0]).shape == (0,)


def test_what_is_refused(device: str) -> None:
    logits = torch.zeros(4, 6, device=device)
    for wrong, words in (
        (logits.t(), "logits: expected a contiguous tensor of rank 2"), (logits[:, :3], "contiguous"), (logits[0], "of rank 2"),
        (logits.double(), "expected float32, float16 or bfloat16, got Double"), (logits[:, :0].contiguous(), "vocab: expected 1 to"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            ops.argmax(wrong)
