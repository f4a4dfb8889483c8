"""/embed, /embed_all, /embed_sparse, /similarity as TEI has them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from ftbert.server.answers import answered, count_request, json, json_matrix
from ftbert.server.app import App
from ftbert.server.errors import ApiError
from ftbert.server.inputs import Listed, Reading, characters, check_count, check_dimensions, listed, reading
from ftbert.server.messages import Request, Response
from ftbert.server.schemas import Cut, Embed, EmbedAll, Similarity, decode
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.text_encoder import Encoded
from ftbert.server.work import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray


async def embed(app: App, request: Request) -> Response:
    asked = decode(request.body, Embed)
    model = app.model(asked.model, "embedding")
    inputs = listed(asked.inputs, app.settings)
    count_request(app, len(inputs), "embed")
    model.expect("embedding")
    kept = check_dimensions(asked.dimensions, model)
    done = await vectors(request, model, inputs, reading(asked, model))
    body = await json_matrix(finished(done.rows, kept, asked.normalize))
    return answered(app, request, model.about, done, body, "embed")


async def embed_all(app: App, request: Request) -> Response:
    asked = decode(request.body, EmbedAll)
    model = app.model(asked.model, "embedding")
    inputs = listed(asked.inputs, app.settings)
    count_request(app, len(inputs), "embed")
    model.expect("embedding")
    done = await vectors(request, model, inputs, reading(asked, model), Kind.TOKENS)
    offsets = done.encoded.offsets
    body = list[bytes]()
    for a, b in zip(offsets[:-1], offsets[1:], strict=True):
        body += [b"," if body else b"[", *await json_matrix(done.rows[a:b])]
        await asyncio.sleep(0)
    return answered(app, request, model.about, done, [*body, b"]"], "embed")


async def embed_sparse(app: App, request: Request) -> Response:
    decode(request.body, Embed)
    raise ApiError("Backend", "model is not a SPLADE model: ftbert serves no sparse embeddings", counted="model_type")


async def similarity(app: App, request: Request) -> Response:
    asked = decode(request.body, Similarity)
    model = app.model(asked.model, "embedding")
    sentences = asked.inputs.sentences
    if not sentences:
        raise ApiError("Empty", "`inputs.sentences` cannot be empty")
    check_count(len(sentences), app.settings)
    inputs: Listed = [asked.inputs.source_sentence, *sentences]
    count_request(app, len(inputs), "embed")
    model.expect("embedding")
    done = await vectors(request, model, inputs, reading(asked.parameters or Cut(), model))
    unit = finished(done.rows, model.about.truncate_dim, True)
    return answered(app, request, model.about, done, json(unit[1:] @ unit[0]), "embed")


async def vectors(
    request: Request, model: ServedModel, inputs: Listed, how: Reading, kind: Kind = Kind.EMBED
) -> Computed:
    """rows: float32 [texts, hidden], as pooled; of Kind.TOKENS [tokens, hidden]."""
    encoder = model.encoder()

    def encode() -> Encoded:
        return encoder.encode(inputs, how.prompt, how.truncate, how.side, how.most)

    return await model.compute(request, kind, characters(inputs), encode, encoder.inline)


def finished(rows: NDArray[np.float32], kept: int | None, normalize: bool) -> NDArray[np.float32]:
    """Entries kept, then to length 1; a vector of zeros stays one."""
    rows = rows if kept is None else rows[:, :kept]
    if normalize:
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float32))
        rows = rows / np.maximum(norms, 1e-12)[:, None]
    return np.ascontiguousarray(rows, dtype=np.float32)
