"""The head of a GLiNER on packed rows: scores of runs of words, or of words, for each label of their text.

What the package computes for each run of words, [start, end] through a matrix, is a sum of two products, of one for
each word: out(relu([s, e]) @ W) has relu(s) @ W's upper half, once a word. Behind the last relu everything is linear,
so labels go through those matrices, of which a text has fewer than runs of words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ftbert.checkpoint import EntityHead

_SPANS = "span_rep_layer.span_rep_layer"


def runs(words: int, width: int) -> tuple[list[int], list[int]]:
    """The first and the last word of each run of at most `width` of a text's words, by first, then by last."""
    pairs = [(first, last) for first in range(words) for last in range(first, min(first + width, words))]
    return [first for first, _ in pairs], [last for _, last in pairs]


def run_count(words: int, width: int) -> int:
    """How many `runs` there are."""
    short = min(words, width)
    return words * short - short * (short - 1) // 2


class EntityScores:
    """head: of a checkpoint; its tensors are read to `place`, in `element`."""

    def __init__(self, head: EntityHead, encoder_hidden: int, place: torch.device, element: torch.dtype) -> None:
        self._head = head
        self._of = {name: head.source.read(name).to(place, element) for name in head.shapes(encoder_hidden)}
        self._lstm: nn.LSTM | None = None
        if head.lstm_layers:
            self._lstm = nn.LSTM(head.hidden, head.hidden // 2, head.lstm_layers, bidirectional=True, batch_first=True)
            beginning = "rnn.lstm."
            own = {n.removeprefix(beginning): value for n, value in self._of.items() if n.startswith(beginning)}
            self._lstm.load_state_dict(own)
            self._lstm = self._lstm.to(place, element).eval()

    def __call__(
        self,
        words: Tensor,
        there: Tensor,
        labels: Tensor,
        counts: Sequence[int],
        of_labels: Sequence[int],
        ends: Tensor,
    ) -> list[Tensor]:
        """words [words, hidden]: the first token of each, of all texts in turn; there bool [words]: whether it has one;
        labels [labels, hidden]; counts, of_labels: words and labels of each text; ends int [2, runs]: the first and
        the last word of each run of all texts, as of `runs` -> logits of each text, [runs, labels], or of a head of
        words [words, labels, 3]."""
        if "token_rep_layer.projection.weight" in self._of:
            words, labels = (self._linear(rows, "token_rep_layer.projection") for rows in (words, labels))
        words = words * there[:, None]
        if self._lstm is not None:
            packed = nn.utils.rnn.pack_sequence(words.split(list(counts)), enforce_sorted=False)
            words = torch.cat(nn.utils.rnn.unpack_sequence(self._lstm(packed)[0]))
        if self._head.kind == "token_level":
            return self._words(words, labels, counts, of_labels)
        of_texts = [run_count(count, self._head.max_width) for count in counts]
        return self._runs(words, labels, ends.split(of_texts, dim=1), of_labels)

    def _runs(self, words: Tensor, labels: Tensor, ends: Sequence[Tensor], of_labels: Sequence[int]) -> list[Tensor]:
        labels = self._two(labels, "prompt_rep_layer")
        firsts, lasts = (self._two(words, f"{_SPANS}.project_{end}").relu() for end in ("start", "end"))
        two = self._head.kind == "markerV0"  # matrices behind the joined ends
        joining = f"{_SPANS}.out_project" + (".0" if two else "")
        of_first, of_last = self._of[f"{joining}.weight"].chunk(2, dim=1)
        firsts = functional.linear(firsts, of_first, self._of[f"{joining}.bias"])
        lasts = functional.linear(lasts, of_last)
        offsets = labels.new_zeros(len(labels))
        if two:
            offsets = labels @ self._of[f"{_SPANS}.out_project.3.bias"]
            labels = labels @ self._of[f"{_SPANS}.out_project.3.weight"]
        found = []
        by_text = labels.split(list(of_labels)), offsets.split(list(of_labels))
        for (begins, finishes), own, offset in zip(ends, *by_text, strict=True):  # a text's runs, not all at once
            joined = firsts[begins] + lasts[finishes]
            found.append(functional.linear(joined.relu() if two else joined, own, offset))
        return found

    def _words(self, words: Tensor, labels: Tensor, counts: Sequence[int], of_labels: Sequence[int]) -> list[Tensor]:
        plain, factors = self._linear(words, "scorer.proj_token").chunk(2, dim=1)
        of_label, label_factors = self._linear(labels, "scorer.proj_label").chunk(2, dim=1)
        by_word, by_label, by_both = self._of["scorer.out_mlp.0.weight"].chunk(3, dim=1)
        plain = functional.linear(plain, by_word, self._of["scorer.out_mlp.0.bias"])
        of_label = functional.linear(of_label, by_label)
        found, word, label = [], 0, 0
        for count, own in zip(counts, of_labels, strict=True):
            rows, columns = slice(word, word + count), slice(label, label + own)
            both = factors[rows, None] * label_factors[None, columns]  # [words, labels, hidden]
            sums = functional.linear(both, by_both) + plain[rows, None] + of_label[None, columns]
            found.append(self._linear(sums.relu(), "scorer.out_mlp.3"))
            word, label = word + count, label + own
        return found

    def _linear(self, rows: Tensor, name: str) -> Tensor:
        return functional.linear(rows, self._of[f"{name}.weight"], self._of[f"{name}.bias"])

    def _two(self, rows: Tensor, name: str) -> Tensor:
        return self._linear(self._linear(rows, f"{name}.0").relu(), f"{name}.3")
