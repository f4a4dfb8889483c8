"""Vectors of tokens (ColBERT) and what they score: of a query's vectors and documents, which an engine compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ftbert.server.app import Asked
from ftbert.server.inputs import Reading, characters
from ftbert.server.job import Kind
from ftbert.server.served_model import Computed
from ftbert.server.text_encoder import Encoded
from ftbert.text import tokens_kept


async def vectors_of(asked: Asked[Any], texts: Sequence[str | list[int]], how: Reading, purpose: str) -> Computed:
    """rows: float32 [tokens, width], without tokens that have none in texts for `purpose`, "query" or "document";
    queries are made longer as the folder says."""
    encoder, about = asked.model.encoder(), asked.model.about
    read = encoder.encode_queries if purpose == "query" else encoder.encode
    encode = partial(read, texts, how.prompt, how.truncate, how.side, how.most)
    done = await asked.model.compute(asked.request, Kind.VECTORS, characters(list(texts)), encode, encoder.inline)
    encoded, skipped = done.encoded, np.array(about.vectors.skipped[purpose], dtype=np.int64)
    kept = tokens_kept(encoded.ids, encoded.offsets, skipped, about.vectors.first_token)
    done.rows = done.rows[kept]
    done.rows_of_texts = np.concatenate([[0], np.cumsum(kept)])[encoded.offsets]
    return done


async def similarities(asked: Asked[Any], query: str, documents: Sequence[str], how: Reading) -> Computed:
    """rows: float32 [documents, 1], MaxSim of the query with each, both with the prompts and lengths of the folder.
    `most` of `how` is a document's, None: the folder's."""
    model, text = asked.model, asked.model.about.text
    of_query = how._replace(prompt=model.prompt("query"), most=text.query_length)
    of_documents = how._replace(prompt=model.prompt("document"), most=how.most or text.document_length)
    first = await vectors_of(asked, [query], of_query, "query")
    encoder = model.encoder()

    def encode() -> Encoded:
        found = encoder.encode(documents, of_documents.prompt, how.truncate, how.side, of_documents.most)
        found.query = first.rows
        return found

    done = await model.compute(asked.request, Kind.SIMILARITIES, characters(list(documents)), encode, encoder.inline)
    both = first.encoded, done.encoded
    done.encoded = Encoded(
        np.concatenate([one.ids for one in both]),
        np.concatenate([both[0].offsets, both[0].offsets[-1] + both[1].offsets[1:]]),
        sum(one.characters for one in both),
    )
    return replace(
        done,
        tokenization=first.tokenization + done.tokenization,
        queue=first.queue + done.queue,
        inference=first.inference + done.inference,
    )
