"""/tokenize and /decode as TEI has them; /tokenize with `prompt` and /detokenize as vLLM has them."""

from __future__ import annotations

from typing import Any

from ftbert.server.answers import json
from ftbert.server.app import App
from ftbert.server.errors import ApiError, validation
from ftbert.server.inputs import check_count
from ftbert.server.json_keys import fields_of
from ftbert.server.messages import Request, Response
from ftbert.server.schemas import Decode, Detokenize, Tokenize, TokenizePrompt, decode
from ftbert.server.served_model import ServedModel


async def tokenize(app: App, request: Request) -> Response:
    if "prompt" in (fields := await fields_of(request.body)) and "inputs" not in fields:
        return await _tokenize_prompt(app, request)
    asked = decode(request.body, Tokenize)
    model = app.model(asked.model)
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    if not texts:
        raise ApiError("Empty", "`inputs` cannot be empty")
    check_count(len(texts), app.settings)
    prompt = model.prompt(asked.prompt_name)
    full = [prompt + text for text in texts]

    def run() -> bytes:
        found = model.encoder().whole.encode_batch(full, add_special_tokens=asked.add_special_tokens)
        special = set(model.about.special_ids)
        return json([_tokens(text, one, special) for text, one in zip(full, found, strict=True)])

    return Response(await model.in_thread(sum(map(len, full)), run))


def _tokens(text: str, encoding: Any, special_ids: set[int]) -> list[dict[str, Any]]:
    rows = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    found = []
    for one, token, special, (start, stop) in rows:
        if special:
            found.append({"id": one, "text": token, "special": True, "start": None, "stop": None})
        else:
            place = {"start": start, "stop": stop}
            found.append({"id": one, "text": text[start:stop], "special": one in special_ids, **place})
    return found


async def _tokenize_prompt(app: App, request: Request) -> Response:
    asked = decode(request.body, TokenizePrompt)
    model = app.model(asked.model)

    def run() -> bytes:
        found = model.encoder().whole.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)
        values = {"tokens": found.ids, "count": len(found.ids), "max_model_len": model.about.max_length}
        return json(values | ({"token_strs": found.tokens} if asked.return_token_strs else {}))

    return Response(await model.in_thread(len(asked.prompt), run))


async def decode_ids(app: App, request: Request) -> Response:
    asked = decode(request.body, Decode)
    model = app.model(asked.model)
    if not asked.ids:
        raise ApiError("Empty", "`ids` cannot be empty")
    flat = [one for one in asked.ids if isinstance(one, int)]
    if flat and len(flat) != len(asked.ids):
        raise validation("`ids` must be ids or lists of ids")
    rows = [flat] if flat else [one for one in asked.ids if isinstance(one, list)]
    check_count(len(rows), app.settings)
    _check_ids(rows, model)

    def run() -> bytes:
        return json(model.encoder().whole.decode_batch(rows, skip_special_tokens=asked.skip_special_tokens))

    return Response(await model.in_thread(sum(map(len, rows)), run))


async def detokenize(app: App, request: Request) -> Response:
    asked = decode(request.body, Detokenize)
    model = app.model(asked.model)
    _check_ids([asked.tokens], model)

    def run() -> bytes:
        return json({"prompt": model.encoder().whole.decode(asked.tokens, skip_special_tokens=False)})

    return Response(await model.in_thread(len(asked.tokens), run))


def _check_ids(rows: list[list[int]], model: ServedModel) -> None:
    vocab = model.about.vocab
    for row in rows:
        if row and (min(row) < 0 or max(row) >= vocab):
            raise validation(f"a token id is outside the model's vocabulary of {vocab}")
