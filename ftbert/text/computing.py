"""Packed batches through a model: results in input order, whatever is computed.

Three stages run at the same time: threads that read and tokenise, the caller's thread that feeds the model's workers,
and (on CUDA) the devices, whose results are fetched a few batches later.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.packed_model import PackedModel
from ftbert.progress import Progress
from ftbert.text.ahead import ahead, in_background, in_turn, is_small, seats_here
from ftbert.text.balance import Balance
from ftbert.text.batching import Batch, Window, batches_of, windows_of
from ftbert.text.long_texts import Average
from ftbert.text.pooling import Upload
from ftbert.text.seats import Seats
from ftbert.text.tokens import Text, Tokens
from ftbert.text.workers import Workers

_log = logging.getLogger("ftbert")

T = TypeVar("T")
B = TypeVar("B")

_BATCHES_AHEAD = 4  # tokenised, waiting to be computed


@dataclass(frozen=True)
class Work:
    """What is computed. compute(model, batch, upload) -> float32, [texts, width] unless there is `parts`; upload: puts
    an array on the model's device. tokenise: texts to ids, from any thread. parts(batch, computed): the result of each
    text where that is no row, `rows_of_texts` where each token has a row. max_tokens, batch_size: most tokens and texts
    of a batch. merge: where a text is several sequences, what makes one result of theirs."""

    compute: Callable[[Any, Batch, Upload], torch.Tensor]
    tokenise: Callable[[Sequence[Text]], Tokens]
    width: int
    parts: Callable[[Batch, NDArray[np.float32]], Iterable[Any]] | None = None
    max_tokens: int = 16384
    batch_size: int | None = None
    merge: Average | None = None


@dataclass
class Done(Generic[T]):
    """A finished window: the caller's item, its real tokens, its number of cut texts, and its results: float32 [texts,
    width], or a list by `Work.parts`."""

    item: T
    results: Any
    tokens: int
    cut: int = 0


_Job: TypeAlias = tuple[Batch, Window[T], Done[T]]


def compute_all(model: PackedModel, texts: Sequence[Text], work: Work, show_progress_bar: bool | None) -> Any:
    """The results of a list, in its order; see `Done.results`."""
    results: Any = _empty(len(texts), work.width, work.parts is not None)
    cut = 0
    progress = Progress(len(texts), show_progress_bar)
    windows = compute_windows(model, windows_of(texts), work, on_batch=progress.add, threads=not is_small(texts))
    try:
        with contextlib.closing(windows):
            for done in windows:
                results[done.item] = done.results
                cut += done.cut
    finally:
        progress.close()
    if cut:
        _log.info("%d of %d texts have more tokens than are read at once", cut, len(texts))
    return results


def compute_windows(
    model: PackedModel,
    windows: Iterable[tuple[T, Sequence[Text]]],
    work: Work,
    *,
    on_batch: Callable[[int, int], None] | None = None,
    threads: bool = True,
) -> Generator[Done[T], None, None]:
    """Computes a stream of (item, texts) windows, in order; memory is that of a few windows.

    `windows` is drawn from in a background thread, so reading a file overlaps with computing too. threads: False does
    all of it in the caller's. `on_batch(texts, tokens)` is called as batches are done. Close the generator to stop
    early.
    """
    seats = seats_here(model.device.type == "cuda") if threads else None
    balance = None if seats is None else Balance(model, seats)
    source = _batches(windows, work, seats)
    width = work.width if work.merge is None else work.merge.width
    open_windows: deque[tuple[Window[T], Done[T]]] = deque()

    def place(computed: Iterable[tuple[_Job[T], NDArray[np.float32]]]) -> None:
        for (batch, window, done), found in computed:
            _place(done.results, batch, found, work)
            done.tokens += len(batch.ids)
            window.batches -= 1
            if on_batch is not None:
                on_batch(len(batch.rows), len(batch.ids))

    def finished() -> Iterator[Done[T]]:
        while open_windows and open_windows[0][0].batches == 0:
            window, done = open_windows.popleft()
            if work.merge is not None and window.pieces is not None:
                done.results = work.merge(done.results, window.pieces)
            yield done

    def start(model: PackedModel, job: _Job[T]) -> Callable[[], NDArray[np.float32]]:
        took = None if balance is None else partial(balance.computed, len(job[0].ids))
        return launch(model, job[0], work.compute, took)

    with contextlib.ExitStack() as stack:
        arriving = stack.enter_context(contextlib.closing(in_background(source, _BATCHES_AHEAD) if threads else source))
        workers: Workers[_Job[T], NDArray[np.float32]] = stack.enter_context(model.workers(start))
        for piece in arriving:
            if isinstance(piece, Window):
                results = _empty(piece.texts, width, work.parts is not None)
                open_windows.append((piece, Done(piece.item, results, 0, piece.cut)))
            else:
                place(workers.put((piece, *open_windows[-1])))
            if balance is not None:
                balance.look()
            yield from finished()
            while len(open_windows) > workers.most:  # a slow replica holds up the first of them
                place(workers.rest())
                yield from finished()
        while computed := workers.rest():
            place(computed)
            yield from finished()
        yield from finished()


@torch.inference_mode()
def launch(
    model: PackedModel,
    batch: B,
    compute: Callable[[Any, B, Upload], torch.Tensor],
    took: Callable[[float], None] | None = None,
) -> Callable[[], NDArray[np.float32]]:
    """Starts one batch and returns how to get its result; never waits on CUDA. compute: as in `Work`, for any
    kind of batch. took(seconds): called for a GPU, which had the batch so long, where the result is got."""
    if model.device.type != "cuda":
        result = compute(model, batch, torch.from_numpy)
        return lambda: result.numpy()

    def upload(array: NDArray[Any]) -> torch.Tensor:
        # Only a copy from pinned memory lets the host go on at once.
        return torch.from_numpy(array).pin_memory().to(model.device, non_blocking=True)

    with torch.cuda.device(model.device):
        began, arrived = (torch.cuda.Event(enable_timing=took is not None) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        result = compute(model, batch, upload)
        landed = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        landed.copy_(result, non_blocking=True)
        arrived.record()

    def fetch() -> NDArray[np.float32]:
        arrived.synchronize()
        if took is not None:
            took(began.elapsed_time(arrived) / 1000)
        return landed.numpy()

    return fetch


def _batches(
    windows: Iterable[tuple[T, Sequence[Text]]], work: Work, seats: Seats | None
) -> Generator[Window[T] | Batch, None, None]:
    tokenising = in_turn(windows, work.tokenise) if seats is None else ahead(windows, work.tokenise, seats)
    with contextlib.closing(tokenising) as tokenised:
        yield from batches_of(tokenised, work.max_tokens, work.batch_size)


def rows_of_texts(batch: Batch, found: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Of float32 [tokens, width] those of each text."""
    ends = batch.cu_seqlens.tolist()
    return (found[start:end].copy() for start, end in zip(ends, ends[1:], strict=False))  # the batch's own memory goes


def _empty(texts: int, width: int, listed: bool) -> Any:
    return [None] * texts if listed else np.empty((texts, width), dtype=np.float32)


def _place(results: Any, batch: Batch, found: NDArray[np.float32], work: Work) -> None:
    if work.parts is None:
        results[batch.rows] = found
        return
    for row, part in zip(batch.rows.tolist(), work.parts(batch, found), strict=True):
        results[row] = part
