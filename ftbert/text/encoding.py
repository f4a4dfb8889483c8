"""Texts in, one vector per text out: tokenise and pack in the background, compute, pool.

Three stages run at the same time: a thread that reads and tokenises, the caller's thread that feeds the
device, and (on CUDA) the device itself, whose results are fetched a few batches later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from ftbert.checkpoint import is_unicode
from ftbert.progress import Progress
from ftbert.text.background import in_background
from ftbert.text.batching import Batch, Window, batches_of, windows_of
from ftbert.text.options import TextOptions
from ftbert.text.settings import TextSettings
from ftbert.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

# Tokenised batches waiting for the device, and results of the device waiting to be fetched.
_BATCHES_AHEAD, _RESULTS_BEHIND = 4, 3

_tokenizers: weakref.WeakKeyDictionary[Any, Tokenizer] = weakref.WeakKeyDictionary()


@dataclass
class Embedded(Generic[T]):
    """One finished window: what the caller gave with it, float32 [texts, hidden], and its real tokens."""

    item: T
    vectors: NDArray[np.float32]
    tokens: int


def encode(
    model: Any, texts: str | Sequence[str], how: TextOptions, show_progress_bar: bool | None = None
) -> NDArray[np.float32]:
    """float32 [n, width] in the order given, or [width] for a single str. See `ftbert.Model.encode`."""
    single = isinstance(texts, str)
    listed: Sequence[str] = [texts] if isinstance(texts, str) else texts
    _check_texts(listed)
    vectors = np.empty((len(listed), how.width), dtype=np.float32)
    progress = Progress(len(listed), show_progress_bar)
    try:
        with contextlib.closing(embed_windows(model, windows_of(listed), how, on_batch=progress.add)) as windows:
            for done in windows:
                vectors[done.item] = done.vectors
    finally:
        progress.close()
    return vectors[0] if single else vectors


def embed_windows(
    model: Any,
    windows: Iterable[tuple[T, Sequence[str]]],
    how: TextOptions,
    *,
    on_batch: Callable[[int, int], None] | None = None,
) -> Generator[Embedded[T], None, None]:
    """Embeds a stream of (item, texts) windows, in order; memory is that of two or three windows.

    `windows` is drawn from in a background thread, so reading a file overlaps with computing too.
    `on_batch(texts, tokens)` is called as batches are done. Close the generator to stop early.
    """
    tokenizer = tokenizer_of(model)
    return _compute(model, batches_of(windows, tokenizer, model.config.vocab, how), how, on_batch)


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


def _check_texts(texts: Sequence[str]) -> None:
    table = getattr(texts, "ndim", 1) != 1  # the items of a data frame are its columns' names, its length is another
    if isinstance(texts, (bytes, dict)) or table or not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
        raise TypeError(f"texts must be a str or a list of str; got {type(texts).__name__}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"texts[{index}] must be a str; got {type(text).__name__}. Convert it, or leave it out"
            )
        if not is_unicode(text):
            raise ValueError(
                f"texts[{index}] is not valid Unicode: it holds a lone surrogate. Decode it again"
            )


def _compute(
    model: Any,
    source: Iterator[Window[T] | Batch],
    how: TextOptions,
    on_batch: Callable[[int, int], None] | None,
) -> Generator[Embedded[T], None, None]:
    """The caller's side: feeds the device, fetches results late, yields windows when they are whole."""
    waiting: deque[tuple[Callable[[], NDArray[np.float32]], Batch, Window[T], Embedded[T]]] = deque()
    open_windows: deque[tuple[Window[T], Embedded[T]]] = deque()

    def fetch_oldest() -> None:
        fetch, batch, window, result = waiting.popleft()
        result.vectors[batch.rows] = fetch()
        result.tokens += len(batch.ids)
        window.batches -= 1
        if on_batch is not None:
            on_batch(len(batch.rows), len(batch.ids))

    def finished() -> Iterator[Embedded[T]]:
        while open_windows and open_windows[0][0].batches == 0:
            yield open_windows.popleft()[1]

    with contextlib.closing(in_background(source, _BATCHES_AHEAD)) as arriving:
        for piece in arriving:
            if isinstance(piece, Window):
                vectors = np.empty((piece.texts, how.width), dtype=np.float32)
                open_windows.append((piece, Embedded(piece.item, vectors, 0)))
            else:
                waiting.append((_launch(model, piece, how), piece, *open_windows[-1]))
            while len(waiting) > (_RESULTS_BEHIND if model.device.type == "cuda" else 0):
                fetch_oldest()
            yield from finished()
        while waiting:
            fetch_oldest()
        yield from finished()


@torch.inference_mode()
def _launch(model: Any, batch: Batch, how: TextOptions) -> Callable[[], NDArray[np.float32]]:
    """Starts one batch and returns how to get its float32 [texts, width]; never waits on CUDA."""
    if model.device.type != "cuda":
        vectors = _pool(model, batch, torch.from_numpy, how)
        return lambda: vectors.numpy()

    def upload(array: NDArray[Any]) -> torch.Tensor:
        # Only a copy from pinned memory lets the host go on at once.
        return torch.from_numpy(array).pin_memory().to(model.device, non_blocking=True)

    with torch.cuda.device(model.device):
        vectors = _pool(model, batch, upload, how)
        landed = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        landed.copy_(vectors, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

    def fetch() -> NDArray[np.float32]:
        arrived.synchronize()
        return landed.numpy()

    return fetch


def _pool(
    model: Any, batch: Batch, upload: Callable[[NDArray[Any]], torch.Tensor], how: TextOptions
) -> torch.Tensor:
    """float32 [texts, width]"""
    ids, cu_seqlens = upload(batch.ids), upload(batch.cu_seqlens)
    if batch.pooled is not None:
        hidden = model.forward_packed(ids, cu_seqlens, batch.longest)[upload(batch.pooled.tokens)]
        cu_seqlens = upload(batch.pooled.cu_seqlens)
    elif how.pooling == "cls":
        # One row a text is all that is read, and so all that the last layer computes.
        hidden = model.forward_packed(ids, cu_seqlens, batch.longest, want="first")
        cu_seqlens = torch.arange(len(cu_seqlens), dtype=torch.int32, device=cu_seqlens.device)
    else:
        hidden = model.forward_packed(ids, cu_seqlens, batch.longest)
    if how.truncate_dim is None:
        whole: torch.Tensor = torch.ops.ftbert.pooling(
            hidden, cu_seqlens, how.pooling, how.normalize or how.normalize_whole
        )
        return whole
    # As sentence-transformers does: the folder's Normalize sees the whole vector, the caller's the truncated one.
    whole = torch.ops.ftbert.pooling(hidden, cu_seqlens, how.pooling, how.normalize_whole)
    part = whole[:, : how.truncate_dim]
    return torch.nn.functional.normalize(part) if how.normalize else part.contiguous()
