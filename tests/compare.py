"""Comparison whose failure says where and how much."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_no_worse(mine: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """The gate of 16 bits: the rms error at most 1.25 times that of transformers in the same dtype."""
    our_error, their_error = ((x.float() - exact).pow(2).mean().sqrt() for x in (mine, theirs))
    assert our_error <= 1.25 * their_error + 1e-7, f"rms error {our_error:.3g}, transformers' {their_error:.3g}"


def assert_close(got: Tensor, expected: Tensor, atol: float, rtol: float = 0.0, what: str = "result") -> None:
    """|got - expected| <= atol + rtol * |expected| everywhere; NaN only where expected."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.numel() == 0:
        return
    x, y = got.detach().double().cpu(), expected.detach().double().cpu()
    error = (x - y).abs()
    limit = atol + rtol * y.abs()
    bad = ~(error <= limit) & ~(x.isnan() & y.isnan())
    if not bad.any():
        return
    excess = torch.where(bad, (error / limit.clamp_min(1e-300)).nan_to_num(float("inf")), torch.zeros_like(error))
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    first = tuple(int(i) for i in bad.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(bad.sum())} of {bad.numel()} elements differ; worst at {worst}: got {x[worst].item():.9g}, "
        f"expected {y[worst].item():.9g}, |difference| {error[worst].item():.3g} > {limit[worst].item():.3g}; "
        f"first at {first}"
    )
