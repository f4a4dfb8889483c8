"""Rules on the logits of a step, whose texts have each their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ftbert.decoding.chosen import sent
from ftbert.decoding.rules import Rules


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


def repetition(logits: Tensor, texts: Texts, penalty: Tensor) -> Tensor:
    """Of each token that the text holds, prompt included, the logit divided by its penalty [texts, 1], times it below
    0."""
    seen = texts.marked(texts.places() < texts.lengths, texts.ids, logits.shape[1])
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def counted(logits: Tensor, texts: Texts, presence: Tensor, frequency: Tensor) -> Tensor:
    """Less `presence` [texts, 1] for each token that was generated, and `frequency` for each time."""
    places, vocab = texts.places(), logits.shape[1]
    new = (places >= texts.begins) & (places < texts.lengths)
    counts = torch.zeros(len(logits), vocab + 1, device=logits.device)
    counts = counts.scatter_add_(1, texts.ids.where(new, vocab), new.float())[:, :vocab]
    return logits - frequency * counts - presence * (counts > 0).float()


def no_repeat(logits: Tensor, texts: Texts, size: int, asked: Tensor) -> Tensor:
    """Without the tokens that would complete `size` tokens that the text already holds in this order; of texts that
    ask for it, bool [texts, 1]."""
    if texts.ids.shape[1] < size:
        return logits
    parts = texts.ids.unfold(1, size, 1)  # [texts, begins of parts, size]
    same = (parts[..., :-1] == texts.last(size - 1)[:, None]).all(-1)
    there = texts.places()[: parts.shape[1]] + size <= texts.lengths
    marked = texts.marked(same & there & asked, parts[..., -1], logits.shape[1])
    return logits.masked_fill(marked, -torch.inf)


def biased(logits: Tensor, texts: Texts, sequence: Tensor, bias: float, asked: Tensor) -> Tensor:
    """bias is added to the last id's logit where the text ends with the others; of texts that ask for it, bool
    [texts, 1]. sequence: int64 [at least 2 ids] on the device. As in transformers a text has to have as many tokens as
    the whole sequence."""
    before, count = sequence[:-1], len(sequence)
    fits = (texts.last(count - 1) == before).all(1, keepdim=True) & (texts.lengths >= count) & asked
    added = torch.where(fits, bias, 0.0)
    return logits.index_add(1, sequence[-1:], added.to(logits.dtype))


@dataclass(frozen=True)
class RuledText:
    """One text of a step: where its logits are, where its tokens are, and how many of them its prompt has."""

    row: int
    slot: int
    begin: int
    rules: Rules


class Histories:
    """The tokens of texts whose rules count them, on the device, by slot."""

    def __init__(self, slots: int, positions: int, device: torch.device) -> None:
        self._shape, self.device = (slots, positions), device
        self._ids: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """int64 [slots, positions], from when it is first asked for."""
        if self._ids is None:
            with torch.inference_mode(False):  # it is written to also where that has ended
                self._ids = torch.zeros(self._shape, dtype=torch.int64, device=self.device)
        return self._ids

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self.ids[slot, : len(prompt)] = sent(torch.tensor(prompt), self.device)


def counts_tokens(rules: Rules) -> bool:
    """Whether they ask which tokens a text holds."""
    penalties = rules.repetition_penalty != 1 or rules.presence_penalty or rules.frequency_penalty
    return bool(penalties or rules.no_repeat_ngram_size or _sequences(rules))


class StepRules:
    """Rules of the same texts, step after step: their values lie on the device, and no call waits for it."""

    def __init__(self, texts: Sequence[RuledText], rows: int, vocab: int, histories: Histories) -> None:
        """texts: those of the step's `rows` that have rules."""
        self._device = device = histories.device
        self._histories, self._texts, self._of_all = histories, texts, len(texts) == rows
        rules = [one.rules for one in texts]

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return sent(torch.tensor(values, dtype=dtype)[:, None], device)

        def places(found: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
            """Of ids by text where they are in the logits of these texts, and the text of each."""
            if not sum(map(len, found)):
                return None
            row = torch.repeat_interleave(torch.tensor([len(one) for one in found]))
            return sent(torch.cat(list(found)) + row * vocab, device), sent(row, device)

        self._rows = sent(torch.tensor([one.row for one in texts]), device)
        fixed = [_fixed(one, vocab) for one in rules]
        self._fixed = places([ids for ids, _ in fixed])
        if self._fixed is not None:
            self._fixed_values = sent(torch.cat([values for _, values in fixed]), device)
        self._ends = places([_known(one.ends, vocab) for one in rules])
        self._least = [  # tokens of prompt and text before which no token ends it
            one.rules.min_length if one.rules.min_new_tokens is None else one.begin + one.rules.min_new_tokens
            for one in texts
        ]
        self._least_there = column(self._least, torch.int64)[:, 0]
        self._first = places([_known(one.begin_suppress_tokens, vocab) for one in rules])
        self._repetition = self._presence = None
        if any(one.repetition_penalty != 1 for one in rules):
            self._repetition = column([one.repetition_penalty for one in rules])
        if any(one.presence_penalty or one.frequency_penalty for one in rules):
            self._presence = column([one.presence_penalty for one in rules])
            self._frequency = column([one.frequency_penalty for one in rules])
        sizes = {one.no_repeat_ngram_size for one in rules} - {0}
        self._sizes = [(n, column([one.no_repeat_ngram_size == n for one in rules], torch.bool)) for n in sorted(sizes)]
        sequences = dict.fromkeys(one for each in rules for one in _sequences(each))
        self._sequences = [
            (sent(torch.tensor(one[0]), device), one[1], column([one in _sequences(of) for of in rules], torch.bool))
            for one in sequences
        ]
        self._counts = any(map(counts_tokens, rules))
        self._last = self._rows.new_zeros(3, 0)

    def apply(self, logits: Tensor, new: Sequence[int]) -> Tensor:
        """logits [rows, vocab] -> float32 [rows, vocab], other memory. new: tokens that each of the texts has behind
        its prompt."""
        begins = [one.begin for one in self._texts]
        lengths = [*map(int.__add__, begins, new)]
        self._last = sent(torch.tensor([[one.slot for one in self._texts], begins, lengths]), self._device)
        if self._of_all:
            return self._applied(logits.to(torch.float32, copy=True), lengths, new)
        all_rows = logits.to(torch.float32, copy=True)
        return all_rows.index_copy_(0, self._rows, self._applied(all_rows.index_select(0, self._rows), lengths, new))

    def _applied(self, logits: Tensor, lengths: Sequence[int], new: Sequence[int]) -> Tensor:
        """In place as far as it goes. What leaves tokens out comes first: no later rule brings them back."""
        slots, begins, there = self._last
        flat = logits.view(-1)
        if self._fixed is not None:
            flat.index_add_(0, self._fixed[0], self._fixed_values)
        if self._ends is not None and any(map(int.__lt__, lengths, self._least)):
            self._leave_out(flat, self._ends, there < self._least_there)
        if self._first is not None and 0 in new:
            self._leave_out(flat, self._first, there == begins)
        if not self._counts:
            return logits
        ids = self._histories.ids[:, : max(lengths)].index_select(0, slots)
        texts = Texts(ids, begins[:, None], there[:, None])
        for sequence, bias, asked in self._sequences:
            logits = biased(logits, texts, sequence, bias, asked)
        if self._repetition is not None:
            logits = repetition(logits, texts, self._repetition)
        if self._presence is not None:
            logits = counted(logits, texts, self._presence, self._frequency)
        for size, asked in self._sizes:
            logits = no_repeat(logits, texts, size, asked)
        return logits

    def _leave_out(self, flat: Tensor, places: tuple[Tensor, Tensor], now: Tensor) -> None:
        """-inf at the places of texts for which it is `now` so, bool [texts]."""
        at, of = places
        flat.index_add_(0, at, flat.new_zeros(len(at)).masked_fill_(now.index_select(0, of), -torch.inf))

    def add(self, chosen: Tensor) -> None:
        """chosen int64 [rows]: the next token of each text of the last `apply`; -1 where logits were not finite, which
        is an error for whoever reads the ids."""
        if self._counts:
            slots, _, lengths = self._last
            ids = chosen if self._of_all else chosen.index_select(0, self._rows)
            self._histories.ids.index_put_((slots, lengths), ids.clamp(min=0))


@lru_cache(maxsize=256)
def _fixed(rules: Rules, vocab: int) -> tuple[Tensor, Tensor]:
    """Ids, each once, and what is added to their logits always."""
    found: dict[int, float] = {}
    for token, bias in [*rules.logit_bias, *((ids[0], bias) for ids, bias in rules.sequence_bias if len(ids) == 1)]:
        found[token] = found.get(token, 0.0) + bias
    for token in [*rules.suppress_tokens, *(one[0] for one in rules.bad if len(one) == 1)]:
        if 0 <= token < vocab:
            found[token] = -torch.inf
    return torch.tensor([*found], dtype=torch.int64), torch.tensor([*found.values()], dtype=torch.float32)


@lru_cache(maxsize=256)
def _sequences(rules: Rules) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Of several ids, and what is added to the last one's logit behind the others."""
    bad = ((ids, -torch.inf) for ids in rules.bad if len(ids) > 1)
    return (*((ids, bias) for ids, bias in rules.sequence_bias if len(ids) > 1), *bad)


def _known(ids: Iterable[int], vocab: int) -> Tensor:
    return torch.tensor(sorted({one for one in ids if 0 <= one < vocab}), dtype=torch.int64)
