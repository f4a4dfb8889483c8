"""One batch on a model: token ids in, a float32 array out. On a GPU the launch returns before the result is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftbert.server.batcher import Batch
from ftbert.server.description import CLASSIFIES, FILLS, TAGS
from ftbert.server.job import BEST, ENTRIES, Kind
from ftbert.text import Batch as Texts
from ftbert.text import (
    TextSettings,
    launch,
    next_logits,
    sharing,
    splade_rows,
    text_vectors,
    token_states,
    token_vectors,
    token_weights,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftbert.text import Upload

Fetch = Callable[[], "NDArray[np.float32]"]

# Masked tokens whose logits over the vocabulary are there at once: 256 MB of a vocabulary of 250,000.
_MARKED_AT_ONCE = 256


class Compute:
    """Batches of one model. pooling: of Kind.EMBED. score_ids: of Kind.LOGITS where these are of two tokens of the
    vocabulary. settings: of the model's folder."""

    def __init__(
        self, model: Any, pooling: str, score_ids: Sequence[int] = (), settings: TextSettings | None = None
    ) -> None:
        self.model = model
        self.pooling, self.score_ids = pooling, score_ids
        self.sparse, self.multi = (None, None) if settings is None else (settings.sparse, settings.multi)
        self.pooled_scores = settings is not None and settings.scored
        self.heads = {name: model.tasks.index(name) for name in (CLASSIFIES, TAGS, FILLS) if name in model.tasks}

    def launch(self, batch: Batch) -> Fetch:
        """The rows of the batch's texts in the order of its spans, as `Kind` says."""
        return launch(self.model, batch, self._rows)

    def free_memory(self) -> None:
        """After a lack of memory."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rows(self, model: Any, batch: Batch, upload: Upload) -> torch.Tensor:
        """float32, on the model's device."""
        tokens = _joined([span.job.ids[_tokens(span)] for span in batch.spans]).astype(np.int64)
        lengths = _joined([_lengths(span) for span in batch.spans])
        texts, longest = len(lengths), int(lengths.max())
        cu_seqlens = np.zeros(_padded(texts, model.device) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1 : texts + 1])
        cu_seqlens[texts + 1 :] = cu_seqlens[texts]  # empty sequences, for few kinds of CUDA graphs
        if batch.kind == Kind.LOGITS and self.score_ids:
            types = _joined_types(batch)
            some, shared = sharing(model, Texts(tokens, cu_seqlens[: texts + 1], longest, np.arange(texts), types))
            offsets = upload(some.cu_seqlens if shared else cu_seqlens)
            kinds = None if types is None else upload(types)
            return next_logits(model, (upload(some.ids), offsets, longest, kinds), self.score_ids, shared)[:texts]
        ids = upload(tokens)
        if batch.kind == Kind.EMBED:
            skip: Any = 0
            if any(span.job.skip is not None for span in batch.spans):
                skip = np.zeros(len(cu_seqlens) - 1, dtype=np.int32)
                skip[:texts] = _joined([_skipped(span) for span in batch.spans])
            return text_vectors(model, ids, cu_seqlens, longest, upload, pooling=self.pooling, skip=skip)[:texts]
        if batch.kind == Kind.SPARSE:
            assert self.sparse is not None
            return splade_rows(model, ids, cu_seqlens, longest, upload, self.sparse, ENTRIES)[:texts]
        offsets = upload(cu_seqlens)
        if batch.kind == Kind.VECTORS:
            assert self.multi is not None
            return token_vectors(model, model.forward_packed(ids, offsets, longest), self.multi)
        if batch.kind == Kind.WEIGHTS:
            return token_weights(model, model.forward_packed(ids, offsets, longest))
        if batch.kind in (Kind.TOKENS, Kind.FILLED):
            hidden: torch.Tensor = model.forward_packed(ids, offsets, longest)
            return self._filled(batch, hidden, upload) if batch.kind == Kind.FILLED else token_states(model, hidden)
        types = _joined_types(batch)
        kinds = None if types is None else upload(types)
        if batch.kind == Kind.LOGITS and self.pooled_scores:
            return text_vectors(
                model, ids, cu_seqlens, longest, upload, pooling=self.pooling, types=kinds, layers="scores"
            )[:texts]
        task = CLASSIFIES if batch.kind == Kind.LOGITS else TAGS
        logits: torch.Tensor = model.logits_packed(ids, offsets, longest, kinds)[self.heads[task]].float()
        return logits[:texts] if batch.kind == Kind.LOGITS else logits

    def _filled(self, batch: Batch, hidden: torch.Tensor, upload: Upload) -> torch.Tensor:
        """hidden: [tokens, hidden]. The head computes the marked rows alone."""
        head, word = self.model.heads[self.heads[FILLS]], self.model.encoder.weight("embeddings.word")
        width = min(BEST, len(head.out_bias))
        rows, wanted = _marked(batch.spans, width)
        marked, targets = hidden[upload(rows)], upload(wanted)
        found = []
        for some, ids in zip(marked.split(_MARKED_AT_ONCE), targets.split(_MARKED_AT_ONCE), strict=True):
            scores = head(some, word).float().softmax(-1)
            best, places = scores.topk(width)
            asked = ids[:, :1] >= 0  # these targets alone, -1 behind the last
            best = torch.where(asked, scores.gather(1, ids.clamp_min(0)), best)
            found.append(torch.cat([best, torch.where(asked, ids, places).float()], dim=1))
        return torch.cat(found)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _tokens(span: Any) -> slice:
    return slice(int(span.job.offsets[span.start]), int(span.job.offsets[span.stop]))


def _lengths(span: Any) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = span.job.offsets[span.start : span.stop + 1]
    return offsets[1:] - offsets[:-1]  # of one text 0.4 us; np.diff takes 1.3


def _marked(spans: list[Any], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of a batch's marked tokens, and [marked, width] the targets of each: -1 where there are none."""
    rows, targets, at = [], [], 0
    for span in spans:
        job = span.job
        mine = job.marked[job.rows(span.start, span.stop)]
        rows.append(mine + (at - int(job.offsets[span.start])))
        wanted = np.full(width, -1, dtype=np.int64)
        if job.targets is not None:
            wanted[: len(job.targets)] = job.targets
        targets.append(np.broadcast_to(wanted, (len(mine), width)))
        at += span.tokens
    return np.concatenate(rows).astype(np.int64), np.concatenate(targets)


def _joined_types(batch: Batch) -> NDArray[np.int64] | None:
    """[tokens] of the batch; None: all 0."""
    if all(span.job.types is None for span in batch.spans):
        return None
    return _joined([_types(span) for span in batch.spans]).astype(np.int64)


def _types(span: Any) -> NDArray[np.uint8]:
    types = span.job.types
    return np.zeros(span.tokens, dtype=np.uint8) if types is None else types[_tokens(span)]


def _skipped(span: Any) -> NDArray[np.int32]:
    skip = span.job.skip
    return np.zeros(span.stop - span.start, dtype=np.int32) if skip is None else skip[span.start : span.stop]


def _padded(texts: int, device: torch.device) -> int:
    return texts if device.type == "cpu" else 1 << (texts - 1).bit_length()
