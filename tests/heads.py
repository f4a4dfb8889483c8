"""Heads of queries and keys as a norm and a rotation leave them, in float64; and what the ops of these are asked."""

from __future__ import annotations

from typing import Any

import reference
import torch
from torch import Tensor

# kind, has a beta, offset, rounds before gamma
NORMS = [("none", False, 0.0, False), ("layer", True, 0.0, False), ("layer", False, 0.0, False)]
NORMS += [("rms", False, 0.0, False), ("rms", False, 1.0, False), ("rms", False, 0.0, True)]
Norm = tuple[str, bool, float, bool]



def frequencies(dims: int, theta: float = 1e4) -> Tensor:
    return theta ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [rows, heads, size] by angles [rows, dims/2], float64"""
    dims = 2 * angles.shape[1]
    head, rest = x[..., :dims], x[..., dims:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    pairs = a * c - b * s, b * c + a * s
    return torch.cat([torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1), rest], dim=-1)


def normed(x: Tensor, norm: Norm, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind, _, offset, rounds = norm
    if kind == "none":
        return x
    if kind == "layer":
        return reference.layernorm(x, gamma.double(), 0.0 if beta is None else beta.double(), 1e-6)
    y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return (y.to(dtype).double() if rounds else y) * (gamma.double() + offset)


def norm_arguments(norm: Norm, weights: list[Tensor]) -> list[Any]:
    """Of the ops, from `kind` on; weights: gamma and beta of queries, then of keys."""
    kind, has_beta, offset, rounds = norm
    given = [one if kind != "none" and (has_beta or i % 2 == 0) else None for i, one in enumerate(weights)]
    return ["rms" if kind == "none" else kind, *given, 1e-6, offset, "before_gamma" if rounds else "once"]


def as_rotary(
    qkv: Tensor, heads: int, kv_heads: int, angles: Tensor, interleaved: bool, norm: Norm, weights: list[Tensor]
) -> Tensor:
    """qkv float64; angles [rows, dims/2]"""
    rows, size = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    made = []
    for i, x in ((0, q), (2, k)):
        beta = weights[i + 1] if norm[1] else None
        y = normed(x.view(rows, x.shape[1] // size, size), norm, weights[i], beta, weights[i].dtype)
        made.append(turned(y, angles, interleaved).flatten(1))
    return torch.cat([*made, v], dim=1)
