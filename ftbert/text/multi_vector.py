"""One vector for each token of a text, to be compared token by token (ColBERT)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from ftbert.packed_model import PackedModel
from ftbert.text import long_texts
from ftbert.text.batching import Batch
from ftbert.text.computing import Work
from ftbert.text.encoding import text_options, tokenizer_of
from ftbert.text.pooling import Upload, dense_of, token_states
from ftbert.text.token_arrays import tokens_kept
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Text, Tokens, expanded
from ftbert.text.vector_modules import Expansion, MultiSettings, width_behind


def multi_vector_embedding(model: PackedModel, *, task: str | None = None, **given: Any) -> Work:
    """What `ftbert.Model.encode_multi_vector` computes: float32 [tokens, width] for each text. given: of
    `TextOptions.choose`."""
    how = text_options(model, vectors="multi", task=task, **given)
    tokenizer, config = tokenizer_of(model), model.config
    settings = tokenizer.settings.multi
    assert settings is not None
    expansion = settings.expansion if task == "query" else None

    def tokenise(texts: Sequence[Text]) -> Tokens:
        found = long_texts.tokenise(tokenizer, texts, how)
        if expansion is not None:
            found = _expanded(tokenizer, texts, how.prompt, how.max_length, expansion)
        return found.check(config.vocab, config.token_types)

    return Work(
        compute=lambda model, batch, upload: batch_vectors(model, batch, upload, settings),
        tokenise=tokenise,
        parts=partial(_kept, settings=settings, skipped=skipped_ids(tokenizer, settings, task)),
        width=width_behind(settings.dense, tokenizer.settings.state_width(config.hidden)),
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def batch_vectors(model: PackedModel, batch: Batch, upload: Upload, settings: MultiSettings) -> torch.Tensor:
    """`token_vectors` of a batch's ids."""
    keys = None if batch.marks is None else upload(np.array(batch.marks, dtype=np.int32))
    hidden = model.forward_packed(upload(batch.ids), upload(batch.cu_seqlens), batch.longest, keys=keys)
    return token_vectors(model, hidden, settings)


def token_vectors(model: PackedModel, hidden: torch.Tensor, settings: MultiSettings) -> torch.Tensor:
    """[tokens, hidden] -> float32 [tokens, width]: of every token, also of those that have none."""
    vectors = token_states(model, hidden)
    for layer in dense_of(model, "multi"):
        vectors = layer(vectors)
    return normalize(vectors) if settings.normalize else vectors


def _kept(
    batch: Batch, found: NDArray[np.float32], settings: MultiSettings, skipped: NDArray[np.int64]
) -> Iterator[NDArray[np.float32]]:
    """The vectors of each text's tokens, without those that have none."""
    kept = tokens_kept(batch.ids, batch.cu_seqlens, skipped, settings.first)
    ends = batch.cu_seqlens.tolist()
    return (found[start:end][kept[start:end]] for start, end in zip(ends, ends[1:], strict=False))


def skipped_ids(tokenizer: Tokenizer, settings: MultiSettings, task: str | None) -> NDArray[np.int64]:
    """Ids of the words that have no vector in texts for `task`; a word that is no single token has none."""
    words = settings.skipped if (task or "document") in settings.skipped_for else ()
    loaded = tokenizer.loaded
    ids = [(word, loaded.convert_tokens_to_ids(word)) for word in words]
    found = [one for word, one in ids if one is not None and (one != loaded.unk_token_id or word == loaded.unk_token)]
    return np.array(found, dtype=np.int64)


def compared(
    vectors: torch.Tensor, ids: NDArray[Any], cu_seqlens: NDArray[np.int32], skipped: NDArray[np.int64], first: bool,
    upload: Upload,
) -> tuple[torch.Tensor, NDArray[np.int32]]:  # fmt: skip
    """Of vectors [tokens, width] on a device those of tokens that have one, as of `tokens_kept`, and the texts' offsets
    among them."""
    kept = tokens_kept(ids, cu_seqlens, skipped, first)
    if kept.all():
        return vectors.contiguous(), cu_seqlens
    before = np.concatenate([[0], np.cumsum(kept)])
    return vectors[upload(np.flatnonzero(kept))], before[cu_seqlens].astype(np.int32)


def expansion_token(tokenizer: Tokenizer, expansion: Expansion) -> int:
    """The id by which queries are made longer. ValueError where the tokenizer has none."""
    loaded = tokenizer.loaded
    token = loaded.mask_token_id if loaded.mask_token_id is not None else loaded.eos_token_id
    if expansion.token is not None:
        token = loaded.convert_tokens_to_ids(expansion.token)
    if token is None:
        raise ValueError("the tokenizer has no token for queries to be made longer by")
    return int(token)


def _expanded(tokenizer: Tokenizer, texts: Sequence[Text], prompt: str, length: int, expansion: Expansion) -> Tokens:
    most = tokenizer.check_length(expansion.length, "query_expansion: length")
    found = tokenizer.tokens(texts, prompt, most if expansion.exact else max(most, length))
    return expanded(found, expansion_token(tokenizer, expansion), most, expansion.attend)
