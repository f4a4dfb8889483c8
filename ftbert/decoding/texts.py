"""Prompts in, texts or token ids out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.generation import Generation
from ftbert.decoding.messages import Prompt
from ftbert.decoding.prompts import dropped, encoded, spelled_ends, tokenizer_for
from ftbert.decoding.requests import Request, check_prompt
from ftbert.decoding.rules import Rules
from ftbert.decoding.sampling import Sampling
from ftbert.decoding.stated import stated
from ftbert.decoding.text_stream import TextStream
from ftbert.decoding.words import check_do_sample
from ftbert.packed_model import PackedModel

NOT_FINITE = (
    "logits of the next token are not finite in {}: weights that are not, or numbers larger than the dtype holds; "
    "another dtype may hold them"
)
_MOST = 256  # tokens of a text, where neither the caller nor the model says another number


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


def requested(
    model: PackedModel, ids: Sequence[int], options: Options, *, positions: int | None = None,
    logprobs: int | None = None, name: str = "prompt", ends: frozenset[int] | None = None,
) -> Request:  # fmt: skip
    """What the options ask of a prompt, and the model's own defaults where they say nothing. positions: of a text, the
    prompt included; None: the model's. name: of the prompt, in errors. ends: tokens that end a text beside those that
    the model states; None: those that its tokenizer spells as ends. ValueError for a prompt without tokens or longer
    than the positions or the length that the model states, an id that it does not have."""
    context, said = min(model.config.max_seq, positions or model.config.max_seq), stated(model)
    check_prompt(ids, model.config.vocab, name)
    if len(ids) >= context:
        of = "this model" if context == model.config.max_seq else "the cache"
        raise ValueError(
            f"{name} has {len(ids)} tokens; the context of {of} is {context}, the generated text included"
        )
    most = options.max_new_tokens or said.max_new_tokens
    if most is None and said.max_length is not None:
        if len(ids) >= said.max_length:
            raise ValueError(
                f"{name} has {len(ids)} tokens, and generation_config.json allows texts of {said.max_length} "
                "(max_length) with the prompt: pass max_new_tokens"
            )
        context, most = min(context, said.max_length), said.max_length
    if ends is None:
        ends = spelled_ends(tokenizer_for(model))
    ends = frozenset() if options.ignore_eos else said.ends | ends
    rules = replace(said.rules, **options.rules, ends=ends)
    rules.check_ids(model.config.vocab)
    return Request(ids, min(most or _MOST, context - len(ids)), options.sampling, rules, logprobs)


def generation_of(
    model: PackedModel, slots: int, positions: int | None = None, wait_seconds: float | None = 0.05, **how: Any
) -> Generation:
    """A generation with a cache of its own, of `slots` texts of up to `positions` tokens, prompts included; None: the
    model's context. how: of `Generation`. ValueError for a model that generates nothing."""
    decoder = decoder_of(model, slots, model.config.max_seq if positions is None else positions)
    return Generation(decoder, slots, model.config.vocab, model.device, wait_seconds=wait_seconds, **how)


class Started:
    """Prompts that were checked, and a cache for them: nothing was computed yet."""

    def __init__(
        self, model: PackedModel, prompts: Sequence[Sequence[int]], options: Options, ends: frozenset[int] = frozenset()
    ) -> None:
        """ends: as of `requested`, whose ValueError it raises."""
        self._model = model
        self.reasons: dict[int, str] = {}  # of texts that have ended: "eos", "stop", "length"
        self.last: dict[int, int] = {}  # the tokens that ended texts
        requests = [
            requested(model, ids, options, name=f"prompt {place}", ends=ends) for place, ids in enumerate(prompts)
        ]
        slots = max(min(len(prompts), options.batch_size), 1)
        positions = max((len(one.prompt) + one.most for one in requests), default=1)
        self._generation = generation_of(model, slots, positions, wait_seconds=None)
        for place, one in enumerate(requests):
            self._generation.add(replace(one, sampling=one.sampling.at(place)))

    def tokens(self) -> Iterator[tuple[int, int]]:
        """(place, token) as they come, without those that end a text. Who has enough of one calls `end`. RuntimeError
        where logits are not finite."""
        while made := self._generation.step():
            for place, token, end, *_ in made:
                if end == "error":
                    raise RuntimeError(NOT_FINITE.format(self._generation.dtype))
                if place in self.reasons:
                    continue
                if end:
                    self.reasons[place] = end
                if end == "eos":
                    self.last[place] = token
                else:
                    yield place, token

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
        self._text = text_stream(model, ids, options.stop)
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
    texts = [text_stream(model, row, options.stop) for row in ids]
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


def text_stream(model: PackedModel, prompt: Sequence[int], stop: Sequence[str] | None) -> TextStream:
    """The text of the tokens that follow the prompt. stop: strings that end it; None: those that the model states."""
    tokenizer = tokenizer_for(model)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return TextStream(decode, prompt, stated(model).stop if stop is None else stop, dropped(tokenizer))
