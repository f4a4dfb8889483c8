"""Texts that follow prompts, in a worker: ids go to an engine, tokens come back, pieces of text go on to a route."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ftbert.decoding import MOST_LOGPROBS, TextStream
from ftbert.server.app import App
from ftbert.server.description import GenerationFacts
from ftbert.server.errors import ApiError, of_failure, too_many, validation
from ftbert.server.job import TEXTS, Job, Kind, Writing, WrittenToken
from ftbert.server.links import Disconnected, Failed, Link, Stream, next_id
from ftbert.server.memory import PER_TOKEN_WRITTEN
from ftbert.server.messages import Request
from ftbert.server.served_model import ServedModel
from ftbert.server.tracing import Steps
from ftbert.text import ChatTemplate

# Strings that end a text, and characters of one.
MOST_STOPS, LONGEST_STOP = 16, 1000
# Seconds that a folder's chat template may take for a request's messages.
_RENDERING = 2.0
# Characters of a token, at most: of a prompt with more of them it is known without a look that it is too long.
_LONGEST_TOKEN = 256
# Tokens with a logarithm of their probability that are written in the event loop: 1 ms.
_SCORED_AT_ONCE = 512
_MOST_SEED, _MOST_NUMBER = 1 << 61, 1 << 62

T = TypeVar("T")
_WORD = re.compile(r"\w+")

Prompt = str | list[int] | list[dict[str, Any]]


class Piece(NamedTuple):
    """What came of a text. text: "" where no more of it is certain. tokens: those that came, also of text that is held
    back. end: "", or why it is the last piece: "eos" (the token `last`, which is no part of the text, said so), "stop"
    (`word` says which string) or "length"."""

    choice: int
    text: str
    tokens: list[WrittenToken]
    end: str
    word: str = ""
    last: WrittenToken | None = None


@dataclass
class Asked:
    """What a route asks for, in words of Model.generate. prompts: texts, ids, or messages for the template. n: texts
    of each. stop: None: as the folder says. special: prompts get the tokenizer's special tokens. kwargs: for the
    template. fields: how the request names prompt and most tokens. names: how it names fields of `Writing` that it has
    by another name."""

    prompts: Sequence[Prompt]
    writing: Writing
    stop: Sequence[str] | None = None
    n: int = 1
    special: bool = True
    kwargs: dict[str, Any] = field(default_factory=dict)
    fields: tuple[str, str] = ("prompt", "max_tokens")
    names: Mapping[str, str] = field(default_factory=dict)


class _Choice:
    def __init__(self, place: int, link: Link, stream: Stream, text: TextStream) -> None:
        self.place, self._link, self.stream, self._text = place, link, stream, text
        self.tokens = self.cached = 0
        self.end = ""

    def take(self) -> Piece | None:
        """Failed, Disconnected."""
        text, tokens, word, last = "", list[WrittenToken](), "", None
        found = self.stream.take()
        for one in found:
            self.cached = one.cached
            for token in one.tokens:
                tokens.append(token)
                text += self._text.push(token.id)
                if self._text.stopped:
                    break
            if one.end and not self._text.stopped:
                self.end, last = one.end, one.last
                text += self._text.end(last.id if last else None)
            if self._text.stopped:
                self.end, word = "stop", self._text.stop
                self.leave()
                break
        self.tokens += len(tokens) + (last is not None)
        return Piece(self.place, text, tokens, self.end, word, last) if found else None

    def leave(self) -> None:
        """Its slot is free for another."""
        self._link.cancel(self.stream, Disconnected())


class Texts:
    """All that one request asks for. prompt_tokens: of its prompts, each once. word: how a token is written."""

    def __init__(self, app: App, request: Request, model: ServedModel, asked: Asked, prompts: list[list[int]]) -> None:
        self._row, self._request, self._names = app.row(request), request, asked.names
        self._changed = asyncio.Event()
        self.began, self.first, self.last = request.began, 0.0, 0.0  # of tokens, by time.monotonic()
        self.prompt_tokens = sum(map(len, prompts))
        facts, link = generation_of(model), model.link()
        encoder, stop = model.encoder(), facts.stop if asked.stop is None else asked.stop
        self.word = encoder.word
        self.choices: list[_Choice] = []
        request.computed = self
        request.on_end(self.close)
        request.on_disconnect(self.close)
        for place, ids in enumerate([ids for ids in prompts for _ in range(asked.n)]):
            writing, most = asked.writing, asked.writing.max_new_tokens
            if writing.seed is not None:
                writing = msgspec.structs.replace(writing, seed=(writing.seed + place) % _MOST_SEED)
            if most is not None and most > facts.positions:
                writing = msgspec.structs.replace(writing, max_new_tokens=facts.positions)
            given, offsets = np.array(ids, dtype=np.int32), np.array([0, len(ids)], dtype=np.int64)
            due = inf if place else model.deadline(request)  # of the first token: its others wait for each other
            job = Job(next_id(), Kind.WRITTEN, given, offsets, due, writing=writing)
            try:
                stream = link.write(job, self._changed.set)
            except Failed as failed:
                raise self._error(failed) from None
            text = TextStream(encoder.text, ids, stop, facts.special)
            self.choices.append(_Choice(place, link, stream, text))

    @property
    def tokens(self) -> int:
        """Written so far, the tokens that ended texts among them."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def steps(self) -> Steps:
        """prefill: until the first token, what it waited for included."""
        seconds = {"prefill": self.first - self.began, "decode": self.last - self.first} if self.first else {}
        return Steps(self.began, seconds, self.prompt_tokens, self.tokens)

    @property
    def usage(self) -> dict[str, Any]:
        """As OpenAI's."""
        cached, written = sum(choice.cached for choice in self.choices), self.tokens
        return {
            "prompt_tokens": self.prompt_tokens, "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": min(cached, self.prompt_tokens)},
        }  # fmt: skip

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What has come each time that something has, until all texts have ended. ApiError; Disconnected."""
        while left := [choice for choice in self.choices if not choice.end]:
            await self._changed.wait()
            self._changed.clear()
            try:
                found = [piece for choice in left if (piece := choice.take()) is not None]
            except Failed as failed:
                raise self._error(failed) from None
            if found:
                self._note()
                yield found
        self._row.count("ft_prompt_tokens_total", self.prompt_tokens)
        self._row.count("ft_prompt_tokens_cached_total", self.usage["prompt_tokens_details"]["cached_tokens"])
        if (written := self.tokens - len(self.choices)) > 0:
            self._row.observe("ft_time_per_output_token_seconds", (self.last - self.first) / written, written)

    async def whole(self) -> list[Piece]:
        """Of each text all that came. ApiError; Disconnected."""
        found: list[list[Piece]] = [[] for _ in self.choices]
        async for pieces in self.pieces():
            for piece in pieces:
                found[piece.choice].append(piece)
        return [_joined(pieces) for pieces in found]

    async def made(self, pieces: Sequence[Piece], make: Callable[[], T]) -> T:
        """`make`, off the event loop where these pieces have many tokens and alternatives of them."""
        scored = sum(1 + len(token.top) for piece in pieces for token in piece.tokens if token.logprob is not None)
        return make() if scored <= _SCORED_AT_ONCE else await asyncio.to_thread(make)

    def _note(self) -> None:
        self.last = time.monotonic()
        if not self.first:
            self.first = self.last
            self._row.observe("ft_time_to_first_token_seconds", self.first - self.began)
            for choice in self.choices:  # they wait for each other's slots
                choice.stream.begin()

    def _error(self, failed: Failed) -> ApiError:
        """The words of one for a value begin with the field's name."""
        failure = failed.failure
        found = of_failure(failure.status, failure.words, failure.retry_after)
        if failure.status == 422 and (name := _WORD.match(found.words)) and name[0] in Writing.__struct_fields__:
            found.param = self._names.get(name[0], name[0])
            found.words = found.param + found.words[name.end() :]
        return found

    def close(self) -> None:
        """Nobody waits for the rest."""
        for choice in self.choices:
            if not choice.end:
                choice.leave()


