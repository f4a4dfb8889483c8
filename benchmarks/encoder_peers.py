"""Peers of text encoders beyond BERT's kin: DeBERTa's, T5's and ESM-2's. Packages that torch does not bring are found
where Python looks for modules: wheels on PYTHONPATH do for a machine without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from modern_peers import Angles, rotated
from peers import Batch, Call, CompiledGraphs, Peer, RecordedPacked, WholeForward, mark_static
from torch import Tensor

TRAINED_MASKS = 0.15 * 0.8  # share of mask tokens that ESM's embeddings are scaled for


class DisentangledFlash(RecordedPacked):
    """DeBERTa's encoder by disentangled-flash's Triton kernels on packed tokens, replayed from a CUDA graph; embeddings
    are a look-up and a norm, as in v3."""

    name = "disentangled-flash, packed, CUDA graph"
    families: ClassVar[Sequence[str]] = ("deberta-v2",)
    needs = "disentangled_flash"

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        from disentangled_flash import PackedSequenceInfo, enable_deberta_inference

        c = self.model.config
        if c.position_biased_input or c.type_vocab_size > 0 or getattr(c, "conv_kernel_size", 0):
            raise RuntimeError("embeddings with positions or types, and convolutions, are not written here")
        self.info = PackedSequenceInfo
        theirs = self.model.encoder
        enable_deberta_inference(self.model, backend="triton")
        if self.model.encoder is theirs:
            raise RuntimeError("disentangled-flash left transformers' encoder in place")

    def forward(self, ids: Tensor, positions: Tensor, cu: Tensor, longest: int) -> Tensor:  # noqa: ARG002
        e = self.model.embeddings
        x = e.LayerNorm(e.word_embeddings(ids))
        made = self.model.encoder.forward_packed(x, cu, longest, packed_info=self.of_batch, output_hidden_states=False)
        return made.last_hidden_state  # type: ignore[no-any-return]

    def prepare(self, batch: Batch) -> Call:
        ends = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
        self.of_batch = self.info(tuple(ends), tuple(batch.lengths), max(batch.lengths))
        return super().prepare(batch)


class CompiledT5(CompiledGraphs):
    """transformers' encoder compiled as a whole for each size, in a CUDA graph."""

    name = "torch.compile, CUDA graph"
    families: ClassVar[Sequence[str]] = ("t5",)
    on_request = False


class PackedEsm(RecordedPacked):
    """What an expert writes for ESM-2: tokens packed, q, k and v in one product, rotated in float32, FlashAttention
    varlen, torch.compile over a layer for all sizes at once, replayed from a CUDA graph."""

    name = "packed PyTorch, CUDA graph"
    families: ClassVar[Sequence[str]] = ("esm",)
    dynamic = True

    def setup(self, reference: Any) -> None:
        super().setup(reference)
        c = self.model.config
        self.heads, self.eps = c.num_attention_heads, c.layer_norm_eps
        self.head_size = c.hidden_size // c.num_attention_heads
        self.layers = [self.of_layer(layer) for layer in self.model.encoder.layer]
        mark_static(self.layers)
        if not self.compiles_each_point:
            self.compile()

    def make_parts(self, compiled: Callable[[Any], Any]) -> None:
        self.embed, self.run = compiled(self.embeddings), compiled(self.layer)
        self.last = compiled(self.model.encoder.emb_layer_norm_after)

    def of_layer(self, layer: Any) -> list[Tensor]:
        at = layer.attention
        heads = (at.self.query, at.self.key, at.self.value)
        modules = (at.LayerNorm, at.output.dense, layer.LayerNorm, layer.intermediate.dense, layer.output.dense)
        qkv = [torch.cat([h.weight for h in heads]), torch.cat([h.bias for h in heads])]
        return [*qkv, *(tensor for module in modules for tensor in (module.weight, module.bias))]

    def embeddings(self, ids: Tensor, sequence: Tensor, cu: Tensor) -> Tensor:
        """Mask tokens are 0, and the others of their sequence larger (token dropout)."""
        e = self.model.embeddings
        masks = ids == e.mask_token_id
        count = torch.zeros(cu.shape[0] - 1, device=ids.device).index_add(0, sequence, masks.float())
        factor = (1 - TRAINED_MASKS) / (1 - count / cu.diff())
        x: Tensor = e.word_embeddings(ids)
        return (x * (factor[sequence] * ~masks)[:, None]).to(x.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, False, False)[0]
        return out

    def layer(self, x: Tensor, weights: list[Tensor], cos: Tensor, sin: Tensor, cu: Tensor, longest: int) -> Tensor:
        qkv, qkv_bias, gamma, beta, out, out_bias, next_gamma, next_beta, up, up_bias, down, down_bias = weights
        linear, norm, hidden = self.linear, torch.nn.functional.layer_norm, x.shape[1:]
        parts = linear(norm(x, hidden, gamma, beta, self.eps), qkv, qkv_bias).view(-1, 3, self.heads, self.head_size)
        q, k, v = parts.unbind(1)
        angles = Angles(cos, sin)
        x = x + linear(self.attend(rotated(q, angles), rotated(k, angles), v, cu, longest).flatten(1), out, out_bias)
        inner = torch.nn.functional.gelu(linear(norm(x, hidden, next_gamma, next_beta, self.eps), up, up_bias))
        return x + linear(inner, down, down_bias)

    def forward(self, ids: Tensor, positions: Tensor, cu: Tensor, longest: int) -> Tensor:  # noqa: ARG002
        cos, sin = self.angles
        x: Tensor = self.embed(ids, self.sequence, cu)
        for weights in self.layers:
            x = self.run(x, weights, cos, sin, cu, longest)
        return self.last(x)  # type: ignore[no-any-return]

    def prepare(self, batch: Batch) -> Call:
        positions = torch.cat([torch.arange(n, device=self.device) for n in batch.lengths])
        of_each = torch.tensor(batch.lengths, device=self.device)
        self.sequence = torch.arange(len(batch.lengths), device=self.device).repeat_interleave(of_each)
        like = torch.empty(1, device=self.device, dtype=self.angle_dtype)
        cos, sin = self.model.rotary_embeddings(like, positions[None])
        self.angles = Angles(cos[0, :, None], sin[0, :, None])
        call, kept = super().prepare(batch), (self.sequence, self.angles)

        def with_places(_: Any = kept) -> Tensor:  # the graph reads their memory
            return call()

        return with_places


class PackedEsmWhole(WholeForward, PackedEsm):
    """The same, compiled as a whole for each point."""

    name = "packed PyTorch compiled as a whole, CUDA graph"


ENCODER_PEERS: tuple[type[Peer], ...] = (DisentangledFlash, CompiledT5, PackedEsm, PackedEsmWhole)
