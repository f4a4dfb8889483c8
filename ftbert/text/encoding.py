"""Texts in, one vector per text out, or one per token: tokenise and pack in the background, compute, pool."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftbert.text import long_texts
from ftbert.text.batching import Batch
from ftbert.text.computing import Upload, Work
from ftbert.text.long_texts import Average
from ftbert.text.options import TextOptions
from ftbert.text.settings import TextSettings
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Text, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

_tokenizers: weakref.WeakKeyDictionary[Any, Tokenizer] = weakref.WeakKeyDictionary()


def embedding(model: Any, how: TextOptions, tokens: bool = False) -> Work:
    """What `ftbert.Model.encode` computes: pooled vectors, or with `tokens` the last hidden state of every token."""
    tokenizer, config = tokenizer_of(model), model.config
    merge = Average(how.whole_width, how) if how.long_texts == "mean" else None
    return Work(
        compute=_token_vectors if tokens else partial(pooled_vectors, how=merge.pooling() if merge else how),
        tokenise=lambda texts: long_texts.tokenise(tokenizer, texts, how).check(config.vocab, config.token_types),
        merge=merge,
        width=model.config.hidden if tokens else how.width,
        per_token=tokens,
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def tokenise(model: Any, prompt: str, max_length: int | None) -> Callable[[Sequence[Text]], Tokens]:
    """Texts to ids that `model` has rows for; ValueError where the tokenizer gives others."""
    tokenizer, config = tokenizer_of(model), model.config
    return lambda texts: tokenizer.tokens(texts, prompt, max_length).check(config.vocab, config.token_types)


def text_options(model: Any, **given: Any) -> TextOptions:
    """What `given` (see `TextOptions.choose`) and the settings of `model`'s folder come to."""
    return TextOptions.choose(tokenizer_of(model), model.config.hidden, **given)


def tokenizer_of(model: Any) -> Tokenizer:
    """The tokenizer of `model`'s folder, built once per model."""
    tokenizer = _tokenizers.get(model)
    if tokenizer is None:
        if model.folder is None:
            raise ValueError(
                "this model has no folder with a tokenizer, so it cannot take text; load it from a folder, "
                "or pass token ids to the model"
            )
        folder = Path(model.folder)
        tokenizer = Tokenizer(folder, TextSettings.from_folder(folder), model.config.max_seq)
        _tokenizers[model] = tokenizer
    return tokenizer


def pooled_vectors(model: Any, batch: Batch, upload: Upload, how: TextOptions) -> torch.Tensor:
    """float32 [texts, width] on the model's device: the `Work.compute` of embeddings."""
    ids, cu_seqlens = upload(batch.ids), upload(batch.cu_seqlens)
    if how.unpooled_tokens:
        pooled, offsets = _without_prompt(batch.cu_seqlens, how)
        hidden = model.forward_packed(ids, cu_seqlens, batch.longest)[upload(pooled)]
        cu_seqlens = upload(offsets)
    elif how.pooling == "cls":
        # One row a text is all that is read, and so all that the last layer computes.
        hidden = model.forward_packed(ids, cu_seqlens, batch.longest, want="first")
        cu_seqlens = torch.arange(len(cu_seqlens), dtype=torch.int32, device=cu_seqlens.device)
    else:
        hidden = model.forward_packed(ids, cu_seqlens, batch.longest)
    if how.truncate_dim is None:
        return torch.ops.ftbert.pooling(hidden, cu_seqlens, how.pooling, how.normalize or how.normalize_whole)
    # As sentence-transformers does: the folder's Normalize sees the whole vector, the caller's the truncated one.
    whole = torch.ops.ftbert.pooling(hidden, cu_seqlens, how.pooling, how.normalize_whole)
    part = whole[:, : how.truncate_dim]
    return torch.nn.functional.normalize(part) if how.normalize else part.contiguous()


def _token_vectors(model: Any, batch: Batch, upload: Upload) -> torch.Tensor:
    return model.forward_packed(upload(batch.ids), upload(batch.cu_seqlens), batch.longest).float()


def _without_prompt(
    cu_seqlens: NDArray[np.int32], how: TextOptions
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """The tokens of a batch that are pooled, where the prompt's are not: [pooled tokens], their places among the
    batch's tokens; [texts + 1], the offsets of the texts among them."""
    lengths = np.diff(cu_seqlens)
    places = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    kept = places >= how.unpooled_tokens
    if how.pooling == "cls":  # the first token where nothing is behind the prompt
        kept |= np.repeat(lengths <= how.unpooled_tokens, lengths) & (places == 0)
    before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
    return np.flatnonzero(kept), before[cu_seqlens]
