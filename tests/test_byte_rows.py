"""Rows of uint8 with a scale and a zero point each, which int8 products read."""

from __future__ import annotations

import pytest
import torch
from byte_row_parts import numbers, parts
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbert._library import load_library

load_library()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9), cols=st.integers(1, 300), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    shift=st.sampled_from([-5.0, 0.0, 1.0, 40.0]), smoothed=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_a_number_is_off_by_half_a_step(
    rows: int, cols: int, size: float, shift: float, smoothed: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, cols, generator=generator) + shift) * size
    smooth = torch.rand(cols, generator=generator) + 0.5 if smoothed else None
    made = torch.ops.ftbert.byte_rows(x, smooth)
    assert made.shape == (rows, (cols + 8 + 63) // 64 * 64)
    wanted = x if smooth is None else x * smooth
    stored, scale, zero = parts(made, cols)
    least, most = wanted.clamp_max(0).amin(1), wanted.clamp_min(0).amax(1)
    assert torch.allclose(scale, (most.double() - least).float() / 255, rtol=1e-6)
    assert ((zero >= 0) & (zero <= 255)).all()
    # The ends of a row are whole steps but for the zero point's rounding.
    assert ((numbers(made, cols).double() - wanted).abs() <= scale[:, None] * 1.001).all()
    inner = (wanted > least[:, None] + scale[:, None]) & (wanted < most[:, None] - scale[:, None])
    assert ((numbers(made, cols).double() - wanted).abs() <= scale[:, None] * 0.501)[inner].all()
    if rows:
        assert torch.equal(torch.ops.ftbert.byte_rows(x[:1], smooth)[0], made[0])  # whatever its neighbours


def test_zeros_are_exact() -> None:
    x = torch.randn(5, 100)
    x[1] = 0
    x[:, 7] = 0
    back = numbers(torch.ops.ftbert.byte_rows(x), 100)
    assert (back[1] == 0).all() and (back[:, 7] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    x = torch.randn(5, 100)
    clean = torch.ops.ftbert.byte_rows(x)
    x[2, 33] = bad
    made = torch.ops.ftbert.byte_rows(x)
    assert parts(made, 100)[1].isnan().tolist() == [False, False, True, False, False]
    assert torch.equal(made[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("keep_sum", [False, True])
def test_norms_store_them_beside_the_stream(kind: str, keep_sum: bool) -> None:
    x, input, gamma, smooth = torch.randn(7, 130), torch.randn(7, 130), torch.randn(130), torch.rand(130) + 0.5
    norm = (gamma, None, 1e-5, kind)
    copy = torch.empty(7, 192, dtype=torch.uint8)
    out, total = torch.ops.ftbert.add_bias_input_layernorm(
        x, None, input, *norm, sum=keep_sum, copy=copy, copy_scale=smooth
    )
    wanted, _ = torch.ops.ftbert.add_bias_input_layernorm(x, None, input, *norm, sum=False)
    assert torch.equal(copy, torch.ops.ftbert.byte_rows(wanted, smooth))
    assert torch.equal(total, x + input) if keep_sum else torch.equal(out, wanted)


def test_embeddings_store_them_beside_the_stream() -> None:
    word, ids, gamma = torch.randn(50, 130), torch.arange(9), torch.randn(130)
    copy = torch.empty(9, 192, dtype=torch.uint8)
    arguments = (ids, None, None, torch.zeros(9, dtype=torch.int32), word, None, None, gamma, None, 1e-5)
    out = torch.ops.ftbert.embeddings_layernorm(*arguments, copy=copy)
    assert torch.equal(out, torch.ops.ftbert.embeddings_layernorm(*arguments))
    assert torch.equal(copy, torch.ops.ftbert.byte_rows(out))


@given(st.integers(1, 70), st.integers(1, 40), st.booleans(), st.sampled_from([1.0, 0.3]))
@settings(deadline=None, max_examples=40)
def test_embeddings_of_a_table_in_int8(cols: int, vocab: int, with_others: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(cols + vocab)
    stored = torch.randint(-127, 128, (vocab, cols), generator=generator, dtype=torch.int8)
    scales = torch.rand(vocab, generator=generator) + 0.1
    ids = torch.randint(0, vocab, (9,), generator=generator)
    others = torch.randn(3, cols, generator=generator) if with_others else None
    behind = (torch.zeros(9, dtype=torch.int32), stored, others, others, None, None, 1e-5)
    got = torch.ops.ftbert.embeddings_layernorm(ids, None, None, *behind, scale=scale, word_scale=scales)
    want = stored.double()[ids] * scales.double()[ids, None] * scale + (0 if others is None else 2 * others[0].double())
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)


def test_what_it_refuses() -> None:
    table = torch.zeros(3, 8, dtype=torch.int8)
    for word, scale, words in (
        (table, torch.ones(2), r"word_scale: expected contiguous Float \[1\] or \[3\]"),
        (table.float(), torch.ones(3), "word: expected Char with scales of rows"),
        (table, None, "word: expected"),
    ):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.ftbert.embeddings_layernorm(
                torch.zeros(1, dtype=torch.int64), None, None, torch.zeros(1, dtype=torch.int32), word, None, None, None,
                None, 1e-5, word_scale=scale,
            )  # fmt: skip
    with pytest.raises(RuntimeError, match="smooth: expected contiguous Float \\[8\\]"):
        torch.ops.ftbert.byte_rows(torch.randn(2, 8), torch.ones(7))
    with pytest.raises(RuntimeError, match="x: expected (float32 on the CPU|contiguous Byte)"):
        torch.ops.ftbert.byte_rows(torch.randn(2, 8).half())
