"""/v1/embeddings and /v1/models as OpenAI has them, with vLLM's fields; /pooling as vLLM has it."""

from __future__ import annotations

import asyncio
import time
from binascii import b2a_base64
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ftbert.server.answers import answered, count_request, json
from ftbert.server.app import App
from ftbert.server.description import Description
from ftbert.server.embed_routes import finished, vectors
from ftbert.server.errors import validation
from ftbert.server.inputs import Reading, check_dimensions, limited_reading, listed
from ftbert.server.messages import Request, Response
from ftbert.server.schemas import OpenAIEmbed, Pooling, decode
from ftbert.server.served_model import ServedModel
from ftbert.server.work import Kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Words for the two kinds of texts in Cohere's, Jina's, Voyage's, NVIDIA's and Google's APIs, and in folders.
_QUERY = ("query", "search_query", "retrieval.query", "retrieval_query")
_DOCUMENT = (
    "document", "passage", "search_document", "corpus", "retrieval.passage", "retrieval.document",
    "retrieval_document", "retrieval_passage",
)  # fmt: skip
# Vectors that are written without letting others of the event loop in between.
_ROWS_AT_ONCE = 128
_STARTED = int(time.time())


async def embeddings(app: App, request: Request) -> Response:
    asked = decode(request.body, OpenAIEmbed)
    model = app.model(asked.model, "embedding")
    inputs = listed(asked.input, app.settings, "input")
    count_request(app, len(inputs), "embed")
    model.expect("embedding")
    encoding = _encoding(asked.encoding_format)
    kept = check_dimensions(asked.dimensions, model)
    done = await vectors(request, model, inputs, _reading(asked, model))
    rows = finished(done.rows, kept, asked.use_activation is not False)
    items = await _items(rows, encoding, "embedding", "embedding")
    tokens = done.encoded.tokens
    tail = {"model": model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return answered(app, request, model.about, done, _listed(items, tail), "embed")


async def pooling(app: App, request: Request) -> Response:
    asked = decode(request.body, Pooling)
    model = app.model(asked.model, "embedding")
    inputs = listed(asked.input, app.settings, "input")
    count_request(app, len(inputs), "embed")
    model.expect("embedding")
    encoding = _encoding(asked.encoding_format)
    if asked.task not in (None, "embed", "token_embed"):
        raise validation(f"`task` must be embed or token_embed; got {asked.task[:40]!r}", param="task")
    of_tokens = asked.task == "token_embed"
    kept, how = check_dimensions(asked.dimensions, model, of_tokens), limited_reading(asked, model)
    unit = asked.use_activation is not False
    if of_tokens:
        done = await vectors(request, model, inputs, how, Kind.TOKENS)
        offsets = done.encoded.offsets.tolist()
        rows = finished(done.rows, kept, unit)
        of_texts: Iterable[NDArray[np.float32]] = [rows[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    else:
        done = await vectors(request, model, inputs, how)
        of_texts = finished(done.rows, kept, unit)
    items = await _items(of_texts, encoding, "pooling", "data")
    tokens = done.encoded.tokens
    tail = {"model": model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return answered(app, request, model.about, done, _listed(items, tail), "embed")


async def models(app: App, request: Request) -> Response:
    return Response(json({"object": "list", "data": [_card(model) for model in app.models]}))


async def one_model(app: App, request: Request) -> Response:
    """By its name, or by its folder or hub id."""
    name = unquote(request.path.removeprefix("/v1/models/"))
    return Response(json(_card(app.named(name))))


def _card(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "ftbert", "root": model.source}


def _reading(asked: OpenAIEmbed, model: ServedModel) -> Reading:
    """With the prompt and length of what the texts are for, and `truncate` in any of its spellings. ApiError 422."""
    how, about, given = limited_reading(asked, model), model.about, asked.truncate
    if given is not None:
        ways = {"TRUE": (True, how.side), "FALSE": (False, how.side), "NONE": (False, how.side),
                "START": (True, "left"), "END": (True, "right")}  # fmt: skip
        if (way := ways.get(str(given).upper())) is None:
            given = str(given)[:20]
            raise validation(f"`truncate` must be a bool, NONE, START or END; got {given!r}", param="truncate")
        how = replace(how, truncate=way[0] or how.most is not None, side=way[1])
    purposes = {name: value for name in ("input_type", "task") if (value := getattr(asked, name)) is not None}
    found = {_for_purpose(name, value, about) for name, value in purposes.items()}
    if asked.prompt_name is not None:
        found.add((model.prompt(asked.prompt_name), None))
    if not found:
        return how
    prompts, lengths = {prompt for prompt, _ in found}, {length for _, length in found if length is not None}
    if len(prompts) > 1 or len(lengths) > 1:
        raise validation("`prompt_name`, `input_type` and `task` ask for different prompts; give one of them")
    return replace(how, prompt=prompts.pop(), most=lengths.pop() if lengths and how.most is None else how.most)


def _for_purpose(name: str, value: str, about: Description) -> tuple[str, int | None]:
    """The prompt, and most tokens where the folder says, of texts for `value`: a prompt's own name, or any API's word
    for queries or documents. A folder without a prompt for those has none before them, as in encode_query. ApiError
    422 for other words."""
    purpose = value.lower()
    for words, length in ((_QUERY, about.query_length), (_DOCUMENT, about.document_length)):
        if purpose in words:
            texts = (about.prompts.get(one) for one in (value, *words))
            return next((text for text in texts if text), ""), length
    if value in about.prompts:
        return about.prompts[value], None
    known = ", ".join(map(repr, dict.fromkeys(("query", "document", *about.prompts))))
    raise validation(f"`{name}` must be one of {known}; got {value[:40]!r}", param=name)


def _encoding(name: str | None) -> str:
    if name not in (None, "float", "base64"):
        raise validation(f"`encoding_format` must be float or base64; got {name[:20]!r}", param="encoding_format")
    return name or "float"


async def _items(rows: Iterable[NDArray[np.float32]], encoding: str, kind: str, field: str) -> list[bytes]:
    """The objects of `data`, one a row or matrix, with commas. base64: of little-endian float32."""
    items = []
    for i, row in enumerate(rows):
        value: Any = row if encoding == "float" else b2a_base64(row.tobytes(), newline=False).decode("ascii")
        items.append((b"," if i else b"") + json({"object": kind, "index": i, field: value}))
        if i % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1 or row.ndim > 1:
            await asyncio.sleep(0)
    return items


def _listed(items: list[bytes], tail: dict[str, Any]) -> list[bytes]:
    return [b'{"object":"list","data":[', *items, b"]," + json(tail)[1:]]
