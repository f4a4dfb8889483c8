"""The part of Model that takes text: encode and its kin, by the names of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftbert.text.encoding import encode, text_options, tokenizer_of
from ftbert.text.similarity import similarity, similarity_pairwise


class TextModel:
    """What `ftbert.Model` inherits; needs its device, folder, config and forward_packed."""

    device: Any
    folder: Any

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        normalize: bool | None = True,
        normalize_embeddings: bool | None = None,
        pooling: str | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        max_length: int | None = None,
        truncate_dim: int | None = None,
        batch_size: int | None = None,
        max_tokens: int = 16384,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = None,
        task: str | None = None,
    ) -> Any:
        """Texts -> float32 numpy [n, width], in input order; [width] for a single str. width is hidden or truncate_dim.

        Names mean what they mean in sentence-transformers. What differs: vectors are normalised unless told otherwise,
        `batch_size` has no default since `max_tokens` bounds a batch, all but `texts` is given by name, and None shows
        the progress bar on a terminal.

        normalize: to length 1 (default), the bare pooled vector (False), or as the folder's modules say (None).
        normalize_embeddings: sentence-transformers' spelling: True is normalize=True, False is normalize=None, as
        there the folder's modules still count.
        pooling: "cls", "mean", "max", "mean_sqrt_len", "last"; None: the folder's.
        prompt: put before every text; prompt_name: one of `prompts`. Without both: the folder's default prompt. Where
        the folder's pooling says include_prompt false, the prompt's tokens are not pooled.
        max_length: tokens of a text with the special ones, what is longer is truncated; None: the folder's.
        truncate_dim: entries kept of a vector, before it is normalised; None: the folder's.
        batch_size, max_tokens: most texts and real tokens computed at once; memory grows with them. A text of more
        tokens goes alone.
        convert_to_tensor: a torch tensor on the model's device; convert_to_numpy=False alone: a list of them.
        task: "query" or "document": their prompt and length, as encode_query and encode_document.

        TypeError for an item that is not a str; ValueError for an option's value, a lone surrogate, a model without a
        usable tokenizer, a folder that asks for what ftbert does not do (the message names the file).
        """
        if normalize_embeddings is not None:
            if normalize is not True:
                raise TypeError("give normalize or normalize_embeddings, not both")
            normalize = True if normalize_embeddings else None
        how = text_options(
            self, normalize=normalize, pooling=pooling, prompt=prompt, prompt_name=prompt_name, max_length=max_length,
            truncate_dim=truncate_dim, batch_size=batch_size, max_tokens=max_tokens, task=task,
        )  # fmt: skip
        vectors = encode(self, texts, how, show_progress_bar)
        if convert_to_tensor:
            return torch.from_numpy(vectors).to(self.device)
        if convert_to_numpy:
            return vectors
        tensor = torch.from_numpy(vectors).to(self.device)
        return tensor if tensor.dim() == 1 else list(tensor)

    def encode_query(self, texts: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the prompt called "query" and the folder's query_length. Without such a prompt none is put
        before the texts, the default one neither."""
        return self.encode(texts, task="query", **options)

    def encode_document(self, texts: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the prompt called "document" and the folder's document_length; see encode_query."""
        return self.encode(texts, task="document", **options)

    @property
    def prompts(self) -> Mapping[str, str]:
        """By name, as the folder's config_sentence_transformers.json has them."""
        return self._text_settings().prompts

    @property
    def similarity_fn_name(self) -> str:
        """The folder's: "cosine" (default), "dot", "euclidean" or "manhattan"."""
        return "cosine" if self.folder is None else self._text_settings().similarity

    def similarity(self, one: np.ndarray | Tensor, other: np.ndarray | Tensor) -> Tensor:
        """[n, width] and [m, width] -> [n, m] by the folder's similarity function (distances are negative)."""
        return similarity(one, other, self.similarity_fn_name)

    def similarity_pairwise(self, one: np.ndarray | Tensor, other: np.ndarray | Tensor) -> Tensor:
        """[n, width] twice -> [n]: row by row."""
        return similarity_pairwise(one, other, self.similarity_fn_name)

    def _text_settings(self) -> Any:
        return tokenizer_of(self).settings
