"""What the benchmark of the training norms computes: operands, the bytes that must move, and PyTorch's own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5
COLUMNS = (256, 384, 512, 768, 1024, 2048, 3072, 4096, 6144, 8192, 32768)
ROWS, ROWS_OF_THE_WIDEST = 16384, 4096
IMAGES = (64, 256, 56, 56)  # batch, channels, height, width: a ResNet's second stage
SMALL_IMAGES = (16, 32, 112, 112)
Function = Callable[..., Any]  # inputs of a call -> its output, or several


@dataclass(frozen=True)
class Operands:
    """Of one call: inputs, those that want a gradient say so, and the gradients of its outputs."""

    inputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    def with_own_buffers(self) -> Operands:
        """The same values and leaves, other running statistics: a call writes them, which another's graph may hold."""
        inputs = tuple(value if value.requires_grad else value.clone() for value in self.inputs)
        return Operands(inputs, self.gradients)

    def backward(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of the inputs; the graph stays, so that a recording of this can be repeated."""
        wanted = [value for value in self.inputs if value.requires_grad]
        return torch.autograd.grad(outputs, wanted, self.gradients, retain_graph=True)


@dataclass(frozen=True)
class Case:
    """op: a name in EAGER. tensor: bytes of x. passes: as many tensors like x must move, forward and backward."""

    op: str
    shape: tuple[int, ...]
    make: Callable[[], Operands]
    tensor: int
    passes: tuple[float, float]

    @property
    def name(self) -> str:
        return f"{self.op} {'x'.join(map(str, self.shape))}"


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return layer_norm(total, weight, bias), total


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight), total


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return F.batch_norm(x, mean, var, weight, bias, True, 0.1, EPS)


def batch_norm_relu(x: Tensor, *parameters: Tensor) -> Tensor:
    return batch_norm(x, *parameters).relu()


def batch_norm_add_relu(x: Tensor, addend: Tensor, *parameters: Tensor) -> Tensor:
    return (batch_norm(x, *parameters) + addend).relu()


EAGER: dict[str, Function] = {
    function.__name__: function
    for function in (
        layer_norm, rms_norm, add_layer_norm, add_rms_norm, batch_norm, batch_norm_relu, batch_norm_add_relu
    )
}  # fmt: skip
ROW_OPS, BATCH_OPS = tuple(EAGER)[:4], tuple(EAGER)[4:]


def row_cases(
    ops: Sequence[str], columns: Sequence[int], device: torch.device, dtype: torch.dtype, rows: int | None = None
) -> Iterator[Case]:
    """LayerNorm and RMSNorm of [rows, columns]. A norm reads x and writes y; its backward pass reads dy and what was
    kept of the row, and writes dx. With a residual that is read too, the sum is written, and its gradient read."""
    for op in ops:
        added = op.startswith("add")
        for n in columns:
            shape = (rows or (ROWS_OF_THE_WIDEST if n >= 8192 else ROWS), n)
            make = partial(_row_operands, shape, added, op.endswith("layer_norm"), device, dtype)
            yield Case(op, shape, make, shape[0] * n * dtype.itemsize, (4, 4) if added else (2, 3))


def _row_operands(
    shape: tuple[int, int], added: bool, has_bias: bool, device: torch.device, dtype: torch.dtype
) -> Operands:
    random = partial(torch.randn, device=device, dtype=dtype)
    values = [random(shape) for _ in range(1 + added)]
    vectors = [random(shape[1]).mul_(0.1).add_(1), *([random(shape[1]).mul_(0.1)] if has_bias else [])]
    inputs = tuple(value.requires_grad_() for value in (*values, *vectors))
    return Operands(inputs, tuple(random(shape) for _ in range(1 + added)))


def batch_cases(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...] = IMAGES, ops: Sequence[str] = BATCH_OPS
) -> Iterator[Case]:
    """Channels last. Statistics need x before y can be written, so it is read twice; the backward pass reads dy and x
    twice likewise, and writes dx and the addend's gradient."""
    for op in ops:
        added = "add" in op
        size = torch.Size(shape).numel() * dtype.itemsize
        yield Case(op, shape, partial(_batch_operands, shape, added, device, dtype), size, (3 + added, 5 + added))


def _batch_operands(shape: tuple[int, ...], added: bool, device: torch.device, dtype: torch.dtype) -> Operands:
    def random() -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)

    vectors = torch.randn(2, shape[1], device=device).mul_(0.1)
    values = [*(random() for _ in range(1 + added)), vectors[0] + 1, vectors[1].clone()]
    statistics = torch.zeros(shape[1], device=device), torch.ones(shape[1], device=device)
    return Operands((*(value.requires_grad_() for value in values), *statistics), (random(),))


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def compare(op: str, function: Function, operands: Operands) -> float:
    """The largest relative error, in the sense of norms, of outputs and gradients against float64. ValueError: more
    than rounding explains."""
    wide = Operands(
        tuple(value.detach().double().requires_grad_(value.requires_grad) for value in operands.inputs),
        tuple(value.double() for value in operands.gradients),
    )
    pairs = []
    for way, of in ((EAGER[op], wide), (function, operands)):
        outputs = as_tuple(way(*of.inputs))
        pairs.append((*outputs, *of.backward(outputs)))
    # Rounded to the type twice or three times: Liger rounds the normalised row, too, and eager PyTorch the sum.
    eps = torch.finfo(operands.inputs[0].dtype).eps
    limits = [4 * eps + 1e-5] * len(pairs[0])
    for i in range(len(operands.gradients), len(limits) if "relu" in op else 0):
        limits[i] += eps**0.5  # gradients where a rounding decides the sign that ReLU sees
    worst = 0.0
    for want, got, limit in zip(*pairs, limits, strict=True):
        error = float((got.detach().double() - want.detach()).norm() / want.detach().norm())
        if not error <= limit:
            raise ValueError(f"differs from float64 by {error:.1e}, allowed {limit:.1e}")
        worst = max(worst, error)
    return worst
