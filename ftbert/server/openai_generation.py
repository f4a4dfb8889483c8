"""/v1/completions and /v1/chat/completions as OpenAI has them, with vLLM's fields."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ftbert.server.app import App
from ftbert.server.errors import validation
from ftbert.server.generates import generates
from ftbert.server.generation_schemas import ChatCompletion, Completion, Drawing, Message
from ftbert.server.job import Writing, WrittenToken
from ftbert.server.json_bodies import to_json
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import ServedModel
from ftbert.server.streams import DONE, EVENTS, error_event, event, streamed
from ftbert.server.writing import Asked, Piece, Prompt, Texts, generation_of, top_k_of, write

# OpenAI's, where a request does not say how many tokens.
_COMPLETION_TOKENS = 16
_NAMES = {"min_new_tokens": "min_tokens"}
_REASONS = {"": None, "eos": "stop", "stop": "stop", "length": "length"}


@generates(Completion)
async def completions(app: App, request: Request, body: Completion, model: ServedModel) -> Response:
    most = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    asked = Asked(
        _prompts(body.prompt), _writing(body, most, body.logprobs), _stops(body.stop), _texts(body),
        special=body.add_special_tokens, names=_NAMES,
    )  # fmt: skip
    texts = await write(app, request, model, asked)
    return await _answered(app, request, _Completions(model, texts, body.logprobs is not None), body)


@generates(ChatCompletion)
async def chat_completions(app: App, request: Request, body: ChatCompletion, model: ServedModel) -> Response:
    if body.top_logprobs is not None and not body.logprobs:
        raise validation("`top_logprobs` needs `logprobs`: true", param="top_logprobs")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most is None and not generation_of(model).bounded:
        most = generation_of(model).positions
    writing = _writing(body, most, (body.top_logprobs or 0) if body.logprobs else None)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    asked = Asked(
        [_messages(body.messages)], writing, _stops(body.stop), _texts(body), fields=("messages", name),
        kwargs=body.chat_template_kwargs or {}, names={**_NAMES, "logprobs": "top_logprobs"},
    )  # fmt: skip
    texts = await write(app, request, model, asked)
    return await _answered(app, request, _Chat(model, texts, bool(body.logprobs)), body)


async def _answered(app: App, request: Request, answer: _Answer, body: Drawing) -> Response:
    if not body.stream:
        return Response(await answer.whole())
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return await streamed(app, request, answer.events(usage), EVENTS, error_event)


class _Answer:
    """kind, chunks: the value of `object`, whole and streamed; begin: of the id."""

    kind, chunks, begin = "", "", ""

    def __init__(self, model: ServedModel, texts: Texts, logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs
        self._head = {"id": f"{self.begin}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}

    async def whole(self) -> list[bytes]:
        """Parts of the JSON. ApiError; Disconnected."""
        pieces = await self._texts.whole()
        head = to_json({**self._head, "object": self.kind, "usage": self._texts.usage})

        def choices() -> list[bytes]:  # one by one, as the writer of JSON lets no other thread run
            found = [to_json(self._choice(piece.choice, piece, last=True)) for piece in pieces]
            return [part for one in found for part in (b",", one)][1:]

        return [head[:-1] + b',"choices":[', *await self._texts.made(pieces, choices), b"]}"]

    async def events(self, usage: bool) -> AsyncGenerator[bytes, None]:
        """usage: told in the last event, as OpenAI's include_usage."""
        head = {**self._head, "object": self.chunks}
        more: dict[str, Any] = {"usage": None} if usage else {}
        begun = set[int]()
        async for pieces in self._texts.pieces():
            for piece in pieces:
                if piece.choice not in begun:
                    begun.add(piece.choice)
                    if (first := self._first(piece.choice)) is not None:
                        yield event({**head, "choices": [first], **more})
                if piece.text or piece.end or self._logprobs:
                    yield event({**head, "choices": [self._choice(piece.choice, piece, last=False)], **more})
        if usage:
            yield event({**head, "choices": [], "usage": self._texts.usage})
        yield DONE

    def _first(self, choice: int) -> dict[str, Any] | None:
        return None

    def _choice(self, index: int, piece: Piece, last: bool) -> dict[str, Any]:
        """last: of the whole answer; else of an event."""
        raise NotImplementedError


