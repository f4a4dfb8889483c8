"""What a caller says about texts. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftbert.decoding.rules import Rules
from ftbert.decoding.sampling import Sampling
from ftbert.decoding.words import check_do_sample


@dataclass(frozen=True)
class Options:
    """As of `ftbert.Model.generate`. max_new_tokens, stop: None: as the model states. rules: what the caller says of
    them, by name; the others are as the model states. ignore_eos: no token ends the text. ValueError for a value that
    means nothing."""

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    rules: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] | None = None
    chat: bool = False
    batch_size: int = 8
    template: str | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is None and name == "max_new_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer; got {value!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False; got {self.ignore_eos!r}")
        if not all(isinstance(one, str) and one for one in self.stop or ()):
            raise ValueError(f"stop must be a str or several, none empty; got {self.stop!r}")
        Rules(**self.rules)

    @classmethod
    def of(
        cls, *, max_new_tokens: int | None = None, temperature: float | None = None, top_k: int | None = None,
        top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
        stop: str | Sequence[str] | None = None, chat: bool = False, chat_template: str | None = None,
        batch_size: int = 8, do_sample: bool | None = None, ignore_eos: bool | None = None,
        logit_bias: Mapping[int, float] | None = None, **rules: Any,
    ) -> Options:  # fmt: skip
        """None of temperature is 0, 0 of top_k None, as transformers has them. rules: of `Rules`, None as if they were
        not given; logit_bias: ids and what is added to their logits."""
        temperature = 0.0 if temperature is None else temperature
        check_do_sample(do_sample, temperature)
        given = {name: value for name, value in rules.items() if value is not None}
        if logit_bias is not None:
            if not isinstance(logit_bias, Mapping):
                raise ValueError(f"logit_bias: expected token ids and numbers, as a dict; got {logit_bias!r:.60}")
            given["logit_bias"] = tuple(logit_bias.items())
        sampling = Sampling(temperature, top_k or None, top_p, seed, min_p)
        stops = None if stop is None else _listed(stop)
        ignores = False if ignore_eos is None else ignore_eos
        return cls(max_new_tokens, sampling, given, stops, chat, batch_size, chat_template, ignores)


def _listed(stop: Any) -> tuple[Any, ...]:
    """One stop string or several; `Options` checks them."""
    return tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
