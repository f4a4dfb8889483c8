"""How a token is chosen: the most likely one, or one that is drawn. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftbert.decoding.rules import is_number

_SEEDS = 1 << 62


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
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed < _SEEDS):
            raise ValueError(f"seed must be an integer from 0 to 2^62; got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def at(self, place: int) -> Sampling:
        """Of one among texts that are drawn alike: with another seed, where there is one."""
        return self if self.seed is None else replace(self, seed=(self.seed + place) % _SEEDS)
