"""Who computes training norms: ours, PyTorch, torch.compile, Liger, quack, apex. A peer is a table of functions by op.
One whose package cannot be imported is words that say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

import torch
from machine import attempt
from norm_cases import EAGER, EPS, Function
from torch import Tensor

Functions = Mapping[str, Function]
PLAIN, EFFICIENT, TORCH, COMPILED = "ftbert", "ftbert, memory-efficient", "torch", "torch.compile"
PACKAGES = ("triton", "liger-kernel", "quack-kernels", "apex")


def ours(memory_efficient: bool) -> Functions:
    from ftbert import norm

    def batch_norm(x: Tensor, *rest: Tensor, activation: str, added: bool) -> Tensor:
        addend, (weight, bias, mean, var) = (rest[0], rest[1:]) if added else (None, rest)
        return norm.fused_batch_norm(  # type: ignore[no-any-return]
            x, mean, var, weight, bias, addend=addend, training=True, momentum=0.1, eps=EPS, activation=activation
        )

    how: dict[str, Any] = {"eps": EPS, "memory_efficient": memory_efficient}
    rows: dict[str, Function] = {
        "layer_norm": lambda x, w, b: norm.fused_layer_norm_affine(x, w, b, w.shape, **how),
        "rms_norm": lambda x, w: norm.fused_rms_norm_affine(x, w, w.shape, **how),
        "add_layer_norm": lambda x, r, w, b: norm.fused_add_layer_norm(x, r, w, b, **how),
        "add_rms_norm": lambda x, r, w: norm.fused_add_rms_norm(x, r, w, **how),
    }
    if memory_efficient:
        return rows
    return rows | {
        "batch_norm": partial(batch_norm, activation="none", added=False),
        "batch_norm_relu": partial(batch_norm, activation="relu", added=False),
        "batch_norm_add_relu": partial(batch_norm, activation="relu", added=True),
    }


def compiled() -> Functions:
    from torch._functorch import config

    def compile(op: str) -> Function:
        torch._dynamo.reset()  # shapes of other cases would count as recompilations
        return torch.compile(EAGER[op], dynamic=False, fullgraph=True)

    # A graph that is kept for another backward pass cannot lend its buffers to this one.
    config.donated_buffer = False
    return _Lazy({op: partial(compile, op) for op in EAGER})


def liger() -> Functions:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_layer_norm, liger_rms_norm

    # In place it would overwrite dy, which the next replay reads; the bytes are the same.
    return {
        "layer_norm": lambda x, w, b: liger_layer_norm(x, w, b, EPS),
        "rms_norm": lambda x, w: liger_rms_norm(x, w, EPS, in_place=False),
        "add_rms_norm": lambda x, r, w: liger_fused_add_rms_norm(x, r, w, EPS, in_place=False),
    }


def quack() -> Functions:
    from quack import rmsnorm
    from quack.rmsnorm import _rmsnorm_fwd, layernorm_bwd  # its LayerNorm has no autograd function (0.6.5)

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            y, (rstd, mean) = torch.empty_like(x), torch.empty(2, len(x), device=x.device)
            _rmsnorm_fwd(x, w, y, b, rstd, mean, None, None, EPS, True)
            ctx.save_for_backward(x, w, rstd, mean)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            x, w, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, w, dy, rstd, mean)  # type: ignore[no-any-return]

    return {
        "layer_norm": LayerNorm.apply,
        "rms_norm": lambda x, w: rmsnorm(x, w, eps=EPS),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=EPS, prenorm=True),
    }


def apex(memory_efficient: bool) -> Functions:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    return {
        "layer_norm": lambda x, w, b: fused_layer_norm_affine(x, w, b, w.shape, EPS, memory_efficient),
        "rms_norm": lambda x, w: fused_rms_norm_affine(x, w, w.shape, EPS, memory_efficient),
    }


MAKERS: dict[str, Callable[[], Functions]] = {
    PLAIN: partial(ours, False), EFFICIENT: partial(ours, True), TORCH: lambda: EAGER, COMPILED: compiled,
    "Liger": liger, "quack": quack, "apex": partial(apex, False), "apex, memory-efficient": partial(apex, True),
}  # fmt: skip


def available(names: list[str] | None = None) -> tuple[dict[str, Functions], dict[str, str]]:
    """Peers by name, and why others are not among them."""
    found = {name: attempt(make) for name, make in MAKERS.items() if not names or name in names}
    there = {name: functions for name, functions in found.items() if not isinstance(functions, str)}
    return there, {name: why for name, why in found.items() if isinstance(why, str)}


def versions() -> dict[str, str | None]:
    """Of the peers' packages."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


class _Lazy(dict[str, Function]):
    """Functions that are made when they are asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Function]]) -> None:
        super().__init__()
        self._makers = makers

    def __contains__(self, op: object) -> bool:
        return op in self._makers

    def __missing__(self, op: str) -> Function:
        return self._makers[op]()
