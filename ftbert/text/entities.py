"""Entities by labels, as the package `gliner` finds them: labels and words to ids, scores to entities.

A text goes through the model behind its labels: entity token, label, entity token, label, ..., separator, words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ftbert.caller import warn_caller
from ftbert.checkpoint import EntityHead
from ftbert.dtypes import DTYPES
from ftbert.packed_model import PackedModel, kept
from ftbert.progress import Progress
from ftbert.text.auto_tokenizer import load_tokenizer
from ftbert.text.batching import by_token_budget
from ftbert.text.checks import positive
from ftbert.text.computing import launch
from ftbert.text.entity_scores import EntityScores, run_count, runs
from ftbert.text.pooling import Upload
from ftbert.text.tokens import check_texts, listed
from ftbert.text.workers import Workers

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")

_WINDOW = 2048  # texts whose words are held at once

Entity = dict[str, Any]
Scores = NDArray[np.float32]
Span = tuple[int, int, int, float]  # first and last word, label, score


@dataclass(frozen=True)
class _Prompted:
    """A text behind its labels. words: characters of each, [start, end]. places: of each word's first token, -1 where
    truncation has dropped it. of_labels: of each label's token."""

    ids: list[int]
    words: list[tuple[int, int]]
    places: list[int]
    of_labels: list[int]


@dataclass(frozen=True)
class _Batch:
    """rows: which texts. read int64 [words + labels]: tokens whose hidden states are read; there bool [words]: whether
    a word has one. words, labels: of each text. ends int64 [2, runs]: words of the batch, see `runs`."""

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    longest: int
    read: NDArray[np.int64]
    there: NDArray[np.bool_]
    words: list[int]
    labels: list[int]
    ends: NDArray[np.int64]


def head_of(model: PackedModel) -> EntityHead:
    head = model.checkpoint.entities
    if head is None:
        raise ValueError(
            "predict_entities is for the folder of a GLiNER (gliner_config.json), and this model has no head for "
            "entities by labels; token_classify finds those of a token classification head"
        )
    return head


def predict_entities(
    model: PackedModel,
    texts: Sequence[str],
    labels: Sequence[Any],
    *,
    threshold: float,
    flat_ner: bool,
    multi_label: bool,
    batch_size: int | None,
    max_tokens: int,
    show_progress_bar: bool | None,
) -> list[list[Entity]]:
    """`TextModel.predict_entities` of several texts."""
    head = head_of(model)
    check_texts(texts)
    names = _labels(labels, len(texts))
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a number from 0 to 1; got {threshold!r}")
    positive("max_tokens", max_tokens)
    if batch_size is not None:
        positive("batch_size", batch_size)
    found: list[list[Entity]] = [[] for _ in texts]
    asked = [i for i, text in enumerate(texts) if text.strip() and names[i]]
    prompter = kept(model, "entities", lambda: _Prompter(head))
    progress = Progress(len(texts), show_progress_bar, label="entities")
    progress.add(len(texts) - len(asked), 0)
    try:
        with model.workers(lambda replica, batch: launch(replica, batch, _compute)) as workers:
            for start in range(0, len(asked), _WINDOW):
                window = asked[start : start + _WINDOW]
                made = prompter([texts[i] for i in window], [names[i] for i in window])
                prompted = dict(zip(window, made, strict=True))
                _expect_room(prompted, names, model.config.max_seq)
                for batch, scores in _computed(workers, _batches(head, prompted, max_tokens, batch_size)):
                    for i, own in zip(batch.rows.tolist(), _of_texts(head, batch, scores), strict=True):
                        words = prompted[i].words
                        best = _greedy(_candidates(head, len(words), own, threshold), flat_ner, multi_label)
                        found[i] = [_entity(texts[i], words, names[i], span) for span in best]
                    progress.add(len(batch.rows), len(batch.ids))
    finally:
        progress.close()
    return found


def _expect_room(prompted: Mapping[int, _Prompted], names: Sequence[Sequence[str]], most: int) -> None:
    for i, one in prompted.items():
        if len(one.ids) > most:
            raise ValueError(
                f"texts[{i}] has {len(one.ids)} tokens with its {len(names[i])} labels, and the model reads {most}: "
                "cut the text, or ask for fewer labels at a time"
            )


