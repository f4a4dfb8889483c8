"""Comparisons of results, and their gates."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor

# GCC vectorises no loop that AddressSanitizer checks: a norm on the CPU then adds a row in one float, not in one a lane.
ONE_SUM = 16 if "asan" in os.environ.get("LD_PRELOAD", "") else 1


def in_dtype(reference: Any, dtype: torch.dtype) -> Any:
    """A copy of transformers' model as from_pretrained(dtype=...) makes it: frequencies of rotary positions stay float32."""
    made = copy.deepcopy(reference).to(dtype)
    for name, buffer in reference.named_buffers():
        if "inv_freq" in name:
            made.get_buffer(name).data = buffer.clone()
    return made


def assert_no_worse(mine: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """The gate of 16 bits: the rms error at most 1.25 times that of transformers in the same dtype."""
    our_error, their_error = ((x.float() - exact).pow(2).mean().sqrt() for x in (mine, theirs))
    assert our_error <= 1.25 * their_error + 1e-7, f"rms error {our_error:.3g}, transformers' {their_error:.3g}"


def assert_close(got: Tensor, expected: Tensor, atol: float, rtol: float = 0.0, what: str = "result") -> None:
    """|got - expected| <= atol + rtol * |expected| everywhere; NaN only where expected, infinity nowhere."""
    assert not expected.isinf().any(), f"{what}: infinity is expected, which equals itself"
    one, other = (x.detach().double().cpu() for x in (got, expected))
    torch.testing.assert_close(one, other, atol=atol, rtol=rtol, equal_nan=True, msg=lambda words: f"{what}: {words}")


def assert_same(ours: Any, theirs: Any) -> None:
    """Float32 vectors, arrays or tensors, of two libraries."""
    assert ours.shape == theirs.shape
    if len(theirs):
        assert float(abs(ours - theirs).max()) < 5e-6 * max(1, float(abs(theirs).max()))
