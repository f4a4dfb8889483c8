"""From logits to the next token: the most likely one, or one drawn as temperature, top_k, top_p and min_p say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftbert.decoding.chosen import Chosen, sent
from ftbert.decoding.rules import is_number


@dataclass(frozen=True)
class Sampling:
    """temperature: what logits are divided by; 0: the most likely token. top_k: the most likely k alone. top_p: of
    these the fewest that together are as likely as top_p. min_p: of these all that are at least min_p times as likely
    as the most likely one. seed: None: another text each time."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        """ValueError for a value that means nothing."""
        if not is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be a number of at least 0; got {self.temperature!r}")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be a positive integer; got {self.top_k!r}")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p!r}")
        if self.min_p is not None and not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must be from 0 to 1; got {self.min_p!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 62):
            raise ValueError(f"seed must be an integer from 0 to 2^62; got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def generator(self, place: int) -> torch.Generator:
        """Of the text at this place: each has its own, so that it does not depend on what runs beside it."""
        made = torch.Generator()
        if self.seed is None:
            made.seed()
        else:
            made.manual_seed(self.seed + place)
        return made

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator], dtype: torch.dtype | None = None) -> Chosen:
        """logits [texts, vocab], contiguous -> an id of each, found where they lie. generators: one a text, none where
        greedy. dtype: in which the model computed them; None: theirs. Who reads the ids gets the error where logits are
        not finite."""
        ids: Tensor = torch.ops.ftbert.argmax(logits)
        if not self.greedy:
            # The host's generators, so that a seed draws alike on every device; a number a text is all that is sent.
            drawn = torch.stack([torch.rand((), dtype=torch.float64, generator=one) for one in generators])
            ids = draw(self.probabilities(logits), sent(drawn, logits.device)).where(ids >= 0, -1)
        return Chosen(ids, dtype or logits.dtype)

    def probabilities(self, logits: Tensor) -> Tensor:
        """float64 [texts, vocab] of the tokens that may be drawn; 0 of the others."""
        logits = logits.double()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # no overflow by small temperatures
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        likely = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            falling, places = likely.sort(stable=True, dim=-1, descending=True)
            before = falling.cumsum(-1) - falling
            kept = falling.masked_fill(before >= self.top_p, 0)  # never the first
            likely = torch.zeros_like(likely).scatter_(-1, places, kept / kept.sum(-1, keepdim=True))
        if self.min_p:
            kept = likely.masked_fill(likely < self.min_p * likely.amax(-1, keepdim=True), 0)
            likely = kept / kept.sum(-1, keepdim=True)
        return likely


def draw(likely: Tensor, numbers: Tensor) -> Tensor:
    """likely float64 [texts, ids], numbers float64 [texts] in [0, 1) -> of each text the first id up to which the sum
    of probabilities passes the number: never one of probability 0."""
    sums = likely.cumsum(-1)
    return torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)[:, 0]
