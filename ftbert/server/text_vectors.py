"""Vectors of texts from engines, and how they are finished: dimensions, length 1, JSON or bytes."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server.app import Asked
from ftbert.server.errors import validation
from ftbert.server.inputs import Reading, characters
from ftbert.server.job import Kind
from ftbert.server.json_bodies import json_list, to_json
from ftbert.server.messages import Response
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.vector_forms import VectorForm

# Bytes that are written without letting others of the event loop in between.
_AT_ONCE = 1 << 18
# Of a header: more is refused by clients, as Python's.
_LONGEST_HEADER = 60_000


def vectors(asked: Asked[Any], how: Reading, kind: Kind = Kind.EMBED) -> Coroutine[Any, Any, Computed]:
    """rows: float32 [texts, hidden], as pooled; of Kind.TOKENS [tokens, hidden]."""
    encoder = asked.model.encoder()
    encode = partial(encoder.encode, asked.texts, how.prompt, how.truncate, how.side, how.most)
    return asked.model.compute(asked.request, kind, characters(asked.texts), encode, encoder.inline, how.adapter)


def chunks(asked: Asked[Any], how: Reading) -> Coroutine[Any, Any, Computed]:
    """The inputs are parts of one text, in turn; where none ends or begins with white space, a space stands between
    two. rows: float32 [inputs, hidden]. ApiError 422."""
    encoder, parts = asked.model.encoder(), [one for one in asked.texts if isinstance(one, str)]
    if len(parts) < len(asked.texts):
        raise validation("`late_chunking` is for texts: parts of one; got token ids", param="input")
    if not asked.model.about.vectors.chunks:
        raise validation("`late_chunking`: this model's tokens do not see their text", param="late_chunking")
    for i, part in enumerate(parts[1:]):
        apart = part[:1].isspace() or parts[i][-1:].isspace() or not part or not parts[i]
        parts[i + 1] = part if apart else " " + part
    return asked.model.compute(
        asked.request, Kind.CHUNKS, characters(list(parts)), lambda: encoder.encode_chunks(parts, how.prompt),
        encoder.inline, how.adapter,
    )  # fmt: skip


def finished(rows: NDArray[np.float32], kept: int | None, normalize: bool) -> NDArray[np.float32]:
    """Entries kept, then to length 1; a vector of zeros stays one."""
    rows = rows if kept is None else rows[:, :kept]
    if normalize:
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float32))
        rows = rows / np.maximum(norms, 1e-12)[:, None]
    return np.ascontiguousarray(rows, dtype=np.float32)


async def listed_vectors(
    rows: Iterable[NDArray[np.float32]], form: VectorForm, kind: str, field: str, model: ServedModel, done: Computed
) -> list[bytes] | Response:
    """OpenAI's list with an object for each row or matrix of `rows`, float32; or the bytes of all behind one another,
    with vLLM's header `metadata` unless the form is "bytes_only". ApiError 422 where that header is too long."""
    head: dict[str, Any] = {"id": f"embd-{uuid.uuid4().hex}", "object": "list"}
    tail = {"model": model.name, "usage": done.usage}
    written = form.rows(rows) if isinstance(rows, np.ndarray) else map(form.numbers, rows)
    if form.encoding in ("float", "base64"):
        items = ({"object": kind, "index": i, field: form.json(row)} for i, row in enumerate(written))
        return [to_json(head)[:-1], b',"data":', *await json_list(items), b"," + to_json(tail)[1:]]
    parts, data, at = [], [], 0
    for i, row in enumerate(written):
        parts.append(row.tobytes())
        size, ends = len(parts[-1]), "big" if form.big_endian else "little"
        data.append({"index": i, "embed_dtype": form.number, "endianness": ends, "start": at, "end": at + size,
                     "shape": list(row.shape)})  # fmt: skip
        at += size
        if at // _AT_ONCE > (at - size) // _AT_ONCE:
            await asyncio.sleep(0)
    response = Response([b"".join(parts)], content_type="application/octet-stream")
    if form.encoding == "bytes":
        told = json.dumps({**head, "data": data, **tail}, separators=(",", ":"))  # in ASCII, whatever the model's name
        if len(told) > _LONGEST_HEADER:
            words = "the header that describes so many vectors is too long: use bytes_only, or send fewer texts"
            raise validation(f"`encoding_format`: {words}", param="encoding_format")
        response.headers.append(("metadata", told))
    return response
