"""The model type "static_embedding", a table of token vectors without a network, which transformers does not have.

sentence-transformers' StaticEmbedding and model2vec's StaticModel take the mean of a text's rows: their pooling.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class StaticEmbeddingConfig(PreTrainedConfig):
    model_type = "static_embedding"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"vocab_size": 30522, "hidden_size": 256, "pad_token_id": 0, **settings})


class StaticEmbeddingModel(PreTrainedModel):
    config_class = StaticEmbeddingConfig

    def __init__(self, config: StaticEmbeddingConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        states = self.embedding(input_ids)
        out = BaseModelOutput(last_hidden_state=states, hidden_states=(states,) if output_hidden_states else None)
        return out if return_dict is not False else out.to_tuple()


AutoConfig.register("static_embedding", StaticEmbeddingConfig)
AutoModel.register(StaticEmbeddingConfig, StaticEmbeddingModel)
