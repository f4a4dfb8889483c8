"""Prompts in, texts or token ids out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.generation import Generation
from ftbert.decoding.messages import Prompt
from ftbert.decoding.prompts import dropped, encoded, spelled_ends, tokenizer_for
from ftbert.decoding.rules import Ruled, Rules
from ftbert.decoding.sampling import Sampling
from ftbert.decoding.stated import stated
from ftbert.decoding.text_stream import TextStream
from ftbert.decoding.words import check_do_sample
from ftbert.packed_model import PackedModel

_MOST = 256  # tokens of a text, where neither the caller nor the model says another number


@dataclass(frozen=True)
class Options:
    """As of `ftbert.Model.generate`. max_new_tokens, stop: None: as the model states. rules: what the caller says of
    them, by name; the others are as the model states. ValueError for a value that means nothing."""

    max_new_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    rules: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] | None = None
    chat: bool = False
    batch_size: int = 8
    template: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            value = getattr(self, name)
            if value is None and name == "max_new_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer; got {value!r}")
        if not all(isinstance(one, str) and one for one in self.stop or ()):
            raise ValueError(f"stop must be a str or several, none empty; got {self.stop!r}")
        Rules(**self.rules)

    @classmethod
    def of(
        cls, *, max_new_tokens: int | None, temperature: float | None, top_k: int | None, top_p: float | None,
        min_p: float | None, seed: int | None, stop: str | Sequence[str] | None = None, chat: bool = False,
        chat_template: str | None = None, batch_size: int = 8, do_sample: bool | None = None, **rules: Any,
    ) -> Options:  # fmt: skip
        """None of temperature is 0, 0 of top_k None, as transformers has them."""
        temperature = 0.0 if temperature is None else temperature
        check_do_sample(do_sample, temperature)
        given = {name: value for name, value in rules.items() if value is not None}
        sampling = Sampling(temperature, top_k or None, top_p, seed, min_p)
        stops = None if stop is None else _listed(stop)
        return cls(max_new_tokens, sampling, given, stops, chat, batch_size, chat_template)


def _listed(stop: Any) -> tuple[Any, ...]:
    """One stop string or several; `Options` checks them."""
    return tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)


class Started:
    """Prompts that were checked, and a cache for them: nothing was computed yet."""

    def __init__(
        self, model: PackedModel, prompts: Sequence[Sequence[int]], options: Options, ends: frozenset[int] = frozenset()
    ) -> None:
        """ends: tokens that end a text beside those that the model states. ValueError for a prompt without tokens or
        longer than the model's context or the length that it states, an id that it does not have."""
        context, vocab, said = model.config.max_seq, model.config.vocab, stated(model)
        for place, ids in enumerate(prompts):
            if not ids:
                raise ValueError(f"prompt {place} has no tokens")
            if len(ids) >= context:
                raise ValueError(
                    f"prompt {place} has {len(ids)} tokens; the context of this model is {context}, the generated "
                    "text included"
                )
            if not all(0 <= one < vocab for one in ids):
                raise ValueError(f"prompt {place}: expected token ids from 0 to {vocab - 1}")
        self._ends = said.ends | ends
        most = options.max_new_tokens or said.max_new_tokens
        if most is None and said.max_length is not None:
            for place, ids in enumerate(prompts):
                if len(ids) >= said.max_length:
                    raise ValueError(
                        f"prompt {place} has {len(ids)} tokens, and generation_config.json allows texts of "
                        f"{said.max_length} (max_length) with the prompt: pass max_new_tokens"
                    )
            context = min(context, said.max_length)
            most = said.max_length
        self._most = [min(most or _MOST, context - len(ids)) for ids in prompts]
        self.reasons: dict[int, str] = {}  # of texts that have ended: "eos", "stop", "length"
        self.last: dict[int, int] = {}  # the tokens that ended texts
        self._tokens = [0] * len(prompts)
        slots = min(len(prompts), options.batch_size)
        positions = max((len(ids) + most for ids, most in zip(prompts, self._most, strict=True)), default=1)
        rules = replace(said.rules, **options.rules, ends=self._ends)
        ruled = None
        if prompts and not rules.change_nothing:
            ruled = Ruled(rules, slots, positions, vocab, model.device)
        decoder = decoder_of(model, max(slots, 1), positions)
        self._generation = Generation(decoder, slots, prompts, self._most, options.sampling, model.device, ruled=ruled)

    def tokens(self) -> Iterator[tuple[int, int]]:
        """(place, token) as they come, without those that end a text. Who has enough of one calls `end`."""
        while made := self._generation.step():
            for place, token in made:
                if token in self._ends:
                    self.last[place] = token
                    self.end(place, "eos")
                    continue
                yield place, token
                self._tokens[place] += 1
                if place not in self.reasons and self._tokens[place] == self._most[place]:
                    self.end(place, "length")

    def end(self, place: int, reason: str) -> None:
        self.reasons[place] = reason
        self._generation.end(place)


class TextPieces(Iterator[str]):
    """The text that follows one prompt, piece by piece.

    tokens: that came so far. prompt_tokens: of the prompt. reason: why the text ended: "eos", its last token said so,
    "stop", a stop string came, "length", max_new_tokens or the model's context; "" before.
    """

    def __init__(self, model: PackedModel, prompt: Prompt, options: Options) -> None:
        (ids,) = encoded(model, [prompt], options.chat, options.template)
        self._started = Started(model, [ids], options, spelled_ends(tokenizer_for(model)))
        self._text = _stream(model, ids, options)
        self.tokens, self.prompt_tokens = 0, len(ids)
        self._pieces = self._made()

    @property
    def reason(self) -> str:
        return self._started.reasons.get(0, "")

    def __next__(self) -> str:
        return next(self._pieces)

    def _made(self) -> Iterator[str]:
        for _, token in self._started.tokens():
            self.tokens += 1
            piece = self._text.push(token)
            if self._text.stopped:
                self._started.end(0, "stop")
            if piece:
                yield piece
        if rest := self._text.end(self._started.last.get(0)):
            yield rest


def generate(model: PackedModel, prompts: Sequence[Prompt], options: Options) -> list[str]:
    """The text that follows each prompt."""
    ids = encoded(model, prompts, options.chat, options.template)
    started = Started(model, ids, options, spelled_ends(tokenizer_for(model)) if ids else frozenset())
    texts = [_stream(model, row, options) for row in ids]
    pieces: list[list[str]] = [[] for _ in ids]
    for place, token in started.tokens():
        pieces[place].append(texts[place].push(token))
        if texts[place].stopped:
            started.end(place, "stop")
    for place, text in enumerate(texts):
        pieces[place].append(text.end(started.last.get(place)))
    return ["".join(parts) for parts in pieces]


def generate_ids(model: PackedModel, prompts: Sequence[Sequence[int]], options: Options) -> list[list[int]]:
    """The tokens that follow each prompt's, without those that end a text."""
    found: list[list[int]] = [[] for _ in prompts]
    for place, token in Started(model, prompts, options).tokens():
        found[place].append(token)
    return found


def _stream(model: PackedModel, prompt: Sequence[int], options: Options) -> TextStream:
    tokenizer = tokenizer_for(model)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    stop = stated(model).stop if options.stop is None else options.stop
    return TextStream(decode, prompt, stop, dropped(tokenizer))
