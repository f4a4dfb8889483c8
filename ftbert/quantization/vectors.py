"""One vector a text by transformers' encoder: what `encode` gives, or what a head reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ftbert.checkpoint import Checkpoint
from ftbert.heads import Head, load_head
from ftbert.padded_batches import padded
from ftbert.pooled_rows import pooled
from ftbert.text import TextSettings, Tokenizer, dense_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ftbert.packed_model import PackedModel

_BATCH = 16  # texts
_POOLED_BY_HEAD = {"first": "cls", "pooler": "cls", "last": "last"}


@dataclass(eq=False)
class TextVectors:
    """pooling: as in `TextSettings`; of the first `skip` tokens nothing is pooled. width: entries that are kept of a
    vector, None for all. folder: of the Dense modules behind the pooling; checkpoint: of a head that is one of them."""

    model: PreTrainedModel
    pooling: str
    skip: int = 0
    width: int | None = None
    folder: Path | None = None
    checkpoint: Checkpoint | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, checkpoint: Checkpoint, tokenizer: Tokenizer) -> TextVectors:
        """As the folder says, and where it does not, the row that the checkpoint's head reads."""
        settings: TextSettings = tokenizer.settings
        heads = [head.source for head in checkpoint.config.heads]
        by_head = next((_POOLED_BY_HEAD[one] for one in heads if one in _POOLED_BY_HEAD), settings.pooling)
        skip = 0 if settings.include_prompt else tokenizer.prompt_tokens(settings.default_prompt)
        pooling = settings.pooling if settings.stated else by_head
        return cls(model, pooling, skip, settings.truncate_dim, checkpoint.folder, checkpoint)

    @property
    def device(self) -> torch.device:
        """Of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def head(self, task: str) -> Head:
        """The checkpoint's, in float32."""
        assert self.checkpoint is not None
        config = next(one for one in self.checkpoint.config.heads if one.task == task)
        return load_head(self.checkpoint, config, self.device, torch.float32)

    def batches(self, rows: Sequence[Tensor]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """rows: ids of a text each. Those of a length together: which ones, ids and mask [batch, seq]."""
        order, pad = sorted(range(len(rows)), key=lambda i: len(rows[i])), self.model.config.pad_token_id or 0
        for start in range(0, len(order), _BATCH):
            some = order[start : start + _BATCH]
            yield some, *padded([rows[i] for i in some], "right", pad, self.device)

    def read(self, ids: Tensor, mask: Tensor, lengths: Sequence[int]) -> Tensor:
        """[batch, vector], of length 1. ids, mask: padded on the right."""
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        found = torch.stack([pooled(row[:n], self.pooling, self.skip) for row, n in zip(states, lengths, strict=True)])
        for layer in dense_of(cast("PackedModel", self)):  # which has its folder and device
            found = layer(found)
        return normalize(found[:, : self.width])

    @torch.no_grad()
    def __call__(self, rows: Sequence[Tensor]) -> Tensor:
        """[texts, vector], of length 1"""
        made = [(some, self.read(ids, mask, [len(rows[i]) for i in some])) for some, ids, mask in self.batches(rows)]
        order = torch.tensor([i for some, _ in made for i in some], device=self.device)
        return torch.cat([vectors for _, vectors in made])[order.argsort()]
