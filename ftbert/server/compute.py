"""One batch on a model: token ids in, a float32 array out. On a GPU the launch returns before the result is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.packed_model import PackedModel
from ftbert.server.batcher import Batch
from ftbert.server.description import CLASSIFIES, FILLS, TAGS
from ftbert.server.job import BEST, ENTRIES
from ftbert.text import Batch as Texts
from ftbert.text import (
    TextSettings,
    Upload,
    compared,
    launch,
    next_logits,
    pooled_rows,
    sharing,
    skipped_ids,
    splade_rows,
    text_vectors,
    token_states,
    token_vectors,
    token_weights,
    tokenizer_of,
)

Fetch = Callable[[], NDArray[np.float32]]

# Masked tokens whose logits over the vocabulary are there at once: 256 MB of a vocabulary of 250,000.
_MARKED_AT_ONCE = 256


class Compute:
    """Batches of one model, by the methods that `Kind` names. pooling: of Kind.EMBED. score_ids: of Kind.LOGITS where
    these are of two tokens of the vocabulary. settings: of the model's folder."""

    def __init__(
        self, model: PackedModel, pooling: str, score_ids: Sequence[int] = (), settings: TextSettings | None = None
    ) -> None:
        self.model = model
        self.pooling, self.score_ids = pooling, score_ids
        self.sparse, self.multi = (None, None) if settings is None else (settings.sparse, settings.multi)
        self.skipped = np.empty(0, dtype=np.int64)  # ids without a vector in documents
        if self.multi is not None:
            self.skipped = skipped_ids(tokenizer_of(model), self.multi, "document")
        self.pooled_scores = settings is not None and settings.scored
        self.heads = {name: model.tasks.index(name) for name in (CLASSIFIES, TAGS, FILLS) if name in model.tasks}

    def launch(self, batch: Batch) -> Fetch:
        """The rows of the batch's texts in the order of its spans, as `Kind` says."""
        task = list(self.model.checkpoint.tasks)[batch.adapter - 1] if batch.adapter else self.model.checkpoint.task
        return launch(self.model.for_task(task), batch, self._rows)

    def free_memory(self) -> None:
        """After a lack of memory."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rows(self, model: PackedModel, batch: Batch, upload: Upload) -> torch.Tensor:
        """float32, on the model's device. model: a replica."""
        found: torch.Tensor = getattr(self, batch.kind.method)(_Packed.of(model, batch, upload))
        return found[: batch.texts] if batch.kind.rows_of == "texts" else found

    # -- one method for each Kind: rows of the batch's texts, and of the empty ones behind them

    def pooled(self, texts: _Packed) -> torch.Tensor:
        skip: Any = 0
        if any(span.job.skip is not None for span in texts.batch.spans):
            skip = np.zeros(len(texts.cu_seqlens) - 1, dtype=np.int32)
            skip[: texts.batch.texts] = _joined([_skipped(span) for span in texts.batch.spans])
        return self._text_vectors(texts, skip=skip)

    def chunks(self, texts: _Packed) -> torch.Tensor:
        rows = _marked(texts.batch.spans, 1)[0]
        lengths = np.diff(np.append(rows, len(texts.ids)))
        skip = np.zeros(len(rows), dtype=np.int32)
        firsts = np.searchsorted(rows, texts.cu_seqlens[: texts.batch.texts])  # of each text's parts
        skip[firsts] = _joined([_skipped(span) for span in texts.batch.spans])
        return pooled_rows(texts.model, texts.hidden(), lengths, self.pooling, texts.upload, skip)

    def sparse_vectors(self, texts: _Packed) -> torch.Tensor:
        assert self.sparse is not None
        return splade_rows(*texts.pooled_arguments(), self.sparse, ENTRIES)

    def states(self, texts: _Packed) -> torch.Tensor:
        return token_states(texts.model, texts.hidden())

    def vectors(self, texts: _Packed) -> torch.Tensor:
        assert self.multi is not None
        return token_vectors(texts.model, texts.hidden(), self.multi)

    def similarities(self, texts: _Packed) -> torch.Tensor:
        assert self.multi is not None
        queries = [span.job.query for span in texts.batch.spans if span.job.query is not None]
        found, offsets = compared(
            self.vectors(texts), texts.ids, texts.cu_seqlens, self.skipped, self.multi.first, texts.upload
        )
        query_of = np.zeros(len(texts.cu_seqlens) - 1, dtype=np.int32)
        sizes = [span.stop - span.start for span in texts.batch.spans]
        query_of[: texts.batch.texts] = np.repeat(np.arange(len(queries)), sizes)
        begins = np.cumsum([0, *map(len, queries)]).astype(np.int32)
        rows = torch.ops.ftbert.max_sim(
            texts.upload(_joined(queries)), texts.upload(begins), found, texts.upload(offsets), texts.upload(query_of)
        )
        return rows[:, None]  # type: ignore[no-any-return]

    def weights(self, texts: _Packed) -> torch.Tensor:
        return token_weights(texts.model, texts.hidden())

    def logits(self, texts: _Packed) -> torch.Tensor:
        if self.score_ids:
            return self._next_logits(texts)
        if self.pooled_scores:
            return self._text_vectors(texts, types=texts.types(), layers="scores")
        return self._head_logits(texts, CLASSIFIES)

    def token_logits(self, texts: _Packed) -> torch.Tensor:
        return self._head_logits(texts, TAGS)

    def filled(self, texts: _Packed) -> torch.Tensor:
        """The head computes the marked rows alone."""
        head, word = texts.model.heads[self.heads[FILLS]], texts.model.encoder.weight("embeddings.word")
        width = min(BEST, len(head.out_bias))
        rows, wanted = _marked(texts.batch.spans, width)
        marked, targets = texts.hidden()[texts.upload(rows)], texts.upload(wanted)
        found = []
        for some, ids in zip(marked.split(_MARKED_AT_ONCE), targets.split(_MARKED_AT_ONCE), strict=True):
            scores = head(some, word).float().softmax(-1)
            best, places = scores.topk(width)
            asked = ids[:, :1] >= 0  # these targets alone, -1 behind the last
            best = torch.where(asked, scores.gather(1, ids.clamp_min(0)), best)
            found.append(torch.cat([best, torch.where(asked, ids, places).float()], dim=1))
        return torch.cat(found)

    def _text_vectors(self, texts: _Packed, **how: Any) -> torch.Tensor:
        return text_vectors(*texts.pooled_arguments(), pooling=self.pooling, **how)

    def _head_logits(self, texts: _Packed, task: str) -> torch.Tensor:
        return texts.model.logits_packed(*texts.packed_arguments(), texts.types())[self.heads[task]].float()

    def _next_logits(self, texts: _Packed) -> torch.Tensor:
        cu_seqlens, count = texts.cu_seqlens, texts.batch.texts
        batch = Texts(texts.ids, cu_seqlens[: count + 1], texts.longest, np.arange(count), _joined_types(texts.batch))
        some, shared = sharing(texts.model, batch)
        offsets = texts.upload(some.cu_seqlens if shared else cu_seqlens)
        packed = texts.upload(some.ids), offsets, texts.longest, texts.types()
        return next_logits(texts.model, packed, self.score_ids, shared)


