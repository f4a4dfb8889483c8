"""What norms of training refuse, and empty tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_calls import valid
from training_norms import leaves, random

from ftbert import norm
from ftbert.norm import FusedBatchNorm1d, FusedBatchNorm2d, fused_batch_norm

OPS = torch.ops.ftbert

WRONG: list[tuple[Callable[..., Any], str]] = [
    (lambda x, w: norm.fused_layer_norm(x, 63), r"x: expected a shape that ends in normalized_shape \[63\], got .*\[3, 64\]"),
    (lambda x, w: norm.fused_layer_norm(x, []), "normalized_shape"),
    (lambda x, w: norm.fused_layer_norm(x, [2, 3, 64]), "normalized_shape"),
    (lambda x, w: norm.fused_rms_norm(x, 64, 0.0), "eps: expected more than 0, got 0"),
    (lambda x, w: norm.fused_rms_norm(x, 64, -1e-5), "eps: expected more than 0"),
    (lambda x, w: norm.fused_rms_norm(x, 64, float("nan")), "eps: expected more than 0"),
    (lambda x, w: norm.fused_rms_norm_affine(x, w[:63], 64), r"weight: expected normalized_shape \[64\], got .*\[63\]"),
    (lambda x, w: norm.fused_layer_norm_affine(x, w, w[:1], 64), "bias: expected normalized_shape"),
    (lambda x, w: norm.fused_layer_norm_affine(x, w.int(), w, 64), "weight: expected float32"),
    (lambda x, w: norm.fused_layer_norm(x.int(), 64), "x: expected float32"),
    (lambda x, w: norm.fused_add_rms_norm(x, x[:2], w), r"residual: expected .*\[3, 64\]"),
    (lambda x, w: norm.fused_layer_norm(x[:, :0], 0), "normalized_shape: expected 1 to"),
    (lambda x, w: norm.fused_layer_norm_affine(x, w.cpu() if x.is_cuda else w.to(torch.complex64), w, 64), "weight: expected"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(WRONG)))
def test_what_is_wrong_is_said(device: str, at: int) -> None:
    wrong, words = WRONG[at]
    with pytest.raises(RuntimeError, match=words):
        wrong(random(3, 64, device=device), torch.ones(64, device=device))


def test_no_rows(device: str) -> None:
    x, w, b = leaves(torch.zeros(0, 3, 64, device=device), torch.ones(64, device=device), torch.ones(64, device=device))
    for efficient in (False, True):
        y = norm.fused_layer_norm_affine(x, w, b, 64, memory_efficient=efficient)
        grads = torch.autograd.grad(y.sum(), (x, w, b))
        assert y.shape == x.shape == grads[0].shape and not grads[1].any() and not grads[2].any()


def test_what_batch_norm_refuses(device: str) -> None:
    x = random(4, 8, 3, 3, device=device, seed=1)
    module = FusedBatchNorm2d(8, device=device)
    with pytest.raises(ValueError, match="expected 4D input"):
        module(x[0])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        FusedBatchNorm1d(8, device=device)(x[:1, :, 0, 0])
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):
        OPS.batch_norm_statistics(x[:1, :, 0, 0])
    with pytest.raises(ValueError, match="addend: expected x's shape"):
        module(x, x[:2])
    with pytest.raises(RuntimeError, match="addend: expected"):
        module(x, x.bfloat16())
    with pytest.raises(RuntimeError, match="running_mean: expected|weight: expected"):
        FusedBatchNorm2d(7, device=device)(x)
    with pytest.raises(RuntimeError, match="weight: expected"):
        fused_batch_norm(x, None, None, torch.ones(8, device=device, dtype=torch.float16), training=True)
    with pytest.raises(RuntimeError, match="eps: expected more than 0"):
        fused_batch_norm(x, None, None, training=True, eps=0.0)
    with pytest.raises(ValueError, match="activation: expected none, relu or silu"):
        fused_batch_norm(x, None, None, training=True, activation="gelu")
    with pytest.raises(ValueError, match="activation: expected none, relu or silu"):
        FusedBatchNorm2d(8, activation="tanh")
    with pytest.raises(ValueError, match="running_mean and running_var"):
        fused_batch_norm(x, None, None)
    with pytest.raises(RuntimeError, match="x: expected"):
        fused_batch_norm(x.long(), None, None, training=True)
    with pytest.raises(RuntimeError, match="mask: expected"):
        OPS.relu_backward_from_mask(x, torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(RuntimeError, match="momentum: expected"):
        OPS.batch_norm_statistics(x, torch.zeros(8, device=device), None, None, None)
    if device == "cuda":
        with pytest.raises(RuntimeError, match="expected .* on cuda"):
            fused_batch_norm(x, None, None, torch.ones(8), training=True)


TRAINING_OPS = ["batch_norm_apply", "batch_norm_backward", "batch_norm_statistics", "norm_backward", "norm_forward", "relu_backward_from_mask", "relu_with_mask"]


@pytest.mark.parametrize("name", TRAINING_OPS)
@pytest.mark.parametrize("kind", ["plain", "with gradients", "meta"])
def test_none_for_a_tensor_is_said(name: str, kind: str) -> None:
    """Of each tensor that the schema does not call optional, and of lists whose length it fixes."""
    op = getattr(OPS, name)
    change = {"plain": lambda t: t, "with gradients": lambda t: t.requires_grad_(t.is_floating_point()), "meta": lambda t: t.to("meta")}[kind]
    given = [change(one) if isinstance(one, torch.Tensor) else one for one in valid(name, "cpu")]
    for at, argument in enumerate(op.default._schema.arguments):
        values = [None] if str(argument.type) == "Tensor" else [] if argument.N is None else [[], [True] * 9]
        for value in values:
            arguments = [*given[:at], value, *given[at + 1 :]]
            if not any(isinstance(one, torch.Tensor) for one in arguments):
                continue  # nobody is asked
            with pytest.raises(RuntimeError, match=f"{argument.name}: expected"):
                op(*arguments)
