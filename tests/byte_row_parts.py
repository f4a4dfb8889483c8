"""Byte rows (csrc/core/format.h) and what they are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def parts(rows: Tensor, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """bytes [rows, cols], scale [rows], zero [rows]"""
    behind = rows[:, -8:].contiguous()
    assert not rows[:, cols:-8].any()
    return (
        rows[:, :cols],
        behind[:, :4].contiguous().view(torch.float32)[:, 0],
        behind[:, 4:].contiguous().view(torch.int32)[:, 0],
    )


def numbers(rows: Tensor, cols: int) -> Tensor:
    stored, scale, zero = parts(rows, cols)
    return (stored.int() - zero[:, None]) * scale[:, None]


def byte_rows(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """q [m, k] of 0..255, scale and zero [m] -> what the product reads"""
    m, k = q.shape
    rows = torch.zeros(m, (k + 8 + 63) // 64 * 64, dtype=torch.uint8)
    rows[:, :k] = q.to(torch.uint8)
    rows[:, -8:-4] = scale.float()[:, None].contiguous().view(torch.uint8)
    rows[:, -4:] = zero.to(torch.int32)[:, None].contiguous().view(torch.uint8)
    return rows
