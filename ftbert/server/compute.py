"""One batch on a model: token ids in, a float32 array out. On a GPU the launch returns before the result is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ftbert.server.batcher import Batch
from ftbert.server.description import CLASSIFIES, FILLS, TAGS
from ftbert.server.work import BEST, Kind
from ftbert.text import text_vectors

if TYPE_CHECKING:
    from numpy.typing import NDArray

Fetch = Callable[[], "NDArray[np.float32]"]

# Masked tokens whose logits over the vocabulary are there at once: 256 MB of a vocabulary of 250,000.
_MARKED_AT_ONCE = 256


class Compute:
    """Batches of one model. pooling: of Kind.EMBED."""

    def __init__(self, model: Any, pooling: str) -> None:
        self.model = model
        self.pooling = pooling
        self.heads = {name: model.tasks.index(name) for name in (CLASSIFIES, TAGS, FILLS) if name in model.tasks}

    def launch(self, batch: Batch) -> Fetch:
        """The rows of the batch's texts in the order of its runs, as `Kind` says."""
        ids = _joined([run.work.ids[_tokens(run)] for run in batch.runs])
        lengths = _joined([_lengths(run) for run in batch.runs])
        cu_seqlens = np.zeros(_padded(len(lengths), self.model.device) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1 : len(lengths) + 1])
        cu_seqlens[len(lengths) + 1 :] = cu_seqlens[len(lengths)]  # empty sequences, for few kinds of CUDA graphs
        with torch.inference_mode():
            return self._run(batch, ids.astype(np.int64), cu_seqlens, lengths)

    def free_memory(self) -> None:
        """After a lack of memory."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, batch: Batch, ids: Any, cu_seqlens: Any, lengths: NDArray[np.int64]) -> Fetch:
        if self.model.device.type == "cpu":
            rows = self._rows(batch, torch.from_numpy(ids), cu_seqlens, lengths)
            array: NDArray[np.float32] = rows.float().numpy()
            return lambda: array
        with torch.cuda.device(self.model.device):
            rows = self._rows(batch, self._upload(ids), cu_seqlens, lengths).float()
            landed = torch.empty(rows.shape, dtype=torch.float32, pin_memory=True)
            landed.copy_(rows, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()

        def fetch() -> NDArray[np.float32]:
            arrived.synchronize()
            return landed.numpy()

        return fetch

    def _rows(self, batch: Batch, ids: Any, cu: NDArray[np.int32], lengths: NDArray[np.int64]) -> torch.Tensor:
        longest, texts = int(lengths.max()), len(lengths)
        if batch.kind == Kind.EMBED:
            skip: Any = 0
            if any(run.work.skip is not None for run in batch.runs):
                skip = np.zeros(len(cu) - 1, dtype=np.int32)
                skip[:texts] = _joined([_skipped(run) for run in batch.runs])
            vectors = text_vectors(self.model, ids, cu, longest, self._upload, pooling=self.pooling, skip=skip)
            return vectors[:texts]
        offsets = self._upload(cu)
        if batch.kind == Kind.LOGITS:
            types = None
            if any(run.work.types is not None for run in batch.runs):
                types = self._upload(_joined([_types(run) for run in batch.runs]).astype(np.int64))
            return self._logits(CLASSIFIES, ids, offsets, longest, types)[:texts]
        if batch.kind == Kind.TOKEN_LOGITS:
            return self._logits(TAGS, ids, offsets, longest)
        hidden: torch.Tensor = self.model.forward_packed(ids, offsets, longest)
        return self._filled(batch, hidden) if batch.kind == Kind.FILLED else hidden

    def _logits(self, task: str, ids: Any, cu: Any, longest: int, types: Any = None) -> torch.Tensor:
        logits: torch.Tensor = self.model.logits_packed(ids, cu, longest, types)[self.heads[task]]
        return logits

    def _filled(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [tokens, hidden]. The head computes the marked rows alone."""
        head, word = self.model.heads[self.heads[FILLS]], self.model.encoder.weight("embeddings.word")
        width = min(BEST, len(head.out_bias))
        rows, wanted = _marked(batch.runs, width)
        marked, targets = hidden[self._upload(rows)], self._upload(wanted)
        found = []
        for some, ids in zip(marked.split(_MARKED_AT_ONCE), targets.split(_MARKED_AT_ONCE), strict=True):
            scores = head(some, word).float().softmax(-1)
            best, places = scores.topk(width)
            asked = ids[:, :1] >= 0  # these targets alone, -1 behind the last
            best = torch.where(asked, scores.gather(1, ids.clamp_min(0)), best)
            found.append(torch.cat([best, torch.where(asked, ids, places).float()], dim=1))
        return torch.cat(found)

    def _upload(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        # Pinned memory lets the host go on at once.
        device = self.model.device
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _tokens(run: Any) -> slice:
    return slice(int(run.work.offsets[run.start]), int(run.work.offsets[run.stop]))


def _lengths(run: Any) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = run.work.offsets[run.start : run.stop + 1]
    return offsets[1:] - offsets[:-1]  # of one text 0.4 us; np.diff takes 1.3


def _marked(runs: list[Any], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of a batch's marked tokens, and [marked, width] the targets of each: -1 where there are none."""
    rows, targets, at = [], [], 0
    for run in runs:
        work = run.work
        mine = work.marked[work.rows(run.start, run.stop)]
        rows.append(mine + (at - int(work.offsets[run.start])))
        wanted = np.full(width, -1, dtype=np.int64)
        if work.targets is not None:
            wanted[: len(work.targets)] = work.targets
        targets.append(np.broadcast_to(wanted, (len(mine), width)))
        at += run.tokens
    return np.concatenate(rows).astype(np.int64), np.concatenate(targets)


def _types(run: Any) -> NDArray[np.uint8]:
    types = run.work.types
    return np.zeros(run.tokens, dtype=np.uint8) if types is None else types[_tokens(run)]


def _skipped(run: Any) -> NDArray[np.int32]:
    skip = run.work.skip
    return np.zeros(run.stop - run.start, dtype=np.int32) if skip is None else skip[run.start : run.stop]


def _padded(texts: int, device: torch.device) -> int:
    return texts if device.type == "cpu" else 1 << (texts - 1).bit_length()
