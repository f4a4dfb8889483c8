"""/completion and /props as llama.cpp's server has them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import parse_qs

from ftbert import __version__
from ftbert.server.app import App
from ftbert.server.generates import generates
from ftbert.server.generation_schemas import LlamaCompletion
from ftbert.server.job import Writing, WrittenToken
from ftbert.server.json_bodies import to_json
from ftbert.server.messages import Request, Response
from ftbert.server.served_model import ServedModel
from ftbert.server.streams import EVENTS, error_event, event, streamed
from ftbert.server.writing import Asked, Piece, Texts, generation_of, top_k_of, write

_TYPES = {"": "none", "eos": "eos", "stop": "word", "length": "limit"}
_NAMES = {"repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
# A bias that is false means: never.
_NEVER = -1e9


@generates(LlamaCompletion)
async def completion(app: App, request: Request, body: LlamaCompletion, model: ServedModel) -> Response:
    biases = body.logit_bias.items() if isinstance(body.logit_bias, dict) else body.logit_bias
    writing = Writing(
        max_new_tokens=generation_of(model).positions if body.n_predict == -1 else body.n_predict,
        temperature=body.temperature, top_k=top_k_of(body.top_k), top_p=body.top_p, min_p=body.min_p,
        seed=None if body.seed == -1 else body.seed, repetition_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty, frequency_penalty=body.frequency_penalty,
        logit_bias={one: _NEVER if value is False else float(value) for one, value in biases} or None,
        ignore_eos=body.ignore_eos or None, logprobs=body.n_probs or None,
    )  # fmt: skip
    stop = [one for one in body.stop if one] or None
    asked = Asked([body.prompt], writing, stop, fields=("prompt", "n_predict"), names=_NAMES)
    texts = await write(app, request, model, asked)
    if body.stream:
        return await streamed(app, request, _events(model, texts, body), EVENTS, error_event)
    (piece,) = await texts.whole()

    def made() -> bytes:
        return to_json({**_piece(texts, piece, body), **_last(model, texts, piece, body)})

    return Response(await texts.made([piece], made))


async def _events(model: ServedModel, texts: Texts, body: LlamaCompletion) -> AsyncGenerator[bytes, None]:
    async for pieces in texts.pieces():
        for piece in pieces:
            if (told := _told(piece)) or piece.text:
                shown = _piece(texts, piece, body) | {"tokens": [token.id for token in told]}
                yield event(shown | {"tokens_predicted": texts.tokens, "tokens_evaluated": texts.prompt_tokens})
            if piece.end:
                yield event({"index": 0, "content": "", "tokens": [], **_last(model, texts, piece, body)})


def _told(piece: Piece) -> list[WrittenToken]:
    """llama.cpp's server gives the token that ended a text, too."""
    return [*piece.tokens, piece.last] if piece.last else piece.tokens


def _piece(texts: Texts, piece: Piece, body: LlamaCompletion) -> dict[str, Any]:
    ids = [token.id for token in _told(piece)] if body.return_tokens else []
    found = {"index": 0, "content": piece.text, "tokens": ids, "stop": False, "id_slot": -1}
    if body.n_probs:
        found["completion_probabilities"] = [_scored(texts, token) for token in _told(piece)]
    return found


def _scored(texts: Texts, token: WrittenToken) -> dict[str, Any]:
    def one(which: int, logprob: float | None) -> dict[str, Any]:
        word = texts.word(which)
        return {"id": which, "token": word, "bytes": list(word.encode()), "logprob": logprob}

    return {**one(token.id, token.logprob), "top_logprobs": [one(*other) for other in token.top]}


def _last(model: ServedModel, texts: Texts, piece: Piece, body: LlamaCompletion) -> dict[str, Any]:
    cached, most = texts.usage["prompt_tokens_details"]["cached_tokens"], generation_of(model).positions
    return {
        "stop": True, "stop_type": _TYPES[piece.end], "stopping_word": piece.word, "model": model.name,
        "tokens_predicted": texts.tokens, "tokens_evaluated": texts.prompt_tokens, "tokens_cached": cached,
        "truncated": False, "has_new_line": "\n" in piece.text, "timings": _timings(texts, cached),
        "generation_settings": {"n_predict": min(body.n_predict, most), "temperature": body.temperature,
                                "top_k": body.top_k, "top_p": body.top_p, "min_p": body.min_p, "seed": body.seed,
                                "stop": body.stop},
    }  # fmt: skip


def _timings(texts: Texts, cached: int) -> dict[str, Any]:
    """Milliseconds; a prompt's are those to the first token, waiting included."""

    def of(name: str, tokens: int, seconds: float) -> dict[str, Any]:
        seconds = max(seconds, 1e-9)
        each = {f"{name}_per_token_ms": 1e3 * seconds / max(tokens, 1), f"{name}_per_second": tokens / seconds}
        return {f"{name}_n": tokens, f"{name}_ms": 1e3 * seconds, **each}

    prompt = of("prompt", texts.prompt_tokens - cached, texts.first - texts.began)
    return {"cache_n": cached, **prompt, **of("predicted", texts.tokens, texts.last - texts.first)}


async def props(app: App, request: Request) -> Response:
    """Of the first model that generates, or of ?model=NAME."""
    names = parse_qs(request.query.decode("latin-1")).get("model")
    model = app.model(names[-1] if names else None, "generation")
    model.expect("generation")
    facts, defaults = generation_of(model), LlamaCompletion(prompt="")
    params = {name: getattr(defaults, name) for name in defaults.__struct_fields__ if name not in ("prompt", "model")}
    values = {
        "default_generation_settings": {"n_ctx": facts.positions, "params": params}, "total_slots": facts.slots,
        "model_alias": model.name, "model_path": model.source, "chat_template": facts.template or "",
        "bos_token": facts.names.get("bos_token", ""), "eos_token": facts.names.get("eos_token", ""),
        "modalities": {"vision": False, "audio": False}, "build_info": f"ftbert {__version__}",
    }  # fmt: skip
    return Response(to_json(values))
