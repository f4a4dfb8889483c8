"""What a worker must know of a model that an engine has loaded. Made in the engine; workers import no torch."""

from __future__ import annotations

import msgspec


class Description(msgspec.Struct, frozen=True):
    """task: "embedding", "classifier", "reranker" or "token_classifier". labels: of the last three. tokenizer:
    tokenizer.json's text, without truncation and padding.

    hidden: entries of a text's vector, token_width: of a token's. longest: tokens that the model takes; max_length:
    those of a text, both with the special ones. special: those added to one text. query_length, document_length: tokens
    of such texts, where the folder has a length for them. truncation_side: the tokenizer's own. activation: from logits
    to scores, one of activations.ACTIVATIONS. unknown_id, pad_id: of the tokenizer; clean_up: what it decodes loses the
    space before punctuation. mask_id, mask_token: None where no head predicts masked tokens.
    """

    name: str
    source: str
    task: str
    dtype: str
    device: str
    hidden: int
    token_width: int
    vocab: int
    token_types: int
    longest: int
    max_length: int
    query_length: int | None
    document_length: int | None
    special: int
    special_ids: list[int]
    tokenizer: str
    encode_special_tokens: bool
    truncation_side: str
    pooling: str
    prompts: dict[str, str]
    default_prompt: str
    include_prompt: bool
    truncate_dim: int | None
    normalize: bool
    labels: list[str]
    activation: str
    batch_tokens: int
    rate: float
    unknown_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None
    mask_token: str | None = None
    clean_up: bool = False

    @property
    def computes_with(self) -> str:
        """The value of x-compute-type."""
        return "gpu+optimized" if self.device.startswith("cuda") else "cpu"
