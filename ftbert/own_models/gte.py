"""The model type "new" of the published GTE models (gte-en-v1.5, gte-multilingual), which transformers does not have.

Written after the description that the published config.json and tensor names give: norms after each block, gated layers
whose second half goes through the activation, queries, keys and values in one matrix, NTK scaling at any length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


class NewConfig(PreTrainedConfig):
    model_type = "new"

    def __init__(self, **settings: Any) -> None:
        defaults = {"type_vocab_size": 1, "layer_norm_eps": 1e-12, "rope_theta": 10000.0, "rope_scaling": None}
        super().__init__(**{**defaults, **settings})


def _turn(x: Tensor, config: NewConfig) -> Tensor:
    """x [batch, heads, seq, size]"""
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}  # transformers moves it there
    size, factor = x.shape[-1], rope.get("factor", 1.0)
    base = rope["rope_theta"] * factor
    frequencies = base ** (-torch.arange(0, size, 2, device=x.device).float() / size) / factor ** (2 / size)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device).float(), frequencies).repeat(1, 2)
    one, other = x.chunk(2, -1)
    return (x * angles.cos() + torch.cat((-other, one), -1) * angles.sin()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        heads = self.config.num_attention_heads
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = _turn(q, self.config), _turn(k, self.config)
        made = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(made.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.up_gate_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gate_proj(x).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = GatedMLP(config)
        self.attn_ln = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp_ln = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = self.attn_ln(x + self.attention(x, seen))
        return self.mlp_ln(x + self.mlp(x))  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, ids: Tensor, types: Tensor | None) -> Tensor:
        x = self.word_embeddings(ids)
        if hasattr(self, "token_type_embeddings"):
            x = x + self.token_type_embeddings(torch.zeros_like(ids) if types is None else types)
        return self.LayerNorm(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))


class Pooler(nn.Module):
    def __init__(self, config: NewConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


class NewPreTrainedModel(PreTrainedModel):
    config_class = NewConfig
    base_model_prefix = "new"
    _supports_sdpa = True

    def post_init(self) -> None:
        super().post_init()
        self.config.architectures = [type(self).__name__]

    def _init_weights(self, module: nn.Module) -> None:
        pass


class NewModel(NewPreTrainedModel):
    def __init__(self, config: NewConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = Stack(config)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embeddings(input_ids, token_type_ids)
        states = [x]
        for layer in self.encoder.layer:
            x = layer(x, seen[:, None, None].bool())
            states.append(x)
        out = BaseModelOutputWithPooling(
            last_hidden_state=x,
            pooler_output=None if self.pooler is None else self.pooler(x),
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        return out if return_dict is not False else out.to_tuple()


class NewForSequenceClassification(NewPreTrainedModel):
    def __init__(self, config: NewConfig) -> None:
        super().__init__(config)
        self.new = NewModel(config, add_pooling_layer=True)
        self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        out = self.new(input_ids, **inputs | {"return_dict": True})
        made = SequenceClassifierOutput(logits=self.classifier(out.pooler_output), hidden_states=out.hidden_states)
        return made if inputs.get("return_dict") is not False else made.to_tuple()


class NewForTokenClassification(NewPreTrainedModel):
    def __init__(self, config: NewConfig) -> None:
        super().__init__(config)
        self.new = NewModel(config)
        self.classifier = nn.Linear(config.hidden_size, int(config.num_labels or 0))
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        out = self.new(input_ids, **inputs | {"return_dict": True})
        made = TokenClassifierOutput(logits=self.classifier(out.last_hidden_state), hidden_states=out.hidden_states)
        return made if inputs.get("return_dict") is not False else made.to_tuple()


AutoConfig.register("new", NewConfig)
AutoModel.register(NewConfig, NewModel)
