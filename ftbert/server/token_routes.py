"""/tokenize and /decode as TEI has them; /tokenize with `prompt` and /detokenize as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ftbert.server.app import App
from ftbert.server.errors import ApiError, validation
from ftbert.server.inputs import check_count
from ftbert.server.json_bodies import decode, fields_of, to_json
from ftbert.server.links import Disconnected
from ftbert.server.memory import decoded, tokenised
from ftbert.server.messages import Request, Response
from ftbert.server.schemas import Decode, Detokenize, Tokenize, TokenizePrompt
from ftbert.server.served_model import ServedModel

# Characters, or ids, of the texts that one call gets: it is long beside what a call costs, and its result is small.
_AT_ONCE = 65536
# Tokens that are Python objects at the same time, on their way to JSON.
_TOKENS_AT_ONCE = 4096


async def tokenize(app: App, request: Request) -> Response:
    if "prompt" in (fields := await fields_of(request.body)) and "inputs" not in fields:
        return await _tokenize_prompt(app, request)
    asked = decode(request.body, Tokenize)
    model = app.model(asked.model)
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    check_count(texts, app.settings)
    prompt = model.prompt(asked.prompt_name)
    full = [prompt + text for text in texts]
    characters = sum(map(len, full))
    app.memory.take(request, tokenised(full), characters, "characters")
    whole, special, go_on = model.encoder().whole, set(model.about.text.special_ids), _until(model, request)

    def run() -> list[bytes]:
        parts = [b"["]
        for some in _calls(full):
            found = whole.encode_batch(some, add_special_tokens=asked.add_special_tokens)
            for text, one in zip(some, found, strict=True):
                parts.append(b",[" if len(parts) > 1 else b"[")
                for part in _tokens(text, one, special):
                    go_on()
                    parts.append(part)
                parts.append(b"]")
        return [*parts, b"]"]

    return Response(await model.in_thread(request, characters, run))


def _tokens(text: str, encoding: Any, special_ids: set[int]) -> Iterator[bytes]:
    """JSON of the tokens, with commas between them, piece by piece."""
    columns = encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets
    for at in range(0, len(columns[0]), _TOKENS_AT_ONCE):
        found: list[dict[str, Any]] = []
        piece = [column[at : at + _TOKENS_AT_ONCE] for column in columns]
        for one, word, added, (start, stop) in zip(*piece, strict=True):
            if added:
                found.append({"id": one, "text": word, "special": True, "start": None, "stop": None})
            else:
                place = {"start": start, "stop": stop}
                found.append({"id": one, "text": text[start:stop], "special": one in special_ids, **place})
        yield (b"," if at else b"") + to_json(found)[1:-1]


async def _tokenize_prompt(app: App, request: Request) -> Response:
    asked = decode(request.body, TokenizePrompt)
    model = app.model(asked.model)
    app.memory.take(request, tokenised([asked.prompt]), len(asked.prompt), "characters")

    def run() -> bytes:
        whole = model.encoder().whole  # whose calls for one text keep all other threads waiting
        (found,) = whole.encode_batch([asked.prompt], add_special_tokens=asked.add_special_tokens)
        values = {"tokens": found.ids, "count": len(found.ids), "max_model_len": model.about.text.max_length}
        return to_json(values | ({"token_strs": found.tokens} if asked.return_token_strs else {}))

    return Response(await model.in_thread(request, len(asked.prompt), run))


async def decode_ids(app: App, request: Request) -> Response:
    asked = decode(request.body, Decode)
    model = app.model(asked.model)
    if not asked.ids:
        raise ApiError("Empty", "`ids` cannot be empty")
    flat = [one for one in asked.ids if isinstance(one, int)]
    if flat and len(flat) != len(asked.ids):
        raise validation("`ids` must be ids or lists of ids")
    rows = [flat] if flat else [one for one in asked.ids if isinstance(one, list)]
    check_count(rows, app.settings)
    _check_ids(rows, model)
    ids = sum(map(len, rows))
    app.memory.take(request, decoded(rows), ids, "ids")
    whole, go_on = model.encoder().whole, _until(model, request)

    def run() -> list[bytes]:
        parts = [b"["]
        for some in _calls(rows):
            go_on()
            texts = whole.decode_batch(some, skip_special_tokens=asked.skip_special_tokens)
            parts.append((b"," if len(parts) > 1 else b"") + to_json(texts)[1:-1])
        return [*parts, b"]"]

    return Response(await model.in_thread(request, ids, run))


async def detokenize(app: App, request: Request) -> Response:
    asked = decode(request.body, Detokenize)
    model = app.model(asked.model)
    _check_ids([asked.tokens], model)
    app.memory.take(request, decoded([asked.tokens]), len(asked.tokens), "ids")

    def run() -> bytes:
        (found,) = model.encoder().whole.decode_batch([asked.tokens], skip_special_tokens=False)
        return to_json({"prompt": found})

    return Response(await model.in_thread(request, len(asked.tokens), run))


def _until(model: ServedModel, request: Request) -> Callable[[], None]:
    """What to call between pieces of long work: ends it where nobody waits for the rest."""
    deadline = model.deadline(request)

    def go_on() -> None:
        if request.disconnected:
            raise Disconnected
        if time.monotonic() > deadline:
            raise ApiError("Unhealthy", "the request was not answered before its deadline", retry_after=1.0)

    return go_on


def _calls(rows: Sequence[Any]) -> Iterator[list[Any]]:
    """Neighbours of at most _AT_ONCE characters or ids, at least one."""
    found, size = list[Any](), 0
    for row in rows:
        if found and size + len(row) > _AT_ONCE:
            yield found
            found, size = [], 0
        found.append(row)
        size += len(row)
    yield found


def _check_ids(rows: list[list[int]], model: ServedModel) -> None:
    vocab = model.about.model.vocab
    for row in rows:
        if row and (min(row) < 0 or max(row) >= vocab):
            raise validation(f"a token id is outside the model's vocabulary of {vocab}")
