"""What an encoder of our format computes, in plain float64 PyTorch over the padded batch."""

from __future__ import annotations

import math

import torch
from reference import activation, layernorm
from torch import Tensor

from ftbert.checkpoint import AttentionConfig, ModelConfig, NormConfig, RotaryConfig

_QUERIES = 256  # whose scores are there at once


def norm(x: Tensor, config: NormConfig | None, weights: dict[str, Tensor], name: str) -> Tensor:
    if config is None:
        return x
    gamma = weights[name + ".weight"] + config.offset
    if config.kind == "rms":
        return x / (x.pow(2).mean(-1, keepdim=True) + config.eps).sqrt() * gamma + weights.get(name + ".bias", 0.0)
    return layernorm(x, gamma, weights.get(name + ".bias", 0.0), config.eps)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return torch.nn.functional.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))


def turned(x: Tensor, config: RotaryConfig, positions: Tensor) -> Tensor:
    """x [..., seq, head_size], positions [seq]"""
    dims = config.dims or x.shape[-1]
    listed = config.frequencies or [(config.theta or 0) ** (-i / dims) for i in range(0, dims, 2)]
    angles = positions.double()[:, None] * torch.tensor(listed, dtype=torch.float64)
    part, rest = x[..., :dims], x[..., dims:]
    one, other = (part[..., 0::2], part[..., 1::2]) if config.interleaved else part.chunk(2, -1)
    pairs = (one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin())
    made = torch.stack(pairs, -1).flatten(-2) if config.interleaved else torch.cat(pairs, -1)
    return torch.cat((made * config.amplitude, rest), -1)


def visible(config: AttentionConfig, places: Tensor, queries: Tensor) -> Tensor:
    """places [batch, seq], of all tokens; queries: columns -> bool [batch, queries, seq]"""
    distance = places[:, None] - places[:, queries, None]
    left, right = config.window or (None, None)
    right = 0 if config.causal else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    return seen if right is None else seen & (distance <= right)


def attention(config: AttentionConfig, q: Tensor, k: Tensor, v: Tensor, places: Tensor, kept: Tensor, queries: Tensor) -> Tensor:
    """q [batch, heads, queries, head_size], k and v [batch, heads, seq, head_size] -> as q. Some queries at a time, and of
    the keys those that one of them sees."""
    scale = 1 / math.sqrt(config.head_size) if config.scale is None else config.scale
    found = []
    for some, columns in zip(q.split(_QUERIES, 2), queries.split(_QUERIES), strict=True):
        seen = visible(config, places, columns) & kept[:, None]
        keys = seen.any(1).any(0).nonzero()
        near = slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(0, 1)
        scores = some @ k[:, :, near].transpose(2, 3) * scale
        if config.soft_cap:
            scores = config.soft_cap * torch.tanh(scores / config.soft_cap)
        scores = scores.masked_fill(~seen[:, None, :, near], -math.inf)
        found.append(torch.softmax(scores, -1).nan_to_num() @ v[:, :, near])
    return torch.cat(found, 2)


def encode(
    config: ModelConfig, weights: dict[str, Tensor], ids: Tensor, mask: Tensor, types: Tensor | None = None,
    *, windows_of: str = "tokens", rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """ids, mask [batch, seq] -> last hidden state [batch, seq, hidden], 0 at padding. Without a table of relative biases.

    windows_of: kept "tokens", as ours, or "columns", as transformers without flash attention. rows: the columns whose
    state is asked for; the last layer computes these alone."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    kept, columns = mask.bool(), torch.arange(ids.shape[1])
    places = mask.cumsum(1) if windows_of == "tokens" else columns.expand(ids.shape)
    x = weights["embeddings.word"][ids] * config.embedding_scale
    if config.positions.kind == "absolute":
        x = x + weights["embeddings.position"][columns]
    elif config.positions.kind == "from_padding":
        real = (ids != config.padding_id).long()
        x = x + weights["embeddings.position"][real.cumsum(1) * real + config.padding_id]
    if config.token_types:
        x = x + weights["embeddings.token_type"][torch.zeros_like(ids) if types is None else types]
    x = norm(x, config.embedding_norm, weights, "embeddings.norm")
    if config.embedding_projection:
        x = linear(x, weights, "embeddings.projection")
    for depth, layer in enumerate(config.layers, 1):
        name, c, pre = f"layers.{layer.weights_of}.", layer.attention, layer.norm_place == "pre"
        queries = columns if rows is None or depth < config.depth else rows

        def attend(x: Tensor, name: str = name + "attention", c: AttentionConfig = c, queries: Tensor = queries) -> Tensor:
            groups = c.kv_heads or c.heads
            sizes = [c.width, c.kv_width, c.kv_width]
            q, k, v = (
                part.unflatten(-1, (-1, c.head_size)).transpose(1, 2)
                for part in linear(x, weights, name + ".qkv").split(sizes, -1)
            )
            q, k = norm(q[:, :, queries], c.qk_norm, weights, name + ".q_norm"), norm(k, c.qk_norm, weights, name + ".k_norm")
            if c.rotary is not None:
                q, k = turned(q, c.rotary, queries), turned(k, c.rotary, columns)
            k, v = (part.repeat_interleave(c.heads // groups, 1) for part in (k, v))
            found = attention(c, q, k, v, places, kept, queries)
            return linear(found.transpose(1, 2).flatten(2), weights, name + ".out")

        def feed(x: Tensor, name: str = name + "ffn") -> Tensor:
            up = linear(x, weights, name + ".up")
            if layer.ffn.gated:  # noqa: B023
                up = activation(up[..., 0::2], layer.ffn.activation) * up[..., 1::2]  # noqa: B023
            else:
                up = activation(up, layer.ffn.activation)  # noqa: B023
            return linear(up, weights, name + ".down")

        for block, part, own, result in (
            (attend, "attention", layer.attention_norm, layer.attention_result_norm),
            (feed, "ffn", layer.ffn_norm, layer.ffn_result_norm),
        ):
            outer = f"{name}{part}.norm"
            added = block(norm(x, own, weights, outer) if pre else x)
            x = (x[:, queries] if block is attend else x) + norm(added, result, weights, f"{name}{part}.result_norm")
            x = x if pre else norm(x, own, weights, outer)
    return norm(x, config.final_norm, weights, "final_norm") * kept[:, columns if rows is None else rows, None]
