"""What a caller or a file says about logits: transformers' logits processors, OpenAI's penalties and biases."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real

# Of a bias and of a penalty: logits are float32, and what several of them make of one stays finite.
_MOST = 1e9


def is_number(value: object) -> bool:
    """Whether it is a finite number, of Python or numpy."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _is_small(value: object) -> bool:
    return is_number(value) and abs(value) <= _MOST  # type: ignore[arg-type, operator]


@dataclass(frozen=True)
class Rules:
    """By the names of transformers' generate, where they mean the same; these defaults change nothing.

    presence_penalty, frequency_penalty: subtracted of tokens that were generated, once and each time (OpenAI, vLLM).
    min_new_tokens: where it is not None, min_length has no effect. logit_bias: ids and what is added to their logits
    (OpenAI). sequence_bias: ids and what is added to the last one's logit behind the others. ends: tokens that end a
    text.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    min_new_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """ValueError for a value that means nothing."""
        if not is_number(self.repetition_penalty) or not 1 / _MOST <= self.repetition_penalty <= _MOST:
            raise ValueError(
                f"repetition_penalty must be a number above 0, at most {_MOST:g}; got {self.repetition_penalty!r}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_small(getattr(self, name)):
                raise ValueError(f"{name} must be a number from {-_MOST:g} to {_MOST:g}; got {getattr(self, name)!r}")
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
            value = getattr(self, name)
            if value is None and name == "min_new_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0; got {value!r}")
        for token, bias in self.logit_bias:
            if isinstance(token, bool) or not isinstance(token, int) or not _is_small(bias):
                raise ValueError(
                    f"logit_bias: expected token ids and numbers from {-_MOST:g} to {_MOST:g}; got {token!r}: {bias!r}"
                )

    @property
    def change_nothing(self) -> bool:
        return replace(self, min_new_tokens=self.min_new_tokens or None) == Rules(ends=self.ends)

    @property
    def bad(self) -> tuple[tuple[int, ...], ...]:
        """bad_words_ids without the ends, which transformers lets pass."""
        return tuple(one for one in self.bad_words_ids if len(one) != 1 or one[0] not in self.ends)

    def check_ids(self, vocab: int) -> None:
        """ValueError for ids that a model with so many tokens does not have, but for ends and suppressed tokens."""
        for token, _ in self.logit_bias:
            if not 0 <= token < vocab:
                raise ValueError(f"logit_bias: expected ids from 0 to {vocab - 1}; got {token}")
        for one in [*self.bad, *(ids for ids, _ in self.sequence_bias)]:
            if not one or not all(0 <= token < vocab for token in one):
                raise ValueError(f"sequence_bias, bad_words_ids: expected ids from 0 to {vocab - 1}; got {list(one)}")
