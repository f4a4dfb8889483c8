"""BatchNorm with an addend and an activation in two passes over memory: act(BatchNorm(x) + addend).

The backward pass of ReLU reads a bit an element, in place of the output or of what it was made of.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from ftbert.norm.batch_norm_ops import ACTIVATIONS, dense, in_order, is_channels_last

# torch.jit.script reads Optional[...], not `| None`, where annotations are strings.
# ruff: noqa: UP045


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cpu" or (x.device.type == "cuda" and x.dtype != torch.float64)


def _needs_gradient(t: Optional[Tensor]) -> bool:
    return t is not None and t.requires_grad and torch.is_grad_enabled()


def _composed(
    x: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    batches: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    addend: Optional[Tensor],
    training: bool,
    momentum: Optional[float],
    eps: float,
    activation: str,
) -> Tensor:
    """For devices and dtypes without kernels of ours."""
    share = 0.0 if momentum is None else momentum
    if batches is not None:
        batches.add_(1)
        if momentum is None:
            share = 1.0 / float(batches)
    mean, var = running_mean, running_var
    widened = x.dtype == torch.float64  # PyTorch's own takes no narrower vectors on a GPU
    if widened:
        if weight is not None:
            weight = weight.double()
        if bias is not None:
            bias = bias.double()
        if mean is not None and var is not None:
            mean, var = mean.double(), var.double()
    z = functional.batch_norm(x, mean, var, weight, bias, training, share, eps)
    written = widened and training
    if written and running_mean is not None and running_var is not None and mean is not None and var is not None:
        running_mean.copy_(mean)
        running_var.copy_(var)
    if addend is not None:
        z = z + addend
    if activation == "relu":
        return torch.relu(z)
    return functional.silu(z) if activation == "silu" else z


def _batch_norm(
    x: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    batches: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    addend: Optional[Tensor],
    training: bool,
    momentum: Optional[float],
    eps: float,
    activation: str,
) -> Tensor:
    """batches: num_batches_tracked, where this batch is counted. momentum None: 1 / batches."""
    if x.dim() < 2:
        raise ValueError(f"expected [batch, channels, ...], got {x.dim()}D input")
    if training and x.numel() == x.size(1) and x.numel() > 0:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    if activation not in ("none", "relu", "silu"):
        raise ValueError(f"activation: expected none, relu or silu, got {activation}")
    if not _has_kernels(x):
        return _composed(
            x, running_mean, running_var, batches, weight, bias, addend, training, momentum, eps, activation
        )
    x = dense(x)
    if addend is not None:
        if addend.shape != x.shape:  # else the order of x means nothing for it
            raise ValueError(f"addend: expected x's shape {x.size()}, got {addend.size()}")
        addend = in_order(addend, is_channels_last(x))
    mask = _needs_gradient(x) or _needs_gradient(addend) or _needs_gradient(weight) or _needs_gradient(bias)
    if training:
        mean, var = torch.ops.ftbert.batch_norm_statistics(x.detach(), running_mean, running_var, batches, momentum)
    else:
        if running_mean is None or running_var is None:
            raise ValueError("running_mean and running_var: expected both where training is False, got None")
        mean, var = running_mean, running_var
    return torch.ops.ftbert.batch_norm_apply(  # type: ignore[no-any-return]
        x, addend, weight, bias, mean, var, eps, activation, training, mask
    )[0]


def fused_batch_norm(
    x: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    addend: Optional[Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "relu",
) -> Tensor:
    """`activation(torch.nn.functional.batch_norm(x, ...) + addend)`, in x's dtype and memory format.

    x: [batch, channels, ...], also [tokens, channels]; contiguous, channels_last and [batch, length, channels] moved to
    rank 3 are read where they lie, any other is copied. addend: of x's shape and dtype. Vectors are [channels], in
    float32 or x's dtype; statistics and sums are float32 (float64 for float64). activation: "relu", "silu" or "none".
    training: with the batch's statistics, which go into running_mean and running_var where they are given.

    float16, bfloat16 and float32 have kernels on GPUs; float64 and CPUs compose torch's functions. Autocast changes
    nothing, as it does with torch's batch_norm. ValueError as torch's for one value a channel in training; RuntimeError
    for other shapes, dtypes and devices than these, and where gradients are differentiated again.
    """
    return _batch_norm(x, running_mean, running_var, None, weight, bias, addend, training, momentum, eps, activation)


class _FusedBatchNorm(_NormBase):
    """The parameters and buffers of torch's BatchNorm, by the same names. Not a subclass of it: what converts those
    (SyncBatchNorm, fusion with convolutions) would lose the addend and the activation."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected none, relu or silu, got {activation!r}")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor, addend: Optional[Tensor] = None) -> Tensor:
        self._check_input_dim(x)
        counts = self.training and self.track_running_stats
        reads = counts or not self.training
        return _batch_norm(
            x,
            self.running_mean if reads else None,
            self.running_var if reads else None,
            self.num_batches_tracked if counts else None,
            self.weight,
            self.bias,
            addend,
            self.training or self.running_mean is None,
            self.momentum,
            self.eps,
            self.activation,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FusedBatchNorm1d(_FusedBatchNorm):
    """`activation(nn.BatchNorm1d(...)(x) + addend)`: x and addend [tokens, channels] or [batch, channels, length].

    Arguments, parameters, running statistics and errors are torch's; activation: "relu", "silu" or "none". momentum
    None counts all batches alike, on the GPU without waiting for it. See `fused_batch_norm`.
    """

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class FusedBatchNorm2d(_FusedBatchNorm):
    """As FusedBatchNorm1d, of [batch, channels, height, width], contiguous or channels_last."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class FusedBatchNorm3d(_FusedBatchNorm):
    """As FusedBatchNorm1d, of [batch, channels, depth, height, width], contiguous or channels_last_3d."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim


def masked_relu(x: Tensor) -> Tensor:
    """`torch.relu(x)` that keeps a bit an element for its gradient: 1/32 of the memory of an output in float32.

    Worth it where nothing else keeps the output. x: any shape; float32, float16 or bfloat16, others as `torch.relu`.
    """
    if not (_has_kernels(x) and _needs_gradient(x)):
        return torch.relu(x)
    return torch.ops.ftbert.relu_with_mask(dense(x))[0]  # type: ignore[no-any-return]
