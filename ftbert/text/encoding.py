"""Texts in, one vector per text out, or one per token: tokenise and pack in the background, compute, pool."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ftbert.caller import warn_caller
from ftbert.text import long_texts
from ftbert.text.batching import Batch
from ftbert.text.computing import Work, rows_of_texts
from ftbert.text.long_texts import Average
from ftbert.text.options import TextOptions
from ftbert.text.pooling import Upload, text_vectors, token_states
from ftbert.text.settings import TextSettings
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Text, Tokens

_tokenizers: weakref.WeakKeyDictionary[Any, dict[bool, Tokenizer]] = weakref.WeakKeyDictionary()
_copies: weakref.WeakKeyDictionary[Any, dict[bool, Any]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def embedding(model: Any, how: TextOptions, tokens: bool = False) -> Work:
    """What `ftbert.Model.encode` computes: pooled vectors, or with `tokens` the last hidden state of every token. Warns
    once of a model for scores."""
    if not tokens:
        _warn_of_scores(model)
    tokenizer, config = tokenizer_of(model), model.config
    merge = Average(how.whole_width, how) if how.long_texts == "mean" else None
    return Work(
        compute=_token_vectors if tokens else partial(pooled_vectors, how=merge.pooling() if merge else how),
        tokenise=lambda texts: long_texts.tokenise(tokenizer, texts, how).check(config.vocab, config.token_types),
        merge=merge,
        width=tokenizer.settings.state_width(model.config.hidden) if tokens else how.width,
        parts=rows_of_texts if tokens else None,
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def tokenise(
    model: Any, tokenizer: Tokenizer, prompt: str, max_length: int | None
) -> Callable[[Sequence[Text]], Tokens]:
    """Texts to ids that `model` has rows for; ValueError where the tokenizer gives others."""
    config = model.config
    return lambda texts: tokenizer.tokens(texts, prompt, max_length).check(config.vocab, config.token_types)


def text_options(model: Any, **given: Any) -> TextOptions:
    """What `given` (see `TextOptions.choose`) and the settings of `model`'s folder come to."""
    return TextOptions.choose(tokenizer_of(model), model.config.hidden, **given)


def tokenizer_of(model: Any, *, scores: bool = False) -> Tokenizer:
    """The tokenizer of `model`'s folder as its settings for vectors ask for it, or for scores, with what the caller has
    chosen; each built once per model."""
    built = _tokenizers.setdefault(model, {})
    if scores not in built:
        if model.folder is None:
            raise ValueError(
                "this model has no folder with a tokenizer, so it cannot take text; load it from a folder, "
                "or pass token ids to the model"
            )
        folder = Path(model.folder)
        settings = TextSettings.for_scores(folder) if scores else TextSettings.from_folder(folder)
        built[scores] = Tokenizer(folder, settings, model.config.max_seq)
    chosen = getattr(model, "text_choices", {})
    return built[scores].with_choices(chosen) if chosen else built[scores]


def users_tokenizer(model: Any, *, scores: bool = False) -> Any:
    """A copy of transformers' tokenizer for the caller, one per model and kind: its padding is state."""
    tokenizer, copies = tokenizer_of(model, scores=scores), _copies.setdefault(model, {})
    if scores not in copies:
        copies[scores] = copy.deepcopy(tokenizer.loaded)
    copies[scores].model_max_length = tokenizer.max_length
    return copies[scores]


def pooled_vectors(model: Any, batch: Batch, upload: Upload, how: TextOptions) -> torch.Tensor:
    """float32 [texts, width] on the model's device: the `Work.compute` of embeddings."""
    whole = text_vectors(
        model, upload(batch.ids), batch.cu_seqlens, batch.longest, upload, pooling=how.pooling,
        skip=how.unpooled_tokens,
        unit=how.normalize_whole or (how.normalize and how.truncate_dim is None),
    )  # fmt: skip
    if how.truncate_dim is None:
        return whole
    # As sentence-transformers does: the folder's Normalize sees the whole vector, the caller's the truncated one.
    part = whole[:, : how.truncate_dim]
    return torch.nn.functional.normalize(part) if how.normalize else part.contiguous()


def _token_vectors(model: Any, batch: Batch, upload: Upload) -> torch.Tensor:
    return token_states(model, model.forward_packed(upload(batch.ids), upload(batch.cu_seqlens), batch.longest))


def _warn_of_scores(model: Any) -> None:
    """Once per model: it was trained to score texts, and its folder does not say how vectors are made of it."""
    if model in _warned or tokenizer_of(model).settings.stated:
        return
    if has_score_head(model):
        _warned.add(model)
        warn_caller(
            "this model scores texts (it has a head for sequence classification), and encode gives its pooled hidden "
            "states, which nothing trained to be compared: use predict or rerank for its scores",
        )


def has_score_head(model: Any) -> bool:
    """Whether its checkpoint has a head for sequence classification, loaded or not."""
    checkpoint = getattr(model, "checkpoint", None)
    heads = () if checkpoint is None else checkpoint.config.heads
    return any(head.task == "sequence_classification" for head in heads)
