"""Matrices in int8, with a scale for each row, times tokens in uint8, with a scale and a zero point for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftbert.quantization.observe import Observed
from ftbert.quantization.stored_type import Limits, Quantized, QuantizedMatrix, StoredType

LARGEST_INT8 = 127

_FURTHEST = 2.0**20  # that smoothing scales a column up or down


def int8_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float [n, k] -> int8 [n, k] and scales float32 [n]: each row's largest number becomes 127; of zeros it is 1."""
    largest = matrix.float().abs().amax(1)
    scale = torch.where(largest > 0, largest / LARGEST_INT8, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    return (matrix.float() / scale[:, None]).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale


def uint8_tokens(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float [..., k] -> whole numbers 0 to 255 as floats [..., k], scales and zero points [..., 1] that stand for
    (number - zero) * scale: 0 and the least and largest of each row are among them. Not finite: its scale is NaN."""
    low, high = rows.amin(-1, keepdim=True).clamp_max(0), rows.amax(-1, keepdim=True).clamp_min(0)
    scale = high / 255 - low / 255
    divisor = torch.where(scale > 0, scale, 1.0)
    zero = (-low / divisor).round_()
    return (rows / divisor).round_().add_(zero).clamp_(0, 255), scale, zero


def smoothing(matrix: Tensor, most: Tensor) -> Tensor:
    """s [k], with which (x / s) (W s)^T spreads what is hard to store evenly over both (SmoothQuant, Xiao et al. 2023):
    sqrt(most / the column's largest weight), 1 on geometric average. matrix: W [n, k]. most: largest |x| of each column
    [k]; of columns that it is 0 of, s is 1."""
    heaviest = matrix.float().abs().amax(0)
    floor = (heaviest.max() / _FURTHEST).clamp_min(torch.finfo(torch.float32).tiny)
    seen = most > 0
    logs = torch.where(seen, 0.5 * (most.log2() - heaviest.clamp_min(floor).log2()), 0.0)
    logs = torch.where(seen, logs - logs.sum() / seen.sum().clamp_min(1), 0.0)
    return logs.exp2().clamp(1 / _FURTHEST, _FURTHEST)


@dataclass(frozen=True)
class Int8Matrix(QuantizedMatrix):
    """smooth: float32 [k], that the columns of what it multiplies are scaled by before they are stored."""

    smooth: Tensor

    @classmethod
    def of(cls, matrix: Tensor, seen: Observed) -> Int8Matrix:
        s = smoothing(matrix, seen.most)
        weight, scale = int8_rows(matrix.float() * s)
        return cls(weight.cpu(), scale.cpu(), (1 / s).cpu())

    def reads(self, given: Tensor) -> Tensor:
        number, scale, zero = uint8_tokens(given * self.smooth.to(given.device))
        return number.sub_(zero).mul_(scale)

    def of_input(self) -> dict[str, Tensor]:
        return {"smooth": self.smooth}


def int8_table(table: Tensor) -> Quantized:
    """Of a table float [rows, k], whose rows are looked up."""
    return Quantized(*(part.cpu() for part in int8_rows(table)))


INT8 = StoredType(
    "int8", Int8Matrix.of, int8_table, needs_gram=False, limits=Limits(0.999, 0.995), instead="bf16 or fp32"
)