@dataclass
class _Packed:
    """The texts of a batch behind one another, for a replica. ids: int64 [tokens]. cu_seqlens: int32, with empty
    sequences behind the last on a GPU, for few kinds of CUDA graphs."""

    model: PackedModel
    batch: Batch
    ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    longest: int
    upload: Upload

    @classmethod
    def of(cls, model: PackedModel, batch: Batch, upload: Upload) -> _Packed:
        ids = _joined([span.job.ids[_tokens(span)] for span in batch.spans]).astype(np.int64)
        lengths = _joined([_lengths(span) for span in batch.spans])
        texts = len(lengths)
        cu_seqlens = np.zeros(_padded(texts, model.device) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1 : texts + 1])
        cu_seqlens[texts + 1 :] = cu_seqlens[texts]
        return cls(model, batch, ids, cu_seqlens, int(lengths.max()), upload)

    def packed_arguments(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Of forward_packed."""
        return self.upload(self.ids), self.upload(self.cu_seqlens), self.longest

    def pooled_arguments(self) -> tuple[PackedModel, torch.Tensor, NDArray[np.int32], int, Upload]:
        """What begins the arguments of text_vectors and splade_rows."""
        return self.model, self.upload(self.ids), self.cu_seqlens, self.longest, self.upload

    def types(self) -> torch.Tensor | None:
        types = _joined_types(self.batch)
        return None if types is None else self.upload(types)

    def hidden(self) -> torch.Tensor:
        """[tokens, hidden]"""
        return self.model.forward_packed(*self.packed_arguments(), keys=self.keys())

    def keys(self) -> torch.Tensor | None:
        """int32 [texts], where a job says how many tokens of each are attended to."""
        spans = self.batch.spans
        if all(span.job.keys is None for span in spans):
            return None
        made = np.zeros(len(self.cu_seqlens) - 1, dtype=np.int32)
        made[: self.batch.texts] = _joined([_keys(span) for span in spans])
        return self.upload(made)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _keys(span: Any) -> NDArray[np.int32]:
    given = span.job.keys
    return _lengths(span).astype(np.int32) if given is None else given[span.start : span.stop]


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
