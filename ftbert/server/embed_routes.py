"""Vectors of texts: /embed, /embed_all, /embed_sparse, /similarity as TEI has them; /v1/embeddings as OpenAI has it,
with vLLM's fields; /pooling as vLLM has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ftbert.server.app import Asked, Made, computes
from ftbert.server.description import TableFacts
from ftbert.server.errors import validation
from ftbert.server.inputs import (
    Listed,
    Reading,
    characters,
    check_count,
    check_dimensions,
    limited_reading,
    listed,
    reading,
)
from ftbert.server.instructions import Instruction, instruction_of
from ftbert.server.job import Kind
from ftbert.server.json_bodies import json_list, json_matrix, to_json
from ftbert.server.purposes import cut_as, for_purposes
from ftbert.server.schemas import Cut, Embed, EmbedAll, OpenAIEmbed, Part, Pooling, Similarity
from ftbert.server.served_model import Computed
from ftbert.server.settings import Settings
from ftbert.server.text_vectors import chunks, finished, listed_vectors, vectors
from ftbert.server.token_vectors import vectors_of
from ftbert.server.vector_forms import BYTES, VectorForm, choose_form
from ftbert.text import SparseVector, entries_of, lexical, looked_up

_JINA_TYPES = ("float", "base64", "binary", "ubinary")


def _inputs(body: Embed | EmbedAll, settings: Settings) -> Listed:
    return listed(body.inputs, settings)


def _input(body: OpenAIEmbed | Pooling, settings: Settings) -> Listed:
    given = body.input
    plain = given if isinstance(given, str) else [one.text if isinstance(one, Part) else one for one in given]
    return listed(plain, settings, "input")


@computes(Embed, "embed", "embedding", texts=_inputs)
async def embed(asked: Asked[Embed]) -> Made:
    body, model = asked.body, asked.model
    kept = check_dimensions(body.dimensions, model)
    how = for_purposes(reading(body, model), model, {"task": body.task}, body.prompt_name, _instruction(asked))
    done = await vectors(asked, how)
    return done, await json_matrix(finished(done.rows, kept, body.normalize))


@computes(EmbedAll, "embed", "embedding", "multi_vector", texts=_inputs)
async def embed_all(asked: Asked[EmbedAll]) -> Made:
    body, about = asked.body, asked.model.about
    how, purpose = reading(body, asked.model), body.prompt_name if body.prompt_name == "query" else "document"
    if about.task == "multi_vector" and body.prompt_name in ("query", "document"):
        how = how._replace(most=about.text.query_length if purpose == "query" else about.text.document_length)
    compared = about.task == "multi_vector"
    done = await (vectors_of(asked, asked.texts, how, purpose) if compared else vectors(asked, how, Kind.TOKENS))
    found = list[bytes]()
    for rows in _of_texts(done):
        found += [b"," if found else b"[", *await json_matrix(rows)]
        await asyncio.sleep(0)
    return done, [*found, b"]"]


@computes(EmbedAll, "embed", "sparse", texts=_inputs)
async def embed_sparse(asked: Asked[EmbedAll]) -> Made:
    about, of_tokens = asked.model.about, asked.model.about.vectors.sparse == "lexical"
    if about.table is not None and asked.body.prompt_name in about.table.tasks:
        return await _of_table(asked, about.table)
    done = await vectors(asked, reading(asked.body, asked.model), Kind.WEIGHTS if of_tokens else Kind.SPARSE)
    left_out = np.array(about.vectors.unweighted, dtype=np.int64)
    ends = done.encoded.offsets.tolist()
    tokens = zip(ends[:-1], ends[1:], strict=True)
    found: Iterable[SparseVector] = entries_of(done.rows) if not of_tokens else (
        lexical(done.encoded.ids[start:end], done.rows[start:end, 0], left_out) for start, end in tokens
    )  # fmt: skip
    return done, await _entries(found)


async def _of_table(asked: Asked[EmbedAll], table: TableFacts) -> Made:
    how = reading(asked.body, asked.model)
    done = await asked.model.look_up(
        asked.request, characters(asked.texts),
        lambda encoder: encoder.encode(asked.texts, how.prompt, how.truncate, how.side, how.most),
    )  # fmt: skip
    weights = np.frombuffer(table.weights, dtype=np.float32)
    ends = done.encoded.offsets.tolist()
    ids = done.encoded.ids
    return done, await _entries(looked_up(ids[a:b], weights) for a, b in zip(ends[:-1], ends[1:], strict=True))


async def _entries(sparse: Iterable[SparseVector]) -> list[bytes]:
    pairs = (zip(one.indices.tolist(), one.values, strict=True) for one in sparse)
    return await json_list([{"index": entry, "value": value} for entry, value in text] for text in pairs)


def _compared(body: Similarity, settings: Settings) -> Listed:
    sentences = body.inputs.sentences
    check_count(sentences, settings, "inputs.sentences")
    return [body.inputs.source_sentence, *sentences]


@computes(Similarity, "embed", "embedding", texts=_compared)
async def similarity(asked: Asked[Similarity]) -> Made:
    done = await vectors(asked, reading(asked.body.parameters or Cut(), asked.model))
    unit = finished(done.rows, asked.model.about.vectors.truncate_dim, True)
    return done, to_json(unit[1:] @ unit[0])


@computes(OpenAIEmbed, "embed", "embedding", texts=_input)
async def embeddings(asked: Asked[OpenAIEmbed]) -> Made:
    body, model = asked.body, asked.model
    form, how = _form(body), _reading(asked)
    if None not in (body.dimensions, body.output_dimension) and body.dimensions != body.output_dimension:
        raise validation("`dimensions` and `output_dimension` differ; give one of them", param="dimensions")
    kept = check_dimensions(body.dimensions, model)
    if body.dimensions is None:
        kept = check_dimensions(body.output_dimension, model, name="output_dimension")
    done = await (chunks(asked, how) if body.late_chunking else vectors(asked, how))
    rows = finished(done.rows, kept, _normalized(body))
    return done, await listed_vectors(rows, form, "embedding", "embedding", model, done)


@computes(Pooling, "embed", "embedding", "multi_vector", texts=_input)
async def pooling(asked: Asked[Pooling]) -> Made:
    body, model = asked.body, asked.model
    form = choose_form(body.encoding_format, body.embed_dtype, body.endianness)
    if body.task not in (None, "embed", "token_embed"):
        raise validation(f"`task` must be embed or token_embed; got {body.task[:40]!r}", param="task")
    multi = model.about.task == "multi_vector"
    if multi and body.task == "embed":
        raise validation("`task` must be token_embed: this model gives a vector for each token", param="task")
    of_tokens = multi or body.task == "token_embed"
    kept, how = check_dimensions(body.dimensions, model, of_tokens), limited_reading(body, model)
    if of_tokens and model.about.vectors.skipped:
        done = await vectors_of(asked, asked.texts, how, "document")
    else:
        done = await vectors(asked, how, Kind.TOKENS if of_tokens else Kind.EMBED)
    done.rows = finished(done.rows, kept, body.use_activation is not False)
    return done, await listed_vectors(_of_texts(done) if of_tokens else done.rows, form, "pooling", "data", model, done)


def _of_texts(done: Computed) -> Iterable[NDArray[np.float32]]:
    """The rows of each text's tokens."""
    offsets = (done.encoded.offsets if done.rows_of_texts is None else done.rows_of_texts).tolist()
    return (done.rows[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True))


