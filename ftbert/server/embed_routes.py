"""Vectors of texts: /embed, /embed_all, /embed_sparse, /similarity as TEI has them; /v1/embeddings as OpenAI has it,
with vLLM's fields; /pooling as vLLM has it."""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server.app import Asked, Made, computes
from ftbert.server.description import Description, TableFacts
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
from ftbert.server.job import Kind
from ftbert.server.json_bodies import json_list, json_matrix, to_json
from ftbert.server.schemas import Cut, Embed, EmbedAll, OpenAIEmbed, Pooling, Similarity
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.settings import Settings
from ftbert.server.token_vectors import vectors_of
from ftbert.text import SparseVector, entries_of, lexical, looked_up

# Words for the two kinds of texts in Cohere's, Jina's, Voyage's, NVIDIA's and Google's APIs, and in folders.
_QUERY = ("query", "search_query", "retrieval.query", "retrieval_query")
_DOCUMENT = (
    "document", "passage", "search_document", "corpus", "retrieval.passage", "retrieval.document",
    "retrieval_document", "retrieval_passage",
)  # fmt: skip


def _inputs(body: Embed | EmbedAll, settings: Settings) -> Listed:
    return listed(body.inputs, settings)


def _input(body: OpenAIEmbed | Pooling, settings: Settings) -> Listed:
    return listed(body.input, settings, "input")


@computes(Embed, "embed", "embedding", texts=_inputs)
async def embed(asked: Asked[Embed]) -> Made:
    body, model = asked.body, asked.model
    kept = check_dimensions(body.dimensions, model)
    done = await _vectors(asked, reading(body, model))
    return done, await json_matrix(_finished(done.rows, kept, body.normalize))


@computes(EmbedAll, "embed", "embedding", "multi_vector", texts=_inputs)
async def embed_all(asked: Asked[EmbedAll]) -> Made:
    body, about = asked.body, asked.model.about
    how, purpose = reading(body, asked.model), body.prompt_name if body.prompt_name == "query" else "document"
    if about.task == "multi_vector" and body.prompt_name in ("query", "document"):
        how = replace(how, most=about.text.query_length if purpose == "query" else about.text.document_length)
    compared = about.task == "multi_vector"
    done = await (vectors_of(asked, asked.texts, how, purpose) if compared else _vectors(asked, how, Kind.TOKENS))
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
    done = await _vectors(asked, reading(asked.body, asked.model), Kind.WEIGHTS if of_tokens else Kind.SPARSE)
    left_out = np.array(about.vectors.unweighted, dtype=np.int64)
    ends = done.encoded.offsets.tolist()
    tokens = zip(ends[:-1], ends[1:], strict=True)
    vectors: Iterable[SparseVector] = entries_of(done.rows) if not of_tokens else (
        lexical(done.encoded.ids[start:end], done.rows[start:end, 0], left_out) for start, end in tokens
    )  # fmt: skip
    return done, await _entries(vectors)


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


async def _entries(vectors: Iterable[SparseVector]) -> list[bytes]:
    pairs = (zip(one.indices.tolist(), one.values, strict=True) for one in vectors)
    return await json_list([{"index": entry, "value": value} for entry, value in text] for text in pairs)


def _compared(body: Similarity, settings: Settings) -> Listed:
    sentences = body.inputs.sentences
    check_count(sentences, settings, "inputs.sentences")
    return [body.inputs.source_sentence, *sentences]


@computes(Similarity, "embed", "embedding", texts=_compared)
async def similarity(asked: Asked[Similarity]) -> Made:
    done = await _vectors(asked, reading(asked.body.parameters or Cut(), asked.model))
    unit = _finished(done.rows, asked.model.about.vectors.truncate_dim, True)
    return done, to_json(unit[1:] @ unit[0])


@computes(OpenAIEmbed, "embed", "embedding", texts=_input)
async def embeddings(asked: Asked[OpenAIEmbed]) -> Made:
    body, model = asked.body, asked.model
    encoding = _encoding(body.encoding_format)
    kept = check_dimensions(body.dimensions, model)
    how = _reading(body, model)
    done = await (_chunks(asked, how) if body.late_chunking else _vectors(asked, how))
    rows = _finished(done.rows, kept, body.use_activation is not False)
    return done, await _listed(rows, encoding, "embedding", "embedding", model, done)


@computes(Pooling, "embed", "embedding", "multi_vector", texts=_input)
async def pooling(asked: Asked[Pooling]) -> Made:
    body, model = asked.body, asked.model
    encoding = _encoding(body.encoding_format)
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
        done = await _vectors(asked, how, Kind.TOKENS if of_tokens else Kind.EMBED)
    done.rows = _finished(done.rows, kept, body.use_activation is not False)
    return done, await _listed(_of_texts(done) if of_tokens else done.rows, encoding, "pooling", "data", model, done)


def _vectors(asked: Asked[Any], how: Reading, kind: Kind = Kind.EMBED) -> Coroutine[Any, Any, Computed]:
    """rows: float32 [texts, hidden], as pooled; of Kind.TOKENS [tokens, hidden]."""
    encoder = asked.model.encoder()
    encode = partial(encoder.encode, asked.texts, how.prompt, how.truncate, how.side, how.most)
    return asked.model.compute(asked.request, kind, characters(asked.texts), encode, encoder.inline)


def _chunks(asked: Asked[Any], how: Reading) -> Coroutine[Any, Any, Computed]:
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
        encoder.inline,
    )  # fmt: skip


def _of_texts(done: Computed) -> Iterable[NDArray[np.float32]]:
    """The rows of each text's tokens."""
    offsets = (done.encoded.offsets if done.rows_of_texts is None else done.rows_of_texts).tolist()
    return (done.rows[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True))


def _finished(rows: NDArray[np.float32], kept: int | None, normalize: bool) -> NDArray[np.float32]:
    """Entries kept, then to length 1; a vector of zeros stays one."""
    rows = rows if kept is None else rows[:, :kept]
    if normalize:
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float32))
        rows = rows / np.maximum(norms, 1e-12)[:, None]
    return np.ascontiguousarray(rows, dtype=np.float32)


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
    for words, length in ((_QUERY, about.text.query_length), (_DOCUMENT, about.text.document_length)):
        if purpose in words:
            texts = (about.text.prompts.get(one) for one in (value, *words))
            return next((text for text in texts if text), ""), length
    if value in about.text.prompts:
        return about.text.prompts[value], None
    known = ", ".join(map(repr, dict.fromkeys(("query", "document", *about.text.prompts))))
    raise validation(f"`{name}` must be one of {known}; got {value[:40]!r}", param=name)


def _encoding(name: str | None) -> str:
    if name not in (None, "float", "base64"):
        raise validation(f"`encoding_format` must be float or base64; got {name[:20]!r}", param="encoding_format")
    return name or "float"


async def _listed(
    rows: Iterable[NDArray[np.float32]], encoding: str, kind: str, field: str, model: ServedModel, done: Computed
) -> list[bytes]:
    """OpenAI's list with an object for each row or matrix. base64: of little-endian float32."""

    def written(row: NDArray[np.float32]) -> Any:
        return row if encoding == "float" else b2a_base64(row.tobytes(), newline=False).decode("ascii")

    data = await json_list({"object": kind, "index": i, field: written(row)} for i, row in enumerate(rows))
    return [b'{"object":"list","data":', *data, b"," + to_json({"model": model.name, "usage": done.usage})[1:]]
