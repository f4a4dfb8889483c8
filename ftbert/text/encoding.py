"""Texts in, one vector per text out, or one per token: tokenise and pack in the background, compute, pool."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ftbert.caller import warn_caller
from ftbert.packed_model import PackedModel, kept
from ftbert.text import long_texts
from ftbert.text.auto_tokenizer import load_tokenizer
from ftbert.text.batching import Batch
from ftbert.text.computing import Work, rows_of_texts
from ftbert.text.long_texts import Average
from ftbert.text.options import TextOptions
from ftbert.text.pooling import Upload, text_vectors, token_states
from ftbert.text.settings import TextSettings
from ftbert.text.tasks import adapter_for
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Text, Tokens


def embedding(model: PackedModel, how: TextOptions, tokens: bool = False) -> Work:
    """What `ftbert.Model.encode` computes: pooled vectors, or with `tokens` the last hidden state of every token. Warns
    once of a model for scores."""
    if not tokens:
        _warn_of_scores(model)
    tokenizer, config = tokenizer_of(model), model.config
    merge = Average(how.whole_width, how) if how.long_texts == "mean" else None

    def states(model: PackedModel, batch: Batch, upload: Upload) -> torch.Tensor:
        return token_states(model, model.forward_packed(upload(batch.ids), upload(batch.cu_seqlens), batch.longest))

    return Work(
        compute=states if tokens else partial(pooled_vectors, how=merge.pooling() if merge else how),
        tokenise=lambda texts: long_texts.tokenise(tokenizer, texts, how).check(config.vocab, config.token_types),
        merge=merge,
        width=tokenizer.settings.state_width(model.config.hidden) if tokens else how.width,
        parts=rows_of_texts if tokens else None,
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def tokenise(
    model: PackedModel, tokenizer: Tokenizer, prompt: str, max_length: int | None
) -> Callable[[Sequence[Text]], Tokens]:
    """Texts to ids that `model` has rows for; ValueError where the tokenizer gives others."""
    config = model.config
    return lambda texts: tokenizer.tokens(texts, prompt, max_length).check(config.vocab, config.token_types)


def text_options(model: PackedModel, **given: Any) -> TextOptions:
    """What `given` (see `TextOptions.choose`) and the settings of `model`'s folder come to."""
    adapter = adapter_for(model, given.get("task"))
    return TextOptions.choose(tokenizer_of(model), model.config.hidden, adapter=adapter, **given)


def tokenizer_of(model: PackedModel, *, scores: bool = False) -> Tokenizer:
    """The tokenizer of `model`'s folder as its settings for vectors ask for it, or for scores, with what the caller has
    chosen; each built once per model."""

    def build() -> Tokenizer:
        if model.folder is None:
            raise ValueError(
                "this model has no folder with a tokenizer, so it cannot take text; load it from a folder, "
                "or pass token ids to the model"
            )
        settings = TextSettings.for_scores(model.folder) if scores else TextSettings.from_folder(model.folder)
        loaded = loaded_tokenizer(model, model.folder, settings)
        return Tokenizer(model.folder, settings, model.config.max_seq, loaded)

    built = kept(model, ("tokenizer", scores), build)
    return built.with_choices(model.text_choices) if model.text_choices else built


def loaded_tokenizer(model: PackedModel, folder: Path, settings: TextSettings | None = None) -> Any:
    """`load_tokenizer` of the model's folder, once per model for all settings that ask for the same tokenizer. Who
    changes its state takes a copy."""
    settings = settings or TextSettings()
    markers = None if settings.multi is None else tuple(settings.multi.markers)
    same = ("loaded tokenizer", settings.subfolder, settings.lower_case, repr(settings.tokenizer_arguments), markers)
    return kept(model, same, lambda: load_tokenizer(folder, settings))


def users_tokenizer(model: PackedModel, *, scores: bool = False) -> Any:
    """A copy of transformers' tokenizer for the caller, one per model and kind: its padding is state."""
    tokenizer = tokenizer_of(model, scores=scores)
    mine = kept(model, ("user's tokenizer", scores), lambda: copy.deepcopy(tokenizer.loaded))
    mine.model_max_length = tokenizer.max_length
    return mine


def pooled_vectors(model: PackedModel, batch: Batch, upload: Upload, how: TextOptions) -> torch.Tensor:
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


def finished(vectors: torch.Tensor, how: TextOptions) -> torch.Tensor:
    """Pooled vectors normalised and truncated as `how` says."""
    if how.normalize_whole or (how.normalize and how.truncate_dim is None):
        vectors = torch.nn.functional.normalize(vectors)
    if how.truncate_dim is None:
        return vectors
    part = vectors[:, : how.truncate_dim]
    return torch.nn.functional.normalize(part) if how.normalize else part.contiguous()


def _warn_of_scores(model: PackedModel) -> None:
    """Once per model: it was trained to score texts, and its folder does not say how vectors are made of it."""
    if has_score_head(model) and not tokenizer_of(model).settings.stated:
        words = (
            "this model scores texts (it has a head for sequence classification), and encode gives its pooled hidden "
            "states, which nothing trained to be compared: use predict or rerank for its scores"
        )
        kept(model, "warned of scores", lambda: warn_caller(words))


def has_score_head(model: PackedModel) -> bool:
    """Whether its checkpoint has a head for sequence classification, loaded or not."""
    return any(head.task == "sequence_classification" for head in model.checkpoint.config.heads)
