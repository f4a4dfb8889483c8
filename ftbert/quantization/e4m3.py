"""Matrices and activations in E4M3, the 8-bit float type of matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftbert.dtypes import FP8
from ftbert.quantization.observe import Observed
from ftbert.quantization.stored_type import Limits, QuantizedMatrix, StoredType

LARGEST = 448.0

_DAMPING = 0.01  # of the gram's mean diagonal: few rows say little about most directions
_BLOCK = 128  # columns, behind which the others follow in one product


def to_e4m3(values: Tensor, scale: Tensor | float) -> Tensor:
    """values / scale in E4M3; past its largest number that number, where torch's conversion gives NaN."""
    return (values / scale).clamp_(-LARGEST, LARGEST).to(FP8)


def rounded(values: Tensor, scale: Tensor | float) -> Tensor:
    """`values` as they come back from E4M3."""
    return to_e4m3(values, scale).to(values.dtype) * scale


def best_scale(rows: Tensor, largest: float) -> float:
    """The scale with which `rows` come back with the least square error. largest: of all that there are, which at that
    scale may be past E4M3's largest number, or far below."""
    if not largest:
        return 1.0
    tried = [largest * 2 ** (step / 4) / LARGEST for step in range(4, -25, -1)]
    losses = [(rounded(rows, scale) - rows).square().sum() for scale in tried]
    return tried[int(torch.stack(losses).argmin())]


def quantize_rows(matrix: Tensor, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float [n, k] -> E4M3 [n, k] and scales float32 [n]: each row's largest number becomes 448; of zeros it is 1.

    gram: x x^T over rows x that the matrix multiplies, float [k, k], on its device. With it columns are rounded one
    after another, and what each loses the later ones make up for as well as they can on these rows (GPTQ, Frantar et
    al. 2022). Without, each number becomes the nearest.
    """
    largest = matrix.float().abs().amax(1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = matrix.float() / scale[:, None]
    return to_e4m3(scaled if gram is None else _compensated(scaled, gram), 1.0), scale


def _compensated(matrix: Tensor, gram: Tensor) -> Tensor:
    """Numbers of E4M3. With U the upper Cholesky factor of the gram's inverse, what column i loses is spread over the
    columns j > i in proportion to U[i, j] / U[i, i]."""
    damped = gram.double()
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    share = (upper / upper.diagonal()[:, None]).float()
    rest = matrix.T.contiguous()  # a column is a row of it
    for start in range(0, len(rest), _BLOCK):
        block, behind = rest[start : start + _BLOCK], rest[start + _BLOCK :]
        lost = torch.empty_like(block)
        for i, column in enumerate(block):
            nearest = to_e4m3(column, 1.0).float()
            torch.sub(column, nearest, out=lost[i])
            column.copy_(nearest)
            block[i + 1 :].addr_(share[start + i, start + i + 1 : start + len(block)], lost[i], alpha=-1)
        behind -= share[start : start + len(block), start + len(block) :].T @ lost
    return rest.T


@dataclass(frozen=True)
class E4m3Matrix(QuantizedMatrix):
    """input_scale: of what it multiplies, one for all tokens."""

    input_scale: float

    @classmethod
    def of(cls, matrix: Tensor, seen: Observed) -> E4m3Matrix:
        weight, scale = quantize_rows(matrix, seen.gram)
        return cls(weight.cpu(), scale.cpu(), best_scale(seen.sample, seen.largest))

    def reads(self, given: Tensor) -> Tensor:
        return rounded(given, self.input_scale)

    def of_input(self) -> dict[str, Tensor]:
        return {"scale": torch.tensor([self.input_scale])}


E4M3 = StoredType("e4m3", E4m3Matrix.of, None, needs_gram=True, limits=Limits(0.997, 0.99), instead="fp16 or bf16")
