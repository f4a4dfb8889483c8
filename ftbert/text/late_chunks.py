"""Late chunking: one pass over a whole text, then a vector for each span of it, pooled of the states of its tokens.

A text of more tokens than the model reads goes through in windows that overlap by a quarter; a token's state is that of
the window in which it stands farther from the edge. (Guenther et al., "Late Chunking", 2024, take the mean.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.packed_model import PackedModel
from ftbert.text.batching import Batch
from ftbert.text.checks import positive
from ftbert.text.computing import Work
from ftbert.text.encoding import finished, text_options, tokenizer_of
from ftbert.text.options import TextOptions
from ftbert.text.pooling import Upload, pooled_rows
from ftbert.text.pooling_settings import POOLINGS
from ftbert.text.settings import TextSettings
from ftbert.text.token_arrays import SpanVectors
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Tokens, check_texts, tokens_of

Spans: TypeAlias = list[tuple[int, int]]

_WHOLE = 1 << 30  # tokens; no text has more
_OVERLAP = 4  # a window shares one part in so many with its neighbour


class SpannedText(str):
    """A text with spans of it, in characters: what `Work.tokenise` gets."""

    spans: Spans


@dataclass(frozen=True)
class Chunks:
    """Of one text's tokens in a batch. windows: the tokens of each; rows: of each span the places of its tokens; spans:
    in characters."""

    windows: NDArray[np.int64]
    rows: list[NDArray[np.int64]]
    spans: Spans


def cut_embedding(model: PackedModel, size: int, **given: Any) -> Work:
    """As `chunk_embedding`, `SpanVectors` for each text, whose spans have so many tokens."""
    work, tokenizer = chunk_embedding(model, **given), tokenizer_of(model)
    positive("chunk_tokens", size)

    def tokenise(texts: Sequence[Any]) -> Tokens:
        return work.tokenise(_marked(texts, split(tokenizer, texts, size)))

    def parts(batch: Batch, found: NDArray[np.float32]) -> Iterator[SpanVectors]:
        assert batch.marks is not None and work.parts is not None
        for mark, values in zip(batch.marks, work.parts(batch, found), strict=True):
            yield SpanVectors(np.array(mark.spans, dtype=np.int64).reshape(-1, 2), values)

    return replace(work, tokenise=tokenise, parts=parts)


def chunk_embedding(model: PackedModel, **given: Any) -> Work:
    """float32 [spans, width] for each `SpannedText`. given: of `TextOptions.choose`. ValueError for a model that reads
    texts otherwise."""
    how, tokenizer, config = text_options(model, **given), tokenizer_of(model), model.config
    settings = tokenizer.settings
    if not takes_chunks(settings):
        what = "a table without a network" if settings.static is not None else "one whose end of a text is its vector"
        raise ValueError(f"chunks are for models that pool tokens which see their text; this one is {what}")

    def compute(model: PackedModel, batch: Batch, upload: Upload) -> torch.Tensor:
        assert batch.marks is not None
        windows = np.concatenate([one.windows for one in batch.marks])
        cu_seqlens = np.concatenate([[0], np.cumsum(windows)]).astype(np.int32)
        longest = int(windows.max(initial=0))
        hidden = model.forward_packed(upload(batch.ids), upload(cu_seqlens), longest)
        starts = batch.cu_seqlens.tolist()
        rows = [start + span for start, one in zip(starts, batch.marks, strict=False) for span in one.rows]
        lengths = np.array([len(one) for one in rows], dtype=np.int64)
        picked = hidden[upload(np.concatenate([*rows, np.empty(0, np.int64)]))]
        return finished(pooled_rows(model, picked, lengths, how.pooling, upload), how)

    def parts(batch: Batch, found: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        assert batch.marks is not None
        ends = np.cumsum([len(one.rows) for one in batch.marks])[:-1]
        return iter(np.split(found, ends))

    return Work(
        compute=compute,
        tokenise=lambda texts: _tokenise(tokenizer, texts, how).check(config.vocab, config.token_types),
        parts=parts,
        width=how.width,
        max_tokens=how.max_tokens,
        batch_size=how.batch_size,
    )


def takes_chunks(settings: TextSettings) -> bool:
    return settings.static is None and not settings.filled and settings.pooling in POOLINGS


def spanned(model: PackedModel, texts: Sequence[str], chunks: Any, chunk_tokens: int | None) -> list[SpannedText]:
    """The texts with the spans that `chunks` lists for each, or of so many tokens each. ValueError names text and span;
    TypeError."""
    check_texts(texts)
    if (chunks is None) == (chunk_tokens is None):
        raise TypeError("give chunks, spans of characters for each text, or chunk_tokens, tokens of a span")
    if chunk_tokens is not None:
        listed = split(tokenizer_of(model), texts, positive("chunk_tokens", chunk_tokens))
    else:
        if not isinstance(chunks, list | tuple) or len(chunks) != len(texts):
            got = f"{len(chunks)} lists" if isinstance(chunks, list | tuple) else type(chunks).__name__
            raise ValueError(f"chunks must be a list of spans for each of {len(texts)} texts; got {got}")
        listed = [
            [_checked(span, text, f"chunks[{i}][{j}]") for j, span in enumerate(_listed(spans, f"chunks[{i}]"))]
            for i, (text, spans) in enumerate(zip(texts, chunks, strict=True))
        ]
    return _marked(texts, listed)


def _marked(texts: Sequence[str], listed: list[Spans]) -> list[SpannedText]:
    made = [SpannedText(text) for text in texts]
    for text, spans in zip(made, listed, strict=True):
        text.spans = spans
    return made


def split(tokenizer: Tokenizer, texts: Sequence[str], size: int) -> list[Spans]:
    """Spans of `size` tokens each, the last of the rest, without gaps: each begins where the one before ends. A text
    without a token is one span."""
    found = []
    for text, encoding in zip(texts, tokenizer.encodings(texts, _WHOLE), strict=True):
        ends = _ends(encoding, 0)
        own = ends[ends > 0].tolist()
        cuts = list(dict.fromkeys(own[size - 1 : len(own) - 1 : size]))
        cuts = [cut for cut in cuts if cut < len(text)]
        found.append(list(zip([0, *cuts], [*cuts, len(text)], strict=True)) if text else [])
    return found


def _listed(spans: Any, name: str) -> Any:
    if not isinstance(spans, list | tuple | np.ndarray):
        raise TypeError(f"{name} must be a list of (start, end); got {type(spans).__name__}")
    return spans


def _checked(span: Any, text: str, name: str) -> tuple[int, int]:
    try:
        start, end = map(int, span)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be (start, end), places of characters; got {span!r}") from None
    if not 0 <= start < end <= len(text):
        words = f"a span within the text's {len(text)} characters, start before end"
        raise ValueError(f"{name}: {words}; got {start}, {end}")
    return start, end


def _ends(encoding: Any, prompt: int) -> NDArray[np.int64]:
    """[tokens]: in characters of the text behind a prompt of so many, where each token ends; 0 of special ones, and of
    those of the prompt."""
    ends = np.array([end for _, end in encoding.offsets], dtype=np.int64) - prompt
    ends[np.array(encoding.special_tokens_mask, dtype=np.bool_)] = 0
    return np.maximum(ends, 0)


def _tokenise(tokenizer: Tokenizer, texts: Sequence[Any], how: TextOptions) -> Tokens:
    """A text's windows one behind the other, as one row."""
    encodings = tokenizer.encodings([how.prompt + text for text in texts], _WHOLE)
    before, behind = tokenizer.ends(how.prompt)
    rows, marks, cut = [], [], 0
    for text, encoding in zip(texts, encodings, strict=True):
        ids, ends = np.array(encoding.ids, dtype=np.int64), _ends(encoding, len(how.prompt))
        windows, chosen = _windows(len(ids), how.max_length, before, behind)
        places = np.concatenate(windows) if windows else np.empty(0, np.int64)
        lengths = np.array([len(one) for one in windows], dtype=np.int64)
        spans = [_of_span(ends, start, end, len(text), how.unpooled_tokens) for start, end in text.spans]
        rows.append(ids[places].tolist())
        marks.append(Chunks(lengths, [chosen[span] for span in spans], text.spans))
        cut += len(windows) > 1
    return replace(tokens_of(rows), cut=cut, marks=marks)