def _computed(workers: Workers[_Batch, Scores], batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, Scores]]:
    for batch in batches:
        yield from workers.put(batch)
    while rest := workers.rest():
        yield from rest


def _entity(text: str, words: Sequence[tuple[int, int]], names: Sequence[str], span: Span) -> Entity:
    first, last, label, score = span
    start, end = words[first][0], words[last][1]
    return {"start": start, "end": end, "text": text[start:end], "label": names[label], "score": score}


def _labels(labels: Any, texts: int) -> list[list[str]]:
    """Those of each text, each once."""
    if any(isinstance(one, Mapping) for one in [labels, *(labels if isinstance(labels, list | tuple) else [])]):
        raise TypeError("labels: expected a list of str; descriptions of labels (a dict) are not supported")
    each = listed(labels) if not isinstance(labels, str) else [labels]
    lists = [isinstance(one, list | tuple) for one in each]
    if any(lists):
        if not all(lists) or len(each) != texts:
            raise ValueError(f"labels: expected a list of str, or one such list for each of {texts} texts")
        sets = [list(one) for one in each]
    else:
        sets = [list(each)] * texts
    if not each or not all(isinstance(name, str) and name for one in sets for name in one):
        raise ValueError(f"labels: expected at least one, each a str that is not empty; got {labels!r}")
    return [list(dict.fromkeys(one)) for one in sets]


class _Prompter:
    """head: its tokenizer's folder and special tokens, which are added where the files do not have them."""

    def __init__(self, head: EntityHead) -> None:
        self._head = head
        tokenizer = load_tokenizer(head.tokenizer, by_class=True)  # as the package does
        # And so: transformers of release 5 adds these tokens only where it is told to.
        for kind in ("bos", "eos"):
            if hasattr(tokenizer, f"add_{kind}_token") and getattr(tokenizer, f"{kind}_token_id") is not None:
                setattr(tokenizer, f"add_{kind}_token", True)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"{head.tokenizer}: {type(tokenizer).__name__} gives no words; expected tokenizer.json")
        if head.entity_token not in tokenizer.get_vocab():
            tokenizer.add_tokens(["[FLERT]", head.entity_token, head.separator], special_tokens=True)
        self._tokenizer = tokenizer
        self._class_id = tokenizer.convert_tokens_to_ids(head.entity_token) if head.class_id < 0 else head.class_id

    def __call__(self, texts: Sequence[str], labels: Sequence[Sequence[str]]) -> list[_Prompted]:
        head = self._head
        words = [[match.span() for match in _WORD.finditer(text)] for text in texts]
        if any(len(one) > head.max_words for one in words):
            warn_caller(f"texts of more than {head.max_words} words are truncated to so many, as the config says")
            words = [one[: head.max_words] for one in words]
        prompts = [[part for name in own for part in (head.entity_token, name)] + [head.separator] for own in labels]
        given = [
            prompt + [text[start:end] for start, end in own]
            for prompt, text, own in zip(prompts, texts, words, strict=True)
        ]
        if not given:
            return []
        made = self._tokenizer(given, is_split_into_words=True, truncation=True)
        return [
            self._placed(made["input_ids"][i], made.word_ids(i), words[i], len(prompts[i]), len(labels[i]))
            for i in range(len(given))
        ]

    def _placed(
        self, ids: list[int], word_ids: list[int | None], words: list[tuple[int, int]], skipped: int, labels: int
    ) -> _Prompted:
        """skipped: words of the prompt. Words are counted by their tokens: a word without a token moves all behind it,
        in the package too."""
        before = [None, *word_ids]
        firsts = [at for at, word in enumerate(word_ids) if word is not None and word != before[at]]
        places = [*firsts[skipped:], *[-1] * len(words)][: len(words)]
        of_labels = [at + self._head.label_behind for at, one in enumerate(ids) if one == self._class_id][:labels]
        return _Prompted(ids, words, places, of_labels)


