"""Norms of training over more than 2^31 elements: on a GPU alone, with 40 GB left."""

from __future__ import annotations

import pytest
import torch
from conftest import have_gpu
from training_norms import BF16, F16, random

from ftbert import norm


@pytest.fixture(autouse=True)
def room() -> None:
    if not have_gpu() or torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("no GPU with 40 GB left")


def test_rows() -> None:
    rows, cols = (1 << 31) // 1024 + 3, 1024
    x = torch.randn(rows, cols, device="cuda", dtype=BF16).requires_grad_()
    y = norm.fused_layer_norm(x, cols)
    (grad,) = torch.autograd.grad(y, x, y)
    for part in (slice(0, 8), slice(rows - 8, rows)):
        leaf = x.detach()[part].clone().requires_grad_()
        few = norm.fused_layer_norm(leaf, cols)
        assert torch.equal(y[part], few) and torch.equal(grad[part], torch.autograd.grad(few, leaf, few)[0])


@pytest.mark.parametrize("layout", ["last", "contiguous"])
def test_batch_norm(layout: str) -> None:
    """16 channels, whose rows repeat: statistics and results are those of one repetition."""
    part, dy_part = (random(16, 16, 32, 32, device="cuda", dtype=F16, seed=seed) for seed in (1, 2))
    copies = 2**31 // part.numel() + 8
    memory = torch.channels_last if layout == "last" else torch.contiguous_format
    x, dy = (t.to(memory_format=memory).repeat(copies, 1, 1, 1).to(memory_format=memory) for t in (part, dy_part))
    assert x.numel() > 2**31
    x.requires_grad_()
    y = norm.fused_batch_norm(x, None, None, training=True)
    y.backward(dy)
    small = part.clone().requires_grad_()
    want = norm.fused_batch_norm(small, None, None, training=True)
    want.backward(dy_part)
    assert x.grad is not None and small.grad is not None
    for at in (slice(0, 16), slice(-16, None)):
        torch.testing.assert_close(y[at], want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(x.grad[at], small.grad, rtol=5e-3, atol=5e-3)