def _of_span(ends: NDArray[np.int64], start: int, end: int, characters: int, unpooled: int) -> NDArray[np.int64]:
    """The tokens that end within a span; with the special ones, and the prompt's, before a text of which it is the
    beginning, and those behind where it is the end. unpooled: so many at the beginning are left out."""
    inside = (ends > start) & (ends <= end)
    own = np.flatnonzero(ends > 0)
    first, last = (own[0], own[-1]) if len(own) else (len(ends), -1)
    places = np.arange(len(ends))
    if start == 0:
        inside |= places < first
    if end == characters:
        inside |= places > last
    return places[inside & (places >= unpooled)]


def _windows(tokens: int, length: int, before: int, behind: int) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """The tokens of each window, and of each token the row in which its state stands, among those of all windows.

    Each window of a text of more than `length` tokens is between its first `before` and last `behind`.
    """
    if tokens <= length:
        return ([np.arange(tokens)] if tokens else []), np.arange(tokens)
    room = length - before - behind
    step = max(1, room - room // _OVERLAP)
    inside = tokens - before - behind
    firsts = list(range(0, max(inside - room, 0), step)) + [max(inside - room, 0)]
    head, tail = np.arange(before), np.arange(tokens - behind, tokens)
    windows = [np.concatenate([head, before + np.arange(first, first + room), tail]) for first in firsts]
    chosen = np.empty(tokens, dtype=np.int64)
    own = np.arange(inside)
    # The window whose edge is farthest: between two neighbours, the middle of what they share.
    limits = [(left + room + right) / 2 for left, right in zip(firsts, firsts[1:], strict=False)]
    owner = np.searchsorted(limits, own, side="right")
    chosen[before : tokens - behind] = owner * length + before + own - np.array(firsts)[owner]
    chosen[:before] = head
    chosen[tokens - behind :] = (len(firsts) - 1) * length + length - behind + np.arange(behind)
    return windows, chosen
