"""Peers of modern encoders: ModernBERT's and Qwen3's layers, packed; compiled layer by layer for all sizes at once and
rotated in float32, or compiled as a whole for each size and rotated in the run's type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from peers import Batch, Call, Peer, RecordedPacked, WholeForward, mark_static
from torch import Tensor

SDPA = torch.nn.attention.SDPBackend


class Angles(NamedTuple):
    """Of all tokens, [tokens, 1, head_size], for half-split pairs, in the type that rotates."""

    cos: Tensor
    sin: Tensor


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """x [tokens, heads, head_size]. With angles in float as transformers' ModernBERT does."""
    wide = x.to(angles.cos.dtype)
    left, right = wide.chunk(2, -1)
    return (wide * angles.cos + torch.cat([-right, left], -1) * angles.sin).to(x.dtype)


class PackedModern(RecordedPacked):
    """Tokens packed, q, k, v and gate, up in one product each, FlashAttention varlen with windows, causal masks and
    grouped heads, torch.compile over a layer, replayed from a CUDA graph; compiled once for every size."""

    name = "packed PyTorch, CUDA graph"
    dynamic = True
    families: ClassVar[Sequence[str]] = ("modernbert", "qwen3")
    cudnn: ClassVar[bool] = False  # for the layers without a window of a full batch

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        c = self.model.config
        self.causal = c.model_type == "qwen3"
        self.heads, self.kv_heads = c.num_attention_heads, getattr(c, "num_key_value_heads", c.num_attention_heads)
        self.head_size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.eps = c.rms_norm_eps if self.causal else c.norm_eps
        of_layer = self.of_qwen3 if self.causal else self.of_modernbert
        self.layers = [of_layer(one, f"layers.{i}") for i, one in enumerate(self.model.layers)]
        mark_static(self.layers)
        self.layer_types = list(c.layer_types)
        self.window = c.sliding_window if not self.causal else -1
        if not self.compiles_each_point:
            self.compile()

    def of_modernbert(self, layer: Any, name: str) -> list[Any]:
        first, at, mlp = getattr(layer.attn_norm, "weight", None), layer.attn, layer.mlp
        return [
            first, self.matrix(at.Wqkv.weight, f"{name}.attn.Wqkv"), None, None,
            self.matrix(at.Wo.weight, f"{name}.attn.Wo"), layer.mlp_norm.weight,
            self.matrix(mlp.Wi.weight, f"{name}.mlp.Wi"), self.matrix(mlp.Wo.weight, f"{name}.mlp.Wo"),
        ]  # fmt: skip

    def of_qwen3(self, layer: Any, name: str) -> list[Any]:
        at, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([at.q_proj.weight, at.k_proj.weight, at.v_proj.weight])
        inner = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return [
            layer.input_layernorm.weight, self.matrix(qkv, f"{name}.self_attn.q_proj"), at.q_norm.weight,
            at.k_norm.weight, self.matrix(at.o_proj.weight, f"{name}.self_attn.o_proj"),
            layer.post_attention_layernorm.weight, self.matrix(inner, f"{name}.mlp.gate_proj"),
            self.matrix(mlp.down_proj.weight, f"{name}.mlp.down_proj"),
        ]  # fmt: skip

    def make_parts(self, compiled: Callable[[Any], Any]) -> None:
        self.embed, self.run = compiled(self.embeddings), compiled(self.layer)
        self.last = compiled(lambda x: self.norm(x, self.final_weight))

    @property
    def final_weight(self) -> Tensor:
        weight: Tensor = self.model.norm.weight if self.causal else self.model.final_norm.weight
        return weight

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        if self.causal:
            return torch.nn.functional.rms_norm(x, weight.shape, weight, self.eps)
        return torch.nn.functional.layer_norm(x, weight.shape, weight, None, self.eps)

    def embeddings(self, ids: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002
        if self.causal:
            return self.model.embed_tokens(ids)  # type: ignore[no-any-return]
        return self.norm(self.model.embeddings.tok_embeddings(ids), self.model.embeddings.norm.weight)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, window: int) -> Tensor:
        if self.cudnn and window < 0:
            batch = q.shape[0] // longest
            q, k, v = (one.view(batch, longest, -1, self.head_size).transpose(1, 2) for one in (q, k, v))
            with torch.nn.attention.sdpa_kernel(SDPA.CUDNN_ATTENTION):
                sums = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads != self.heads
                )
            return sums.transpose(1, 2).reshape(-1, self.heads, self.head_size)
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, self.causal, False,
            window_size_left=window if window >= 0 else None, window_size_right=window if window >= 0 else None,
        )[0]  # fmt: skip
        return out

    def layer(
        self, x: Tensor, weights: list[Any], cos: Tensor, sin: Tensor, cu: Tensor, longest: int, window: int
    ) -> Tensor:
        first, qkv, q_norm, k_norm, out, second, inner, down = weights
        linear, functional = self.linear, torch.nn.functional
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        parts = linear(self.norm(x, first), qkv, None).view(-1, sum(sizes), self.head_size).split(sizes, 1)
        angles = Angles(cos, sin)
        q, k = rotated(self.norm(parts[0], q_norm), angles), rotated(self.norm(parts[1], k_norm), angles)
        x = x + linear(self.attend(q, k, parts[2], cu, longest, window).flatten(1), out, None)
        gate, up = linear(self.norm(x, second), inner, None).chunk(2, -1)
        return x + linear((functional.silu(gate) if self.causal else functional.gelu(gate)) * up, down, None)

    def forward(self, ids: Tensor, positions: Tensor, cu: Tensor, longest: int) -> Tensor:
        x: Tensor = self.embed(ids, positions)
        for weights, kind in zip(self.layers, self.layer_types, strict=True):
            cos, sin = self.angles[kind]
            x = self.run(x, weights, cos, sin, cu, longest, self.window if kind == "sliding_attention" else -1)
        return self.last(x)  # type: ignore[no-any-return]

    def prepare(self, batch: Batch) -> Call:
        if self.cudnn and len(set(batch.lengths)) > 1:
            raise RuntimeError("cuDNN's attention is for full batches here")
        positions = torch.cat([torch.arange(n, device=self.device) for n in batch.lengths])[None]
        self.angles = {}
        for kind in set(self.layer_types):
            like = torch.empty(1, device=self.device, dtype=self.angle_dtype)
            extra = {} if self.causal else {"layer_type": kind}
            cos, sin = self.model.rotary_emb(like, positions, **extra)
            self.angles[kind] = Angles(cos[0, :, None], sin[0, :, None])
        call, angles = super().prepare(batch), self.angles

        def with_angles(_: Any = angles) -> Tensor:  # the graph reads their memory
            return call()

        return with_angles


class PackedModernCudnn(PackedModern):
    """The same with cuDNN's attention where the batch is full."""

    name = "packed PyTorch, cuDNN attention, CUDA graph"
    cudnn = True


class PackedModernWhole(WholeForward, PackedModern):
    """The same, compiled as a whole for each point."""

    name = "packed PyTorch compiled as a whole, CUDA graph"


MODERN_PEERS: tuple[type[Peer], ...] = (PackedModern, PackedModernCudnn, PackedModernWhole)
