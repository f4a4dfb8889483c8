"""The next tokens of a step's texts, each by its own rules and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftbert.decoding.chosen import Chosen, sent
from ftbert.decoding.ruled import Histories, RuledText, StepRules
from ftbert.decoding.step_sampling import StepSampling
from ftbert.decoding.text import Text


class Choices:
    """Of the same texts, step after step. What no text asks for is not computed."""

    def __init__(self, texts: Sequence[Text], vocab: int, histories: Histories) -> None:
        """texts: by row of the logits."""
        self.texts = list(texts)
        requests = [one.request for one in texts]
        self._sampling = StepSampling([one.sampling for one in requests], histories.device)
        self._generators = [one.generator for one in texts if one.generator is not None]
        self._ruled = [one for one in texts if not one.request.rules.change_nothing]
        self._rules = None
        if self._ruled:
            rows = [
                RuledText(row, one.slot, len(one.prompt), one.request.rules)
                for row, one in enumerate(texts)
                if one in self._ruled
            ]
            self._rules = StepRules(rows, len(texts), vocab, histories)
        asking = [(row, one.logprobs) for row, one in enumerate(requests) if one.logprobs is not None]
        self._logprobs = StepLogprobs(asking, vocab, histories.device) if asking else None

    def choose(self, logits: Tensor) -> Chosen:
        """logits [texts, vocab], contiguous."""
        ruled = logits
        if self._rules is not None:
            ruled = self._rules.apply(logits, [one.chosen for one in self._ruled])
        ids = self._sampling.choose(ruled, self._generators)
        if self._rules is not None:
            self._rules.add(ids)
        return Chosen(ids, () if self._logprobs is None else self._logprobs.of(logits, ids))

    def told(self, found: Sequence[Sequence[float]]) -> list[tuple[float | None, tuple[tuple[int, float], ...]]]:
        """What `Chosen.read` gives behind the ids, by text: the chosen token's logprob, and the most likely ids'."""
        none: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [(None, ())] * len(self.texts)
        return none if self._logprobs is None else self._logprobs.told(none, *found)


class StepLogprobs:
    """Logarithms of probabilities by the model's own logits, without rules and temperature."""

    def __init__(self, asking: Sequence[tuple[int, int]], vocab: int, device: torch.device) -> None:
        """asking: rows, and how many of the most likely tokens each wants."""
        self._asking, self._most = asking, min(max(count for _, count in asking), vocab)
        self._rows = sent(torch.tensor([row for row, _ in asking]), device)

    def of(self, logits: Tensor, ids: Tensor) -> list[Tensor]:
        """float32 [asking, 1], float32 and int64 [asking, most]."""
        found = logits.index_select(0, self._rows).float().log_softmax(-1)
        chosen = found.gather(1, ids.index_select(0, self._rows)[:, None].clamp(min=0))
        return [chosen, *found.topk(self._most)]

    def told(self, found: list[tuple[float | None, tuple[tuple[int, float], ...]]], *read: Any) -> Any:
        for (row, count), (chosen,), values, ids in zip(self._asking, *read, strict=True):
            found[row] = chosen, tuple(zip(ids[:count], values[:count], strict=True))
        return found