def _reading(asked: Asked[OpenAIEmbed]) -> Reading:
    """With the prompt and length of what the texts are for, and the truncation in any of its spellings. ApiError
    422."""
    body = asked.body
    how = limited_reading(body, asked.model)
    limited = how.most is not None
    how = cut_as(cut_as(how, body.truncation, "truncation"), body.truncate)
    how = how._replace(truncate=how.truncate or limited)
    purposes = {"input_type": body.input_type, "task": body.task}
    return for_purposes(how, asked.model, purposes, body.prompt_name, _instruction(asked))


def _instruction(asked: Asked[OpenAIEmbed] | Asked[Embed]) -> Instruction | None:
    """ApiError 422 beside ids, which no prompt stands before."""
    found = instruction_of(asked.body)
    if found is not None and not all(isinstance(one, str) for one in asked.texts):
        raise found.refused("token ids are taken as they are")
    return found


def _form(asked: OpenAIEmbed) -> VectorForm:
    """By Jina's, Voyage's and Mistral's, and vLLM's fields. ApiError 422."""
    encoding, of_bytes = asked.encoding_format, dict[str, str | None]()
    for name, words in (("output_dtype", ("float", *BYTES)), ("embedding_type", _JINA_TYPES)):
        given = getattr(asked, name)
        if given is not None and given not in words:
            known = f"{', '.join(words[:-1])} or {words[-1]}"
            raise validation(f"`{name}` must be {known}; got {given[:20]!r}", param=name)
        if given == "base64":
            if encoding not in (None, "base64"):
                words_of_both = "`embedding_type` and `encoding_format` ask for different forms; give one of them"
                raise validation(words_of_both, param=name)
            encoding = "base64"
        elif given is not None:
            of_bytes[name] = None if given == "float" else given
    if len(set(of_bytes.values())) > 1:
        raise validation("`embedding_type` and `output_dtype` differ; give one of them", param="embedding_type")
    chosen = next(iter(of_bytes.items()), ("output_dtype", None))
    form = choose_form(encoding, asked.embed_dtype, asked.endianness, chosen)
    if form.number in ("int8", "uint8") and not _normalized(asked):
        name = "normalized" if asked.normalized is False else "use_activation"
        raise validation(f"`{chosen[0]}` {form.number} is of vectors of length 1: `{name}` must be true", param=name)
    return form


def _normalized(asked: OpenAIEmbed) -> bool:
    return False not in (asked.use_activation, asked.normalized)