async def write(app: App, request: Request, model: ServedModel, asked: Asked) -> Texts:
    """The engine has it, or ApiError."""
    facts = generation_of(model)
    _check(asked)
    render = None
    if any(_is_chat(prompt) for prompt in asked.prompts):
        if facts.template is None:
            raise validation(f"{model.name} has no chat template; use /v1/completions", param=asked.fields[0])
        render = ChatTemplate(facts.template, {**facts.names, **asked.kwargs})
    most = _LONGEST_TOKEN * facts.positions

    def encode() -> list[list[int]]:
        return [_ids(model, prompt, asked, render, most) for prompt in asked.prompts]

    characters = sum(map(_characters, asked.prompts))
    # A template may take its seconds whatever the messages say.
    prompts = await model.in_thread(request, characters, encode, -1 if render else model.encoder().inline)
    room, most_tokens = 0, asked.writing.max_new_tokens
    for ids in prompts:
        left = facts.positions - len(ids)
        room += left if most_tokens is None else min(left, most_tokens)
    size = PER_TOKEN_WRITTEN * (1 + (asked.writing.logprobs or 0))
    model.take_memory(request, asked.n * room * size, asked.n * room, "tokens")
    if request.disconnected:
        raise Disconnected
    return Texts(app, request, model, asked, prompts)


