"""Matrices and activations in E4M3, the 8-bit float type of matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0

_DAMPING = 0.01  # of the gram's mean diagonal: few rows say little about most directions
_BLOCK = 128  # columns, behind which the others follow in one product


def to_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale in E4M3; past its largest number that number, where torch's conversion gives NaN."""
    return (values / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def rounded(values: Tensor, scale: Tensor) -> Tensor:
    """`values` as they come back from E4M3."""
    return to_e4m3(values, scale).to(values.dtype) * scale


def best_scale(rows: Tensor, largest: float) -> float:
    """The scale with which `rows` come back with the least square error. largest: of all that there are, which at that
    scale may be past E4M3's largest number, or far below."""
    if not largest:
        return 1.0
    tried = [largest * 2 ** (step / 4) / LARGEST for step in range(4, -25, -1)]
    return min(tried, key=lambda scale: float((rounded(rows, torch.tensor(scale)) - rows).square().sum()))


def quantize_rows(matrix: Tensor, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float [n, k] -> E4M3 [n, k] and scales float32 [n]: each row's largest number becomes 448; of zeros it is 1.

    gram: x x^T over rows x that the matrix multiplies, float [k, k]. With it columns are rounded one after
    another, and what each loses the later ones make up for as well as they can on these rows (GPTQ, Frantar et al.
    2022). Without, each number becomes the nearest.
    """
    largest = matrix.float().abs().amax(1)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = matrix.float() / scale[:, None]
    return to_e4m3(scaled if gram is None else _compensated(scaled, gram), torch.tensor(1.0)), scale


def _compensated(rest: Tensor, gram: Tensor) -> Tensor:
    """Numbers of E4M3. With U the upper Cholesky factor of the gram's inverse, what column i loses is spread over the
    columns j > i in proportion to U[i, j] / U[i, i]."""
    rest, one = rest.clone(), torch.tensor(1.0)
    damped = gram.double()
    damped.diagonal().add_(_DAMPING * damped.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    for start in range(0, rest.shape[1], _BLOCK):
        end = min(start + _BLOCK, rest.shape[1])
        lost = torch.empty(rest.shape[0], end - start)
        for i in range(start, end):
            column = rounded(rest[:, i], one)
            lost[:, i - start] = (rest[:, i] - column) / upper[i, i]
            rest[:, i] = column
            rest[:, i + 1 : end] -= lost[:, i - start, None] * upper[i, i + 1 : end]
        rest[:, end:] -= lost @ upper[start:end, end:]
    return rest
