"""Vectors of texts as Cohere has them: /v2/embed and /v1/embed, several types of numbers in one answer."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ftbert.server.app import Asked, Made, computes
from ftbert.server.errors import ApiError, validation
from ftbert.server.inputs import Reading, check_count, check_dimensions
from ftbert.server.job import Kind
from ftbert.server.json_bodies import json_list, json_matrix, to_json
from ftbert.server.purposes import cut_as, for_purposes
from ftbert.server.schemas import NO_INSTRUCTION, ONLY
from ftbert.server.served_model import ServedModel
from ftbert.server.settings import Settings
from ftbert.server.text_vectors import finished, vectors
from ftbert.server.vector_forms import BYTES, VectorForm

_TYPES = ("float", *BYTES, "base64")
_FORMS = {"float": VectorForm(), "base64": VectorForm(encoding="base64"), **{name: VectorForm(name) for name in BYTES}}


class CohereContent(msgspec.Struct):
    """type: text; images are refused."""

    type: str = "text"
    text: str | None = None


class CohereInput(msgspec.Struct):
    content: list[CohereContent]


class CohereEmbed(msgspec.Struct, kw_only=True):
    """texts, or inputs, of which all texts of one stand on lines of their own. input_type: search_query,
    search_document, or a prompt's name. embedding_types: float, int8, uint8, binary, ubinary, base64. truncate: NONE,
    START or END. max_tokens: of a text, with the special ones."""

    model: str | None = None
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    images: list[str] | None = None
    input_type: str | None = None
    embedding_types: list[str] | None = None
    truncate: str | None = "END"
    max_tokens: int | None = None
    output_dimension: int | None = None


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """embeddings: by type, lists of lists of numbers, of base64 texts; of /v1/embed without embedding_types a list.
    meta: billed_units has input_tokens."""

    id: str
    embeddings: dict[str, list[Any]] | list[list[float]]
    texts: list[str] | None
    meta: dict[str, Any]
    response_type: str


ONLY[CohereEmbed] = NO_INSTRUCTION


def _texts(body: CohereEmbed, settings: Settings) -> list[str]:
    if body.images is not None:
        raise validation("`images` is not supported: the models here read texts", param="images")
    if body.texts is not None and body.inputs is not None:
        raise validation("`texts` and `inputs`: give one of them", param="inputs")
    if body.inputs is None:
        check_count(body.texts or (), settings, "texts")
        return body.texts or []
    check_count(body.inputs, settings, "inputs")
    return [_text(one) for one in body.inputs]


def _text(given: CohereInput) -> str:
    found = [part.text for part in given.content if part.type == "text" and part.text is not None]
    if len(found) < len(given.content):
        raise validation("`inputs`: each `content` must have the `type` text, with `text`", param="inputs")
    if not found:
        raise ApiError("Empty", "`inputs`: a `content` cannot be empty", param="inputs")
    return "\n".join(found)


@computes(CohereEmbed, "embed", "embedding", texts=_texts)
async def embed(asked: Asked[CohereEmbed]) -> Made:
    """/v2/embed, always by type."""
    return await _by_type(asked, _types(asked.body) or ["float"])


@computes(CohereEmbed, "embed", "embedding", texts=_texts)
async def embed_v1(asked: Asked[CohereEmbed]) -> Made:
    """/v1/embed: a list where no types are named."""
    if types := _types(asked.body):
        return await _by_type(asked, types)
    done, rows = await _rows(asked, 1)
    return done, _answer(asked, done, await json_matrix(rows), "embeddings_floats")


async def _by_type(asked: Asked[CohereEmbed], types: list[str]) -> Made:
    done, rows = await _rows(asked, len(types))
    found = list[bytes]()
    for name in types:
        form = _FORMS[name]
        found.append(b'%s"%s":' % (b"," if found else b"{", name.encode()))
        if form.encoding == "base64":
            found += await json_list(map(form.json, form.rows(rows)))
        else:
            found += await json_matrix(rows, form.numbers)
    return done, _answer(asked, done, [*found, b"}"], "embeddings_by_type")


async def _rows(asked: Asked[CohereEmbed], types: int) -> tuple[Any, Any]:
    """What was computed, and float32 [texts, width] of length 1."""
    kept = check_dimensions(asked.body.output_dimension, asked.model, name="output_dimension")
    more = (types - 1) * Kind.EMBED.bytes_of(asked.model.about) * len(asked.texts)
    asked.app.memory.take(asked.request, more, len(asked.texts), "texts")
    done = await vectors(asked, _reading(asked.body, asked.model))
    return done, finished(done.rows, kept, True)


def _answer(asked: Asked[CohereEmbed], done: Any, embeddings: list[bytes], kind: str) -> list[bytes]:
    version, billed = {"version": asked.request.path[2:3]}, {"input_tokens": done.encoded.tokens}
    meta = {"api_version": version, "billed_units": billed}
    tail = {"texts": asked.body.texts, "meta": meta, "response_type": kind}
    return [b'{"id":"%s","embeddings":' % str(uuid.uuid4()).encode(), *embeddings, b"," + to_json(tail)[1:]]


def _types(body: CohereEmbed) -> list[str]:
    """Each once. ApiError 422."""
    found = list(dict.fromkeys(body.embedding_types or ()))
    for one in found:
        if one not in _TYPES:
            known = f"{', '.join(_TYPES[:-1])} or {_TYPES[-1]}"
            raise validation(f"`embedding_types` must be {known}; got {one[:20]!r}", param="embedding_types")
    if body.embedding_types is not None and not found:
        raise ApiError("Empty", "`embedding_types` cannot be empty", param="embedding_types")
    return found


def _reading(body: CohereEmbed, model: ServedModel) -> Reading:
    """ApiError 422."""
    text, most = model.about.text, body.max_tokens
    if most is not None and most <= text.special:
        words = f"`max_tokens` must be at least {text.special + 1}; got {str(most)[:20]}"
        raise validation(words, param="max_tokens")
    how = Reading(text.default_prompt, True, "right", None if most is None else min(most, text.max_length))
    if body.truncate is not None and body.truncate.upper() not in ("NONE", "START", "END"):
        raise validation(f"`truncate` must be NONE, START or END; got {body.truncate[:20]!r}", param="truncate")
    return for_purposes(cut_as(how, body.truncate), model, {"input_type": body.input_type})