def generation_of(model: ServedModel) -> GenerationFacts:
    """Of a model that is `expect`ed to have them."""
    found = model.about.generation
    assert found is not None
    return found


def top_k_of(given: int | None) -> int | None:
    """-1 and 0 are the field's words for all."""
    return None if given in (-1, 0) else given


def _joined(pieces: Sequence[Piece]) -> Piece:
    tokens = [token for piece in pieces for token in piece.tokens]
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), tokens=tokens)


def _check(asked: Asked) -> None:
    name, most = asked.fields
    if not asked.prompts:
        raise ApiError("Empty", f"`{name}` cannot be empty", param=name)
    if asked.n < 1:
        raise validation(f"`n` must be at least 1; got {str(asked.n)[:20]}", param="n")
    if asked.n * len(asked.prompts) > TEXTS:
        raise too_many(f"`n` and `{name}` ask for {str(asked.n * len(asked.prompts))[:20]} texts; at most {TEXTS}")
    if asked.writing.max_new_tokens is not None and asked.writing.max_new_tokens < 1:
        raise validation(f"`{most}` must be at least 1; got {str(asked.writing.max_new_tokens)[:20]}", param=most)
    for field_name in ("seed", "top_k", "min_new_tokens", "logprobs"):
        value = getattr(asked.writing, field_name)
        if value is not None and abs(value) >= _MOST_NUMBER:
            shown = asked.names.get(field_name, field_name)
            raise validation(f"`{shown}` must be less than 2^62; got {str(value)[:20]}", param=shown)
    logprobs, shown = asked.writing.logprobs, asked.names.get("logprobs", "logprobs")
    if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:  # before memory is counted by it
        raise validation(f"`{shown}` must be from 0 to {MOST_LOGPROBS}; got {logprobs}", param=shown)
    if any(abs(one) >= _MOST_NUMBER for one in asked.writing.logit_bias or ()):
        raise validation("`logit_bias`: a token id is outside the model's vocabulary", param="logit_bias")
    if len(asked.stop or ()) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in asked.stop or ()):
        raise validation(f"`stop` must be at most {MOST_STOPS} strings of {LONGEST_STOP} characters", param="stop")
    if len(asked.writing.logit_bias or ()) > 1024:
        raise validation("`logit_bias` must have at most 1024 entries", param="logit_bias")


def _ids(model: ServedModel, prompt: Prompt, asked: Asked, template: ChatTemplate | None, most: int) -> list[int]:
    """Of one prompt. ApiError, also where no token fits behind it: prompts after it need no tokenizer then."""
    found, facts = _encoded(model, prompt, asked, template, most), generation_of(model)
    if len(found) >= facts.positions:
        raise _too_long(f"{len(found)} tokens", facts, asked)
    return found


def _encoded(
    model: ServedModel, prompt: Prompt, asked: Asked, template: ChatTemplate | None, most: int
) -> list[int]:
    name = asked.fields[0]
    if not prompt:
        raise ApiError("Empty", f"`{name}` cannot be empty", param=name)
    if isinstance(prompt, list) and not _is_chat(prompt):
        ids: list[Any] = prompt
        vocab = model.about.model.vocab
        if min(ids) < 0 or max(ids) >= vocab:
            raise validation(f"`{name}`: a token id is outside the model's vocabulary of {vocab}", param=name)
        return ids
    special, text = asked.special, prompt
    if template is not None and _is_chat(prompt):
        try:
            special, text = False, template.render(prompt, _RENDERING)  # type: ignore[arg-type]
        except ValueError as error:
            raise validation(str(error)[:300], param=name) from None
    assert isinstance(text, str)
    if len(text) > most:
        raise _too_long(f"{len(text)} characters", generation_of(model), asked)
    (found,) = model.encoder().whole.encode_batch([text], add_special_tokens=special)
    return list(found.ids)


def _too_long(size: str, facts: GenerationFacts, asked: Asked) -> ApiError:
    words = (
        f"Input validation error: the prompt has {size}; this server's texts have at most {facts.positions} tokens, "
        "prompt included (max-model-len)"
    )
    return ApiError("Validation", words, param=asked.fields[0], code="context_length_exceeded")


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], dict)


def _characters(prompt: Prompt) -> int:
    if not _is_chat(prompt):
        return len(prompt)
    messages: Sequence[Any] = prompt
    return sum(len(one["content"]) for one in messages)

