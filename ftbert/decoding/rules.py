"""What changes logits before a token is chosen: transformers' logits processors, and OpenAI's two penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real

import torch
from torch import Tensor

from ftbert.decoding.chosen import sent


def is_number(value: object) -> bool:
    """Whether it is a finite number, of Python or numpy."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


@dataclass(frozen=True)
class Rules:
    """By the names of transformers' generate, where they mean the same; these defaults change nothing.

    presence_penalty, frequency_penalty: subtracted of tokens that were generated, once and each time (OpenAI, vLLM).
    min_new_tokens: where it is not None, min_length has no effect. sequence_bias: ids and what is added to the last
    one's logit behind the others. ends: tokens that end a text.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int | None = None
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """ValueError for a value that means nothing."""
        if not is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be a number above 0; got {self.repetition_penalty!r}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number; got {getattr(self, name)!r}")
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
            value = getattr(self, name)
            if value is None and name == "min_new_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0; got {value!r}")

    @property
    def change_nothing(self) -> bool:
        return replace(self, min_new_tokens=self.min_new_tokens or None) == Rules(ends=self.ends)


@dataclass(frozen=True)
class Texts:
    """The texts of a step, on the device of its logits. ids int64 [texts, longest], undefined past a text's end; begins
    int64 [texts, 1]: tokens of the prompt; lengths int64 [texts, 1]: tokens of the prompt and of what follows it."""

    ids: Tensor
    begins: Tensor
    lengths: Tensor

    def marked(self, which: Tensor, ids: Tensor, vocab: int) -> Tensor:
        """bool [texts, vocab]: the `ids` [texts, any] for which `which` holds."""
        found = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device)
        return found.scatter_(1, ids.where(which, vocab), True)[:, :vocab]

    def places(self) -> Tensor:
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    def last(self, count: int) -> Tensor:
        """[texts, count]: the last ids of each; of a shorter text anything."""
        back = torch.arange(-count, 0, device=self.ids.device)
        return self.ids.gather(1, (self.lengths + back).clamp(min=0))


def repetition(logits: Tensor, texts: Texts, penalty: float) -> Tensor:
    """Of each token that the text holds, prompt included, the logit divided by the penalty, times it below 0."""
    seen = texts.marked(texts.places() < texts.lengths, texts.ids, logits.shape[1])
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def counted(logits: Tensor, texts: Texts, presence: float, frequency: float) -> Tensor:
    """Less `presence` for each token that was generated, and `frequency` for each time."""
    places, vocab = texts.places(), logits.shape[1]
    new = (places >= texts.begins) & (places < texts.lengths)
    counts = torch.zeros(len(logits), vocab + 1, device=logits.device)
    counts = counts.scatter_add_(1, texts.ids.where(new, vocab), new.float())[:, :vocab]
    return logits - frequency * counts - presence * (counts > 0).float()


def no_repeat(logits: Tensor, texts: Texts, size: int) -> Tensor:
    """Without the tokens that would complete `size` tokens that the text already holds in this order."""
    if texts.ids.shape[1] < size:
        return logits
    parts = texts.ids.unfold(1, size, 1)  # [texts, begins of parts, size]
    same = (parts[..., :-1] == texts.last(size - 1)[:, None]).all(-1)
    there = texts.places()[: parts.shape[1]] + size <= texts.lengths
    return logits.masked_fill(texts.marked(same & there, parts[..., -1], logits.shape[1]), -torch.inf)


def biased(logits: Tensor, texts: Texts, sequence: Tensor, bias: float) -> Tensor:
    """bias is added to the last id's logit where the text ends with the others. sequence: int64 [ids] on the device. As
    in transformers a text has to have as many tokens as the whole sequence."""
    before, count = sequence[:-1], len(sequence)
    fits = (texts.last(count - 1) == before).all(1, keepdim=True)
    if count > 1:
        fits &= texts.lengths >= count
    added = torch.where(fits, bias, 0.0)
    return logits.index_add(1, sequence[-1:], added.to(logits.dtype))


class Ruled:
    """Rules and the tokens of the texts in slots, on the device of the logits. No call waits for it."""

    def __init__(self, rules: Rules, slots: int, positions: int, vocab: int, device: torch.device) -> None:
        """positions: tokens of the longest text. ValueError for ids of a sequence that the model does not have."""
        self._rules, self._device = rules, device
        with torch.inference_mode(False):  # it is written to also where that has ended
            self._ids = torch.zeros(slots, positions, dtype=torch.int64, device=device)
        bad = [one for one in rules.bad_words_ids if len(one) != 1 or one[0] not in rules.ends]  # as transformers
        for one in [*bad, *(ids for ids, _ in rules.sequence_bias)]:
            if not one or not all(0 <= token < vocab for token in one):
                raise ValueError(f"sequence_bias, bad_words_ids: expected ids from 0 to {vocab - 1}; got {list(one)}")
        self._bad = [self._sent(one) for one in bad if len(one) > 1]
        self._biases = [(self._sent(ids), bias) for ids, bias in rules.sequence_bias]
        suppressed = (*rules.suppress_tokens, *(one for (one,) in filter(lambda word: len(word) == 1, bad)))
        ids = (rules.ends, suppressed, rules.begin_suppress_tokens)
        self._ends, self._suppressed, self._suppressed_first = (self._mask(one, vocab) for one in ids)
        self._last = self._ids.new_zeros(3, 0)

    def _sent(self, ids: Sequence[int]) -> Tensor:
        return sent(torch.tensor(ids), self._device)

    def _mask(self, ids: Sequence[int] | frozenset[int], vocab: int) -> Tensor | None:
        known = [one for one in ids if 0 <= one < vocab]
        if not known:
            return None
        return sent(torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(known), True), self._device)

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self._ids[slot, : len(prompt)] = self._sent(prompt)

    def apply(self, logits: Tensor, slots: list[int], begins: list[int], lengths: list[int]) -> Tensor:
        """logits [texts, vocab] -> float32 [texts, vocab]. slots: of the texts; begins: tokens of each prompt; lengths:
        of each prompt with what was generated."""
        rules, logits = self._rules, logits.float()
        self._last = sent(torch.tensor([slots, begins, lengths]), self._device)
        ids = self._ids[:, : max(lengths)].index_select(0, self._last[0])
        texts = Texts(ids, self._last[1][:, None], self._last[2][:, None])
        for sequence, bias in self._biases:
            logits = biased(logits, texts, sequence, bias)
        if rules.repetition_penalty != 1:
            logits = repetition(logits, texts, rules.repetition_penalty)
        if rules.presence_penalty or rules.frequency_penalty:
            logits = counted(logits, texts, rules.presence_penalty, rules.frequency_penalty)
        if rules.no_repeat_ngram_size:
            logits = no_repeat(logits, texts, rules.no_repeat_ngram_size)
        for sequence in self._bad:
            logits = biased(logits, texts, sequence, -torch.inf)
        new = texts.lengths - texts.begins
        if self._ends is not None:
            if rules.min_new_tokens is None and min(lengths) < rules.min_length:
                logits = logits.masked_fill((texts.lengths < rules.min_length) & self._ends, -torch.inf)
            if rules.min_new_tokens and min(map(int.__sub__, lengths, begins)) < rules.min_new_tokens:
                logits = logits.masked_fill((new < rules.min_new_tokens) & self._ends, -torch.inf)
        if self._suppressed is not None:
            logits = logits.masked_fill(self._suppressed, -torch.inf)
        if self._suppressed_first is not None:
            logits = logits.masked_fill((new == 0) & self._suppressed_first, -torch.inf)
        return logits

    def add(self, chosen: Tensor) -> None:
        """chosen int64 [texts]: the next token of each text of the last `apply`; -1 where logits were not
        finite, which is an error for whoever reads the ids."""
        slots, _, lengths = self._last
        self._ids.index_put_((slots, lengths), chosen.clamp(min=0))
