"""Prompts in, texts or token ids out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ftbert.decoding.decoder import decoder_of
from ftbert.decoding.generation import Generation
from ftbert.decoding.messages import Prompt
from ftbert.decoding.options import Options
from ftbert.decoding.prompts import dropped, encoded, spelled_ends, tokenizer_for
from ftbert.decoding.requests import Request, check_prompt
from ftbert.decoding.stated import stated
from ftbert.decoding.text_stream import TextStream
from ftbert.packed_model import PackedModel

NOT_FINITE = (
    "logits of the next token are not finite in {}: weights that are not, or numbers larger than the dtype holds; "
    "another dtype may hold them"
)
_MOST = 256  # tokens of a text, where neither the caller nor the model says another number


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
        self._text = stream_of(model, ids, options.stop)
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
    texts = [stream_of(model, row, options.stop) for row in ids]
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


def stream_of(model: PackedModel, prompt: Sequence[int], stop: Sequence[str] | None) -> TextStream:
    """The text of the tokens that follow the prompt. stop: strings that end it; None: those that the model states."""
    tokenizer = tokenizer_for(model)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return TextStream(decode, prompt, stated(model).stop if stop is None else stop, dropped(tokenizer))
