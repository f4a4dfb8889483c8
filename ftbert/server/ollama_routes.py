"""Vectors of texts as Ollama has them: /api/embed and, older, /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ftbert.server.app import Asked, Made, computes
from ftbert.server.errors import validation
from ftbert.server.inputs import Reading, check_count, check_dimensions
from ftbert.server.json_bodies import json_matrix, to_json
from ftbert.server.schemas import NO_INSTRUCTION, ONLY
from ftbert.server.served_model import ServedModel
from ftbert.server.settings import Settings
from ftbert.server.text_vectors import finished, vectors


class OllamaOptions(msgspec.Struct):
    """num_ctx: tokens of a text with the special ones, at most. Others have no bearing on vectors."""

    num_ctx: int | None = None


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """truncate: false refuses texts that are too long. keep_alive has no effect."""

    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """See OllamaEmbed."""

    model: str | None = None
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None


class OllamaVectors(msgspec.Struct):
    """Durations in nanoseconds. prompt_eval_count: tokens."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(msgspec.Struct):
    embedding: list[float]


ONLY[OllamaEmbed] = ONLY[OllamaEmbeddings] = NO_INSTRUCTION


def _inputs(body: OllamaEmbed, settings: Settings) -> list[str]:
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_count(texts, settings, "input")
    return texts


@computes(OllamaEmbed, "embed", "embedding", texts=_inputs)
async def embed(asked: Asked[OllamaEmbed]) -> Made:
    body, model = asked.body, asked.model
    kept = check_dimensions(body.dimensions, model)
    done = await vectors(asked, _reading(model, body.options, body.truncate))
    rows = await json_matrix(finished(done.rows, kept, True))
    tail = {
        "total_duration": round(1e9 * (time.monotonic() - asked.request.began)), "load_duration": 0,
        "prompt_eval_count": done.encoded.tokens,
    }  # fmt: skip
    head = to_json({"model": body.model or model.name})[:-1]
    return done, [head, b',"embeddings":', *rows, b"," + to_json(tail)[1:]]


def _prompt(body: OllamaEmbeddings, settings: Settings) -> list[str]:
    return [body.prompt]


@computes(OllamaEmbeddings, "embed", "embedding", texts=_prompt)
async def embeddings(asked: Asked[OllamaEmbeddings]) -> Made:
    """As pooled: Ollama brings these to no length either."""
    done = await vectors(asked, _reading(asked.model, asked.body.options, None))
    row: Any = finished(done.rows, asked.model.about.vectors.truncate_dim, False)[0]
    return done, to_json({"embedding": row})


def _reading(model: ServedModel, options: OllamaOptions | None, truncate: bool | None) -> Reading:
    """ApiError 422."""
    text, most = model.about.text, None if options is None else options.num_ctx
    if most is not None and most <= text.special:
        words = f"`options.num_ctx` must be at least {text.special + 1}; got {str(most)[:20]}"
        raise validation(words, param="options")
    most = None if most is None else min(most, text.max_length)
    return Reading(text.default_prompt, truncate is not False, "right", most)
