"""BERT with ALiBi as the model type "alibi_bert", which transformers does not have.

Written after the published code of jinaai/jina-bert-implementation (modeling_bert.py, JinaBertModel) and
mosaicml/mosaic-bert-base (bert_layers.py): no table of positions, slopes by head, gated layers whose first half goes
through the activation and that end in their own norm. The heads are transformers' BERT's, as there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, BertConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.bert import modeling_bert as bert


class AlibiBertConfig(BertConfig):
    model_type = "alibi_bert"
    position_embedding_type: str = "alibi"
    feed_forward_type: str = "geglu"


def head_slopes(heads: int) -> list[float]:
    """_get_alibi_head_slopes of both."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return head_slopes(closest) + head_slopes(2 * closest)[0::2][: heads - closest]


class SelfAttention(nn.Module):
    def __init__(self, config: AlibiBertConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """bias [batch, heads, seq, seq]"""
        made = (part(x) for part in (self.query, self.key, self.value))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in made)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        return (torch.softmax(scores + bias, -1) @ v).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, config: AlibiBertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = bert.BertSelfOutput(config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.output(self.self(x, bias), x)  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    def __init__(self, config: AlibiBertConfig) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.act = ACT2FN[{"geglu": "gelu", "reglu": "relu"}[config.feed_forward_type]]

    def forward(self, x: Tensor) -> Tensor:
        gated, plain = self.gated_layers(x).chunk(2, -1)
        return self.layernorm(self.wo(self.act(gated) * plain) + x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: AlibiBertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.mlp(self.attention(x, bias))  # type: ignore[no-any-return]


class Embeddings(nn.Module):
    def __init__(self, config: AlibiBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, ids: Tensor, types: Tensor | None) -> Tensor:
        types = torch.zeros_like(ids) if types is None else types
        return self.LayerNorm(self.word_embeddings(ids) + self.token_type_embeddings(types))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, config: AlibiBertConfig) -> None:
        super().__init__()
        self.slopes = head_slopes(config.num_attention_heads)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, kept: Tensor) -> list[Tensor]:
        places = torch.arange(x.shape[1], device=x.device)
        slopes = torch.tensor(self.slopes, device=x.device)
        bias = (slopes[:, None, None] * -(places[None] - places[:, None]).abs()).to(x.dtype)[None]
        bias = bias.masked_fill(~kept[:, None, None].bool(), torch.finfo(x.dtype).min)
        states = [x]
        for layer in self.layer:
            states.append(layer(states[-1], bias))
        return states


class AlibiBertPreTrainedModel(bert.BertPreTrainedModel):
    config_class = AlibiBertConfig
    _supports_flash_attn = _supports_flex_attn = False

    def post_init(self) -> None:
        PreTrainedModel.post_init(self)  # also of classes that are no subclass
        self.config.architectures = [type(self).__name__]

    def _init_weights(self, module: nn.Module) -> None:
        pass


class AlibiBertModel(AlibiBertPreTrainedModel):
    def __init__(self, config: AlibiBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = Stack(config)
        self.pooler = bert.BertPooler(config) if add_pooling_layer else None
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
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        states = self.encoder(self.embeddings(input_ids, token_type_ids), kept)
        out = BaseModelOutputWithPooling(
            last_hidden_state=states[-1],
            pooler_output=None if self.pooler is None else self.pooler(states[-1]),
            hidden_states=tuple(states) if output_hidden_states else None,
        )
        return out if return_dict is not False else out.to_tuple()


def _with_head(kind: type, pooled: bool) -> Any:
    """transformers' class with this encoder in it."""

    def init(self: Any, config: AlibiBertConfig) -> None:
        kind.__init__(self, config)  # type: ignore[misc]
        self.bert = AlibiBertModel(config, add_pooling_layer=pooled)
        self.post_init()

    name = "Alibi" + kind.__name__
    return type(name, (kind,), {
        "__init__": init, "__module__": __name__, "config_class": AlibiBertConfig,
        "_supports_flash_attn": False, "_supports_flex_attn": False,
        "post_init": AlibiBertPreTrainedModel.post_init, "_init_weights": AlibiBertPreTrainedModel._init_weights,
    })  # fmt: skip


AlibiBertForMaskedLM = _with_head(bert.BertForMaskedLM, False)
AlibiBertForSequenceClassification = _with_head(bert.BertForSequenceClassification, True)
AlibiBertForTokenClassification = _with_head(bert.BertForTokenClassification, False)
AlibiBertForQuestionAnswering = _with_head(bert.BertForQuestionAnswering, False)
AlibiBertForMultipleChoice = _with_head(bert.BertForMultipleChoice, True)

AutoConfig.register("alibi_bert", AlibiBertConfig)
AutoModel.register(AlibiBertConfig, AlibiBertModel)
