"""/v1/embeddings and /v1/models as OpenAI has them, with vLLM's fields; /pooling as vLLM has it."""

from __future__ import annotations

import asyncio
import time
from binascii import b2a_base64
from typing import TYPE_CHECKING, Any

from ftbert.server.answers import answered, count_request, json
from ftbert.server.app import App
from ftbert.server.embed_routes import finished, vectors
from ftbert.server.errors import validation
from ftbert.server.inputs import check_dimensions, listed
from ftbert.server.messages import Request, Response
from ftbert.server.schemas import Cut, OpenAIEmbed, Pooling, decode
from ftbert.server.work import Kind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Vectors that are written without letting others of the event loop in between.
_ROWS_AT_ONCE = 128
_STARTED = int(time.time())


async def embeddings(app: App, request: Request) -> Response:
    asked = decode(request.body, OpenAIEmbed)
    model = app.model(asked.model, "embedding")
    inputs = listed(asked.input, app.settings, "input")
    count_request(app, len(inputs), "embed")
    _check_format(asked.encoding_format)
    if asked.embed_dtype != "float32" or asked.endianness not in ("native", "little"):
        raise validation("`embed_dtype` must be float32 and `endianness` native", param="embed_dtype")
    if asked.truncate_prompt_tokens not in (None, -1) or not asked.add_special_tokens:
        raise validation("`truncate_prompt_tokens` and `add_special_tokens=false` are not supported")
    kept = check_dimensions(asked.dimensions, model)
    cut = Cut(truncate=asked.truncate, truncation_direction=asked.truncation_side)
    done = await vectors(request, model, inputs, cut)
    items = await _items(finished(done.rows, kept, True), asked.encoding_format, "embedding", "embedding")
    tokens = done.encoded.tokens
    tail = {"model": model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return answered(app, request, model.about, done, _listed(items, tail), "embed")


async def pooling(app: App, request: Request) -> Response:
    asked = decode(request.body, Pooling)
    model = app.model(asked.model, "embedding")
    inputs = listed(asked.input, app.settings, "input")
    count_request(app, len(inputs), "embed")
    _check_format(asked.encoding_format)
    if asked.task not in (None, "embed", "token_embed"):
        raise validation(f"`task` must be embed or token_embed; got {asked.task[:40]!r}", param="task")
    if asked.task == "token_embed":
        done = await vectors(request, model, inputs, Cut(), Kind.TOKENS)
        offsets = done.encoded.offsets.tolist()
        data = [done.rows[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        items = []
        for i, one in enumerate(data):
            items.append((b"," if i else b"") + json({"object": "pooling", "index": i, "data": one}))
            await asyncio.sleep(0)
    else:
        done = await vectors(request, model, inputs, Cut())
        rows = finished(done.rows, model.about.truncate_dim, True)
        items = await _items(rows, asked.encoding_format, "pooling", "data")
    tokens = done.encoded.tokens
    tail = {"model": model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return answered(app, request, model.about, done, _listed(items, tail), "embed")


async def models(app: App, request: Request) -> Response:
    data = [
        {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "ftbert", "root": model.source}
        for model in app.models
    ]
    return Response(json({"object": "list", "data": data}))


def _check_format(name: str) -> None:
    if name not in ("float", "base64"):
        raise validation(f"`encoding_format` must be float or base64; got {name[:20]!r}", param="encoding_format")


async def _items(rows: NDArray[np.float32], encoding: str, kind: str, field: str) -> list[bytes]:
    """The objects of `data`, with commas. base64: of little-endian float32."""
    items = []
    for i, row in enumerate(rows):
        value: Any = row if encoding == "float" else b2a_base64(row.tobytes(), newline=False).decode("ascii")
        items.append((b"," if i else b"") + json({"object": kind, "index": i, field: value}))
        if i % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
    return items


def _listed(items: list[bytes], tail: dict[str, Any]) -> list[bytes]:
    return [b'{"object":"list","data":[', *items, b"]," + json(tail)[1:]]
