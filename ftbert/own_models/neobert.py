"""The model type "neobert" (chandar-lab/NeoBERT), which transformers does not have.

Written after the published code, model.py and rotary.py: RMSNorm before each block, query, key and value of a head
side by side in one matrix, rotary positions in neighbours, gated layers of two thirds of intermediate_size. Hidden
states are in transformers' order, embeddings first and the last one after the norm; the published code gives those of
layers alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput


class NeoBERTConfig(PreTrainedConfig):
    model_type = "neobert"

    def __init__(self, **settings: Any) -> None:
        defaults = {
            "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 28, "num_attention_heads": 12,
            "intermediate_size": 3072, "norm_eps": 1e-6, "max_length": 1024, "pad_token_id": 0,
            "tie_word_embeddings": False,
        }  # fmt: skip
        settings = {**defaults, **settings}
        self.max_length = settings.pop("max_length")  # of positions, not of a generated text
        super().__init__(**settings)


def _turn(x: Tensor) -> Tensor:
    """x [batch, seq, heads, size]: numbers 2i and 2i + 1 are a complex one."""
    seq, size = x.shape[1], x.shape[-1]
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angles = torch.outer(torch.arange(seq, device=x.device).float(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(hidden, 2 * inter, bias=False)
        self.w3 = nn.Linear(inter, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w12(x).chunk(2, -1)
        return self.w3(functional.silu(gate) * up)  # type: ignore[no-any-return]


class EncoderBlock(nn.Module):
    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        inter = int(2 * config.intermediate_size / 3)
        self.ffn = SwiGLU(config.hidden_size, 8 * ((inter + 7) // 8))
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, -1)).chunk(3, -1)
        q, k, v = (part.transpose(1, 2) for part in (_turn(q), _turn(k), v))
        made = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.wo(made.transpose(1, 2).flatten(2))
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class NeoBERTPreTrainedModel(PreTrainedModel):
    config_class = NeoBERTConfig
    base_model_prefix = "model"
    _supports_sdpa = True

    def post_init(self) -> None:
        super().post_init()
        self.config.architectures = [type(self).__name__]

    def _init_weights(self, module: nn.Module) -> None:
        pass


class NeoBERT(NeoBERTPreTrainedModel):
    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.transformer_encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_hidden_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = [self.encoder(input_ids)]
        for layer in self.transformer_encoder:
            states.append(layer(states[-1], seen[:, None, None].bool()))
        states[-1] = self.layer_norm(states[-1])
        out = BaseModelOutput(
            last_hidden_state=states[-1], hidden_states=tuple(states) if output_hidden_states else None
        )
        return out if return_dict is not False else out.to_tuple()


class NeoBERTLMHead(NeoBERTPreTrainedModel):
    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERT(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        out = self.model(input_ids, **inputs | {"return_dict": True})
        made = MaskedLMOutput(logits=self.decoder(out.last_hidden_state), hidden_states=out.hidden_states)
        return made if inputs.get("return_dict") is not False else made.to_tuple()


class NeoBERTForSequenceClassification(NeoBERTPreTrainedModel):
    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERT(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        out = self.model(input_ids, **inputs | {"return_dict": True})
        logits = self.classifier(torch.tanh(self.dense(out.last_hidden_state[:, 0])))
        made = SequenceClassifierOutput(logits=logits, hidden_states=out.hidden_states)
        return made if inputs.get("return_dict") is not False else made.to_tuple()


AutoConfig.register("neobert", NeoBERTConfig)
AutoModel.register(NeoBERTConfig, NeoBERT)
