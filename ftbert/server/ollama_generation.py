"""/api/generate and /api/chat as Ollama has them, and what its clients ask first: tags, show, version."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from datetime import datetime, timezone
from typing import Any

import msgspec

from ftbert import __version__
from ftbert.server.app import App
from ftbert.server.errors import validation
from ftbert.server.generates import generates
from ftbert.server.generation_schemas import OllamaChat, OllamaDrawing, OllamaGenerate
from ftbert.server.info_routes import capabilities
from ftbert.server.job import Writing
from ftbert.server.json_bodies import decode, to_json
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import ServedModel
from ftbert.server.streams import LINES, error_line, line, streamed
from ftbert.server.writing import Asked, Piece, Prompt, Texts, generation_of, top_k_of, write

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_STARTED = datetime.now(timezone.utc).isoformat()
# Options that are not computed, and the values that change nothing.
_NEUTRAL = {"mirostat": 0, "typical_p": 1, "tfs_z": 1}


@generates(OllamaGenerate)
async def generate(app: App, request: Request, body: OllamaGenerate, model: ServedModel) -> Response:
    if not body.prompt:  # Ollama's way to load a model, which is loaded
        return Response(to_json({**_head(model), "response": "", "done": True, "done_reason": "load"}))
    said = [{"role": "system", "content": body.system}] if body.system else []
    messages: Prompt = [*said, {"role": "user", "content": body.prompt}]
    plain = body.raw or generation_of(model).template is None
    prompt = "\n".join(filter(None, (body.system, body.prompt))) if plain else messages
    asked = _asked(model, prompt, body.options, "prompt")
    texts = await write(app, request, model, asked)
    return await _answered(app, request, model, texts, body.stream, lambda text: {"response": text})


@generates(OllamaChat)
async def chat(app: App, request: Request, body: OllamaChat, model: ServedModel) -> Response:
    for at, message in enumerate(body.messages):
        for name in ("images", "tool_calls"):
            if getattr(message, name):
                raise validation(f"`messages[{at}].{name}` is not supported", param="messages")

    def said(text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    if not body.messages:
        return Response(to_json({**_head(model), **said(""), "done": True, "done_reason": "load"}))
    messages: Prompt = [{"role": one.role, "content": one.content} for one in body.messages]
    texts = await write(app, request, model, _asked(model, messages, body.options, "messages"))
    return await _answered(app, request, model, texts, body.stream, said)


async def _answered(
    app: App, request: Request, model: ServedModel, texts: Texts, stream: bool, said: Callable[[str], dict[str, Any]]
) -> Response:
    if stream:
        return await streamed(app, request, _lines(model, texts, said), LINES, error_line)
    (piece,) = await texts.whole()
    return Response(to_json({**_head(model), **said(piece.text), **_last(texts, piece)}))


async def _lines(
    model: ServedModel, texts: Texts, said: Callable[[str], dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    async for pieces in texts.pieces():
        for piece in pieces:
            if piece.text:
                yield line({**_head(model), **said(piece.text), "done": False})
            if piece.end:
                yield line({**_head(model), **said(""), **_last(texts, piece)})


def _head(model: ServedModel) -> dict[str, Any]:
    return {"model": model.name, "created_at": datetime.now(timezone.utc).isoformat()}


def _last(texts: Texts, piece: Piece) -> dict[str, Any]:
    """Durations in nanoseconds."""

    def between(first: float, last: float) -> int:
        return max(1, round(1e9 * (last - first)))

    return {
        "done": True, "done_reason": _REASONS[piece.end], "total_duration": between(texts.began, time.monotonic()),
        "load_duration": 0, "prompt_eval_count": texts.prompt_tokens,
        "prompt_eval_duration": between(texts.began, texts.first), "eval_count": texts.tokens,
        "eval_duration": between(texts.first, texts.last),
    }  # fmt: skip


def _asked(model: ServedModel, prompt: Prompt, given: OllamaDrawing, name: str) -> Asked:
    for option, neutral in _NEUTRAL.items():
        if getattr(given, option) != neutral:
            raise validation(f"`options.{option}` is not supported, but as {neutral}", param="options")
    writing = Writing(
        max_new_tokens=generation_of(model).positions if given.num_predict < 0 else given.num_predict,
        temperature=given.temperature, top_k=top_k_of(given.top_k), top_p=given.top_p, min_p=given.min_p,
        seed=given.seed, repetition_penalty=given.repeat_penalty, presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
    )  # fmt: skip
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    stop = [one for one in stop or () if one] or None
    names = {"repetition_penalty": "repeat_penalty"}
    return Asked([prompt], writing, stop, fields=(name, "options.num_predict"), names=names)


async def tags(app: App, request: Request) -> Response:
    cards = [{"name": model.name, "model": model.name, "modified_at": _STARTED, "size": 0, "digest": "",
              "details": _details(model)} for model in app.models if model.task is not None]  # fmt: skip
    return Response(to_json({"models": cards}))


class _Show(msgspec.Struct):
    model: str | None = None


async def show(app: App, request: Request) -> Response:
    model = app.model(decode(request.body, _Show).model)
    about = model.about
    facts = about.generation
    values = {
        "details": _details(model), "capabilities": capabilities(model), "template": (facts and facts.template) or "",
        "model_info": {
            "general.architecture": "ftbert", "ftbert.embedding_length": about.model.hidden,
            "ftbert.context_length": about.text.max_length if facts is None else facts.positions,
        },
    }  # fmt: skip
    return Response(to_json(values))


def _details(model: ServedModel) -> dict[str, Any]:
    dtype = model.about.model.dtype
    return {"parent_model": "", "format": "ftbert", "family": str(model.task), "families": [str(model.task)],
            "parameter_size": "", "quantization_level": dtype}  # fmt: skip


async def version(app: App, request: Request) -> Response:
    return Response(to_json({"version": __version__}))
