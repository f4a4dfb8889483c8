"""Matrices and activations in E4M3, the 8-bit float type of matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0


def to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale in E4M3; past its largest number that number, where torch's conversion gives NaN."""
    return (values / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    """`values` as they come back from E4M3."""
    return to_e4m3(values, scale).to(values.dtype) * scale


def quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float [n, k] -> E4M3 [n, k] and scales float32 [n]: each row's largest number becomes 448; of zeros it is 1."""
    largest = matrix.float().abs().amax(1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    return to_e4m3(matrix.float(), scale[:, None]), scale