class _Completions(_Answer):
    kind = chunks = "text_completion"
    begin = "cmpl"

    def __init__(self, model: ServedModel, texts: Texts, logprobs: bool) -> None:
        super().__init__(model, texts, logprobs)
        self._at = [0] * len(texts.choices)  # characters of each text's tokens so far

    def _choice(self, index: int, piece: Piece, last: bool) -> dict[str, Any]:
        logprobs = self._listed(index, piece.tokens) if self._logprobs else None
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": _REASONS[piece.end]}

    def _listed(self, index: int, tokens: Sequence[WrittenToken]) -> dict[str, Any]:
        words, offsets = [self._texts.word(token.id) for token in tokens], []
        for word in words:
            offsets.append(self._at[index])
            self._at[index] += len(word)
        top = [{self._texts.word(one): value for one, value in token.top} for token in tokens]
        return {
            "tokens": words, "token_logprobs": [token.logprob for token in tokens], "top_logprobs": top,
            "text_offset": offsets,
        }  # fmt: skip


class _Chat(_Answer):
    kind, chunks, begin = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _first(self, choice: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, piece: Piece, last: bool) -> dict[str, Any]:
        content = {"content": piece.text} if piece.text or last else {}
        said = {"message": {"role": "assistant", **content, "refusal": None}} if last else {"delta": content}
        logprobs = {"content": [self._told(token) for token in piece.tokens]} if self._logprobs else None
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": _REASONS[piece.end]}

    def _told(self, token: WrittenToken) -> dict[str, Any]:
        top = [self._scored(one, value) for one, value in token.top]
        return {**self._scored(token.id, token.logprob), "top_logprobs": top}

    def _scored(self, token: int, logprob: float | None) -> dict[str, Any]:
        word = self._texts.word(token)
        exact = None if "\ufffd" in word else list(word.encode())  # of half a character nobody knows the bytes
        return {"token": word, "logprob": logprob, "bytes": exact}


def _writing(body: Drawing, most: int | None, logprobs: int | None) -> Writing:
    return Writing(
        max_new_tokens=most, temperature=1.0 if body.temperature is None else body.temperature,
        top_k=top_k_of(body.top_k), top_p=body.top_p, min_p=body.min_p, seed=body.seed,
        repetition_penalty=body.repetition_penalty, presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty, min_new_tokens=body.min_tokens, logit_bias=body.logit_bias,
        ignore_eos=body.ignore_eos, logprobs=logprobs,
    )  # fmt: skip


def _texts(body: Drawing) -> int:
    return 1 if body.n is None else body.n


def _stops(given: str | list[str] | None) -> list[str] | None:
    found = [given] if isinstance(given, str) else given
    return None if found is None else [one for one in found if one]


def _prompts(given: str | list[str | int | list[int]]) -> Sequence[Prompt]:
    """A text, ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    ids = [one for one in given if isinstance(one, int)]
    if ids and len(ids) < len(given):
        raise validation("`prompt` must be a text, ids, or a list of texts or of ids", param="prompt")
    return [ids] if ids else [one for one in given if not isinstance(one, int)]


def _messages(given: Sequence[Message]) -> Prompt:
    found = []
    for at, message in enumerate(given):
        if message.tool_calls:
            raise validation(f"`messages[{at}].tool_calls` is not supported", param="messages")
        content = message.content
        if isinstance(content, list):
            if other := [part.type for part in content if part.type != "text"]:
                raise validation(
                    f"`messages[{at}].content`: parts must be text; got {other[0][:40]!r}", param="messages"
                )
            content = "".join(part.text or "" for part in content)
        found.append({"role": message.role, "content": content or ""})
    return found