def _batches(
    head: EntityHead, prompted: Mapping[int, _Prompted], max_tokens: int, batch_size: int | None
) -> Iterator[_Batch]:
    """Longest first."""
    rows = np.array(list(prompted), dtype=np.int64)
    lengths = np.array([len(one.ids) for one in prompted.values()], dtype=np.int64)
    for order in by_token_budget(np.argsort(-lengths, kind="stable"), lengths, max_tokens, batch_size):
        texts = [prompted[int(row)] for row in rows[order]]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int32)
        starts = cu_seqlens[:-1].tolist()
        begun = list(zip(starts, texts, strict=True))
        places = np.array([at + start if at >= 0 else -1 for start, one in begun for at in one.places])
        of_labels = [at + start for start, one in begun for at in one.of_labels]
        words = [len(one.words) for one in texts]
        befores = np.cumsum([0, *words[:-1]])
        of_runs = [np.array(runs(count, head.max_width)) for count in words] if head.kind != "token_level" else []
        ends = [own + before for own, before in zip(of_runs, befores, strict=bool(of_runs))]
        yield _Batch(
            rows=rows[order],
            ids=np.concatenate([one.ids for one in texts]).astype(np.int64),
            cu_seqlens=cu_seqlens,
            longest=int(lengths[order].max()),
            read=np.concatenate([places.clip(0), of_labels]).astype(np.int64),
            there=places >= 0,
            words=words,
            labels=[len(one.of_labels) for one in texts],
            ends=np.concatenate(ends, axis=1) if ends else np.empty((2, 0), np.int64),
        )


def _compute(model: PackedModel, batch: _Batch, upload: Upload) -> torch.Tensor:
    """The scores of all texts in turn, float32 [all]: probabilities."""
    head = head_of(model)
    scores = kept(
        model, "entity scores",
        lambda: EntityScores(head, model.config.hidden, model.device, DTYPES[model.encoder.dtype()]),
    )  # fmt: skip
    ids, cu_seqlens = upload(batch.ids), upload(batch.cu_seqlens)
    rows = model.forward_packed(ids, cu_seqlens, batch.longest, want="rows", rows=upload(batch.read))
    words, labels = rows.split([len(batch.there), len(batch.read) - len(batch.there)])
    made = scores(words, upload(batch.there), labels, batch.words, batch.labels, upload(batch.ends))
    return torch.cat([one.float().sigmoid().flatten() for one in made])


def _of_texts(head: EntityHead, batch: _Batch, scores: Scores) -> Iterator[Scores]:
    """[runs or words, labels(, 3)] of each text."""
    start = 0
    for words, labels in zip(batch.words, batch.labels, strict=True):
        of_words = head.kind == "token_level"
        shape = (words, labels, 3) if of_words else (run_count(words, head.max_width), labels)
        count = int(np.prod(shape))
        yield scores[start : start + count].reshape(shape)
        start += count


def _candidates(head: EntityHead, words: int, scores: Scores, threshold: float) -> list[Span]:
    """scores: as of `_of_texts`, of one text of so many words."""
    if head.kind != "token_level":
        firsts, lasts = runs(words, head.max_width)
        return [
            (firsts[run], lasts[run], label, float(scores[run, label]))
            for run, label in zip(*map(list, np.nonzero(scores > threshold)), strict=True)
        ]
    starts, ends, inside = np.moveaxis(scores, 2, 0)
    found = []
    ended = np.argwhere(ends > threshold).tolist()
    for first, label in np.argwhere(starts > threshold).tolist():
        for last, other in ended:
            if other != label or last < first:
                continue
            within = inside[first : last + 1, label]
            if (within >= threshold).all():
                score = min(float(within.min()), float(starts[first, label]), float(ends[last, label]))
                found.append((first, last, label, score))
    return found


def _greedy(spans: Sequence[Span], flat: bool, several_labels: bool) -> list[Span]:
    """The best first, each where it does not overlap one that is there: by start. flat: nor lies within one."""
    overlap: Callable[[Span, Span], bool] = _overlap if flat else _cross
    found: list[Span] = []
    for one in sorted(spans, key=lambda span: -span[3]):
        if not any((not several_labels) if one[:2] == other[:2] else overlap(one, other) for other in found):
            found.append(one)
    return sorted(found, key=lambda span: span[0])


def _overlap(one: Span, other: Span) -> bool:
    return not (one[0] > other[1] or other[0] > one[1])


def _cross(one: Span, other: Span) -> bool:
    within = (one[0] <= other[0] and one[1] >= other[1]) or (other[0] <= one[0] and other[1] >= one[1])
    return _overlap(one, other) and not within
