"""What a text is asked for with, and what comes of it. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftbert.decoding.rules import Rules
from ftbert.decoding.sampling import Sampling

MOST_LOGPROBS = 20  # alternatives of a token, as OpenAI's interface allows


@dataclass(frozen=True)
class Request:
    """prompt: token ids. most: tokens that may follow. logprobs: None: none; k: those of the chosen token and of the k
    most likely ones."""

    prompt: Sequence[int]
    most: int
    sampling: Sampling = field(default_factory=Sampling)
    rules: Rules = field(default_factory=Rules)
    logprobs: int | None = None

    def check(self, positions: int, vocab: int) -> None:
        """ValueError for what a cache with so many positions a text, and a model with so many tokens, cannot do."""
        check_prompt(self.prompt, vocab, "prompt")
        if not _is_count(self.most) or self.most < 1:
            raise ValueError(f"most must be a positive integer; got {self.most!r}")
        if len(self.prompt) + self.most > positions:
            raise ValueError(
                f"prompt has {len(self.prompt)} tokens, and {self.most} may follow; the cache has {positions} positions"
            )
        if self.logprobs is not None and not (_is_count(self.logprobs) and self.logprobs <= MOST_LOGPROBS):
            raise ValueError(f"logprobs must be an integer from 0 to {MOST_LOGPROBS}; got {self.logprobs!r}")
        self.rules.check_ids(vocab)


class Token(NamedTuple):
    """The next token of a text.

    end: "": the text goes on; "eos": a token that ends texts, which is not part of it; "length": the last that was
    asked for; "error": its logits were not finite, and id is -1. logprob: log of the token's probability by the model's
    logits, before rules and temperature. top: the most likely ids with theirs, in falling order. cached: tokens of the
    prompt that another text had left in the cache.
    """

    place: int
    id: int
    end: str
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    cached: int


def check_prompt(prompt: Sequence[int], vocab: int, name: str) -> None:
    """ValueError for no tokens, and for an id that a model with so many does not have."""
    if not prompt:
        raise ValueError(f"{name} has no tokens")
    if min(prompt) < 0 or max(prompt) >= vocab:
        place, wrong = next((i, one) for i, one in enumerate(prompt) if not 0 <= one < vocab)
        raise ValueError(f"{name}: expected token ids from 0 to {vocab - 1}; got {wrong} at place {place}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
