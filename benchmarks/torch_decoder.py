"""A peer: Llama in plain PyTorch with a cache of fixed size; a step is compiled layer by layer and recorded as one CUDA
graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Cache = tuple[Tensor, Tensor]  # keys, values [batch, kv_heads, positions, head_size]


class TorchDecoder:
    """Of a transformers LlamaForCausalLM, whose weights become views of those that are stacked here."""

    def __init__(self, model: Any, compiled: bool) -> None:
        config = model.config
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.eps, base = config.rms_norm_eps, model.model
        self.words, self.norm, self.head = base.embed_tokens.weight, base.norm.weight, model.lm_head.weight
        self.layers = [self._weights(one) for one in base.layers]
        places = torch.arange(config.max_position_embeddings, device=self.words.device)
        self.cos, self.sin = (table[0] for table in base.rotary_emb(self.words, places[None]))

        def prepare(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
            # With tuning, products of one row become reductions that read weights at the memory's speed.
            options: Any = {"coordinate_descent_tuning": True}
            return torch.compile(call, fullgraph=True, dynamic=False, options=options) if compiled else call

        self.step_layer, self.step_logits = prepare(self.layer), prepare(self.logits)

    @staticmethod
    def _weights(layer: Any) -> list[Tensor]:
        def stacked(*modules: Any) -> Tensor:
            whole = torch.cat([one.weight for one in modules])
            for one, part in zip(modules, whole.split([one.weight.shape[0] for one in modules]), strict=True):
                one.weight.data = part
            return whole

        attention, mlp = layer.self_attn, layer.mlp
        return [
            layer.input_layernorm.weight, stacked(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj.weight, layer.post_attention_layernorm.weight, stacked(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight,
        ]  # fmt: skip

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * weight

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = heads.chunk(2, -1)
        return heads * cos + torch.cat([-high, low], -1) * sin

    def layer(
        self, x: Tensor, weights: list[Tensor], cache: Cache, at: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """x [batch, n, hidden] at positions `at` [n]; mask [positions]: of keys that one token reads. None: a prompt
        from position 0."""
        norm1, qkv, out, norm2, gate_up, down = weights
        batch, n, _ = x.shape
        heads = F.linear(self._normed(x, norm1), qkv).view(batch, n, -1, self.size).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
        for there, new in zip(cache, (k, v), strict=True):
            there.index_copy_(2, at, new)
        if mask is None:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            grouped = q.view(batch, self.kv_heads, -1, self.size)
            scores = (grouped @ cache[0].transpose(2, 3)).float() * self.size**-0.5
            likely = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(x.dtype)
            found = (likely @ cache[1]).view(batch, self.heads, 1, self.size)
        x = x + F.linear(found.transpose(1, 2).reshape(batch, n, -1), out)
        gate, up = F.linear(self._normed(x, norm2), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self._normed(x[:, -1], self.norm), self.head)


class TorchTexts:
    """A batch of texts of one length, which grow by their most likely tokens."""

    def __init__(self, decoder: TorchDecoder, batch: int, positions: int) -> None:
        self.decoder, device = decoder, decoder.words.device
        shape = (batch, decoder.kv_heads, positions, decoder.size)
        # Apart: of views of one tensor, which are written, a compiled layer would take the whole.
        self.cache: list[Cache] = [
            (decoder.words.new_zeros(shape), decoder.words.new_zeros(shape)) for _ in decoder.layers
        ]
        self.places = torch.arange(positions, device=device)
        self.next = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)  # of the next token
        self.found = decoder.words.new_zeros(batch, decoder.head.shape[0])
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.graph = self._recorded()

    @torch.inference_mode()
    def start(self, ids: Tensor) -> None:
        """ids [batch, n]: a prompt each."""
        places = self.places[: ids.shape[1]]
        self._forward(ids, places, None)
        self.at.fill_(ids.shape[1])

    @torch.inference_mode()
    def step(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        self._forward(self.next, self.at, self.places <= self.at)
        self.at += 1

    def _forward(self, ids: Tensor, places: Tensor, mask: Tensor | None) -> None:
        decoder = self.decoder
        layer, logits = (decoder.layer, decoder.logits) if mask is None else (decoder.step_layer, decoder.step_logits)
        x = F.embedding(ids, decoder.words)
        cos, sin = decoder.cos[places], decoder.sin[places]
        for weights, cache in zip(decoder.layers, self.cache, strict=True):
            x = layer(x, weights, cache, places, cos, sin, mask)
        self.found.copy_(logits(x))
        self.next.copy_(self.found.argmax(-1, keepdim=True))

    @torch.inference_mode()
    def _recorded(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph
