"""What the kernels compute, in plain float64 PyTorch, one sequence at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ftbert.checkpoint import activations
from ftbert.pooled_rows import POOLED

FUSED_SIZES = (32, 64, 80, 96, 128, 256)  # of heads that GPUs have fused attention kernels for


def offsets(lengths: list[int], device: str = "cpu") -> Tensor:
    """[batch] -> cu_seqlens int32 [batch+1]"""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def layernorm(x: Tensor, gamma: Tensor, beta: Tensor | float, eps: float) -> Tensor:
    """x [rows, cols], float64"""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * gamma + beta


def rmsnorm(x: Tensor, gamma: Tensor, beta: Tensor | float, eps: float, offset: float = 0) -> Tensor:
    """x [rows, cols], float64"""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (gamma + offset) + beta


def activation(x: Tensor, name: str) -> Tensor:
    """name: any spelling of it."""
    name = activations()[name]
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    if name == "silu":
        return x / (1 + torch.exp(-x))
    return {"relu": torch.relu, "tanh": torch.tanh, "none": lambda y: y}[name](x)


def gate(x: Tensor, name: str) -> Tensor:
    """[rows, 2 * cols], columns of gate and up in turns -> [rows, cols]"""
    return activation(x[:, ::2], name) * x[:, 1::2]


def attention(
    qkv: Tensor,
    lengths: list[int],
    heads: int,
    biases: list[Tensor] | None = None,
    kv_heads: int | None = None,
    scale: float | None = None,
    left: int = -1,
    right: int = -1,
    soft_cap: float = 0,
    positions: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """qkv [tokens, (heads + 2*kv_heads) * head_size] -> [tokens, heads * head_size], float64; biases: of each sequence,
    what is added to its scores; left, right: keys before and after a query that it sees, -1: all; soft_cap: 0: none;
    positions: keys and queries [heads, head_size, stride], and their rows of distances -reach to reach"""
    kv_heads = heads if kv_heads is None else kv_heads
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    outputs = []
    for i, part in enumerate(qkv.double().split(lengths)):
        q, k, v = (
            x.view(-1, x.shape[1] // size, size).transpose(0, 1)
            for x in part.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
        )
        k, v = (x.repeat_interleave(heads // kv_heads, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2)
        if positions is not None:
            keys, queries, rows = positions
            reach, at = len(rows) // 2, torch.arange(len(part), device=qkv.device)
            row = rows[(at - at[:, None]).clamp(-reach, reach) + reach].long().expand_as(scores)
            scores = scores + (q @ keys.double()).gather(2, row)
            scores = scores + (k @ queries.double()).gather(2, row.transpose(1, 2)).transpose(1, 2)
        scores = scores * (1 / math.sqrt(size) if scale is None else scale)
        scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
        places = torch.arange(len(part), device=qkv.device)
        distance = places - places[:, None]
        unseen = (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
        scores = (scores if biases is None else scores + biases[i]).masked_fill(unseen, -math.inf)
        outputs.append((torch.softmax(scores, dim=-1) @ v).transpose(0, 1).reshape(-1, heads * size))
    return torch.cat(outputs) if outputs else qkv.new_zeros((0, heads * size), dtype=torch.float64)


def pooling(hidden: Tensor, lengths: list[int], mode: str, normalize: bool) -> Tensor:
    """[tokens, hidden] -> [batch, hidden], float64"""
    rows = []
    for part in hidden.double().split(lengths):
        if len(part) == 0:
            rows.append(torch.zeros_like(hidden[:1].double().new_zeros(hidden.shape[1])))
            continue
        row = POOLED[mode](part, torch.arange(1.0, len(part) + 1)[:, None])
        rows.append(torch.nn.functional.normalize(row, dim=0) if normalize else row)
    return torch.stack(rows) if rows else hidden.new_zeros((0, hidden.shape[1]), dtype=torch.float64)
