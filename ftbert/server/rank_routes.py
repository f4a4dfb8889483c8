"""/predict and both dialects of /rerank; vLLM's /classify and /score. All on the sequence classification head.

TEI's routes give probabilities. The others apply the folder's activation, as `Model.predict` and vLLM do. An order is
that of the logits: scores may be equal where these differ.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from ftbert.server.activations import ACTIVATIONS, probabilities
from ftbert.server.answers import answered, count_request, json, json_list
from ftbert.server.app import App
from ftbert.server.errors import ApiError, validation
from ftbert.server.inputs import Reading, check_count, limited_reading, own_limit, reading
from ftbert.server.json_keys import fields_of
from ftbert.server.messages import Request, Response
from ftbert.server.pipeline_routes import token_classify
from ftbert.server.schemas import Classify, JinaRerank, PairLimits, Predict, Score, TeiRerank, decode
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.text_encoder import Encoded
from ftbert.server.work import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

Sequences = list[str | tuple[str, str]]


async def predict(app: App, request: Request) -> Response:
    asked = decode(request.body, Predict)
    model = app.model(asked.model, "classifier", "reranker", "token_classifier")
    if model.task == "token_classifier":
        return await token_classify(app, request)
    single, sequences = _sequences(asked.inputs)
    check_count(len(sequences), app.settings)
    count_request(app, len(sequences), "predict")
    model.expect("classifier", "reranker")
    done = await logits(request, model, sequences, reading(asked, model))
    scores = done.rows if asked.raw_scores else probabilities(done.rows)
    found = (
        [{"score": float(row[i]), "label": model.about.labels[i]} for i in _best_first(raw)]
        for raw, row in zip(done.rows, scores, strict=True)
    )
    body = [json(next(found))] if single else await json_list(found)
    return answered(app, request, model.about, done, body, "predict")


async def rerank(app: App, request: Request) -> Response:
    """TEI's with `texts`, Jina's and Cohere's with `documents`."""
    fields = await fields_of(request.body)
    if "documents" in fields and "texts" not in fields:
        return await rerank_documents(app, request)
    asked = decode(request.body, TeiRerank)
    if not asked.texts:
        raise ApiError("Empty", "`texts` cannot be empty")
    model = _ranker(app, request, asked.model, len(asked.texts))
    done = await logits(request, model, [(asked.query, text) for text in asked.texts], reading(asked, model))
    scores = done.rows[:, 0] if asked.raw_scores else probabilities(done.rows)[:, 0]
    found: list[dict[str, Any]] = []
    for index in _best_first(done.rows[:, 0]):
        found.append({"index": index, "score": float(scores[index])})
        if asked.return_text:
            found[-1]["text"] = asked.texts[index]
    return answered(app, request, model.about, done, json(found), "predict")


async def rerank_documents(app: App, request: Request) -> Response:
    asked = decode(request.body, JinaRerank)
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    if not texts:
        raise ApiError("Empty", "`documents` cannot be empty", param="documents")
    if asked.top_n is not None and asked.top_n < 1:
        raise validation(f"`top_n` must be at least 1; got {str(asked.top_n)[:20]}", param="top_n")
    model = _ranker(app, request, asked.model, len(texts))
    done = await _limited_logits(request, model, [(asked.query, text) for text in texts], asked)
    scores = _activated(model, done, asked.use_activation)[:, 0]
    results: list[dict[str, Any]] = []
    for index in _best_first(done.rows[:, 0])[: asked.top_n]:
        results.append({"index": index, "relevance_score": float(scores[index])})
        if asked.return_documents is not False:  # Cohere's second API always has them in vLLM; clients may rely on it
            results[-1]["document"] = {"text": texts[index]}
    tokens = done.encoded.tokens
    body = {
        "id": f"rerank-{uuid.uuid4().hex}", "model": model.name, "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"billed_units": {"search_units": 1}},
    }  # fmt: skip
    return answered(app, request, model.about, done, json(body), "predict")


async def classify(app: App, request: Request) -> Response:
    asked = decode(request.body, Classify)
    model = app.model(asked.model, "classifier", "reranker")
    inputs: Sequences = [asked.input] if isinstance(asked.input, str) else list(asked.input)
    if not inputs:
        raise ApiError("Empty", "`input` cannot be empty", param="input")
    check_count(len(inputs), app.settings)
    count_request(app, len(inputs), "predict")
    model.expect("classifier", "reranker")
    done = await logits(request, model, inputs, limited_reading(asked, model))
    rows, best = _activated(model, done, asked.use_activation), done.rows.argmax(axis=1).tolist()
    labels = model.about.labels
    data = await json_list(
        {"index": i, "label": labels[place], "probs": row, "num_classes": len(labels)}
        for i, (place, row) in enumerate(zip(best, rows, strict=True))
    )
    tokens = done.encoded.tokens
    head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "model": model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}  # fmt: skip
    body = [json(head)[:-1], b',"data":', *data, b"}"]
    return answered(app, request, model.about, done, body, "predict")


async def score(app: App, request: Request) -> Response:
    """One text with each of another list, or two lists of one length in pairs."""
    asked = decode(request.body, Score)
    model = app.model(asked.model, "reranker")
    first = next((x for x in (asked.queries, asked.data_1, asked.text_1) if x is not None), None)
    second = next((x for x in (asked.documents, asked.items, asked.data_2, asked.text_2) if x is not None), None)
    if first is None or second is None:
        raise validation("expected `queries` and `documents`, or `data_1` and `data_2`, or `text_1` and `text_2`")
    left = [first] if isinstance(first, str) else first
    right = [second] if isinstance(second, str) else second
    if not left or not right:
        raise ApiError("Empty", "the texts to score cannot be empty")
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise validation(f"expected one text, or as many as of the others ({len(right)}); got {len(left)}")
    check_count(len(right), app.settings)
    count_request(app, len(right), "predict")
    model.expect("reranker")
    done = await _limited_logits(request, model, list(zip(left, right, strict=True)), asked)
    scores = _activated(model, done, asked.use_activation)[:, 0]
    tokens = done.encoded.tokens
    body = {
        "id": f"score-{uuid.uuid4().hex}", "object": "list", "model": model.name,
        "data": [{"index": i, "object": "score", "score": float(one)} for i, one in enumerate(scores)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }  # fmt: skip
    return answered(app, request, model.about, done, json(body), "predict")


async def logits(
    request: Request, model: ServedModel, sequences: Sequences, how: Reading,
    limits: tuple[int | None, int | None] = (None, None),
) -> Computed:  # fmt: skip
    """rows: float32 [sequences, labels]. limits: of pairs, see TextEncoder.encode_pairs."""
    encoder = model.encoder()

    def encode() -> Encoded:
        pairs = [one for one in sequences if isinstance(one, tuple)]
        if pairs and len(pairs) == len(sequences):
            return encoder.encode_pairs(
                pairs, how.truncate, how.side, prompt=how.prompt, most=how.most, limits=limits
            )
        if pairs:
            raise validation("`inputs` must be all texts or all pairs")
        texts = [one for one in sequences if isinstance(one, str)]
        return encoder.encode(texts, how.prompt, how.truncate, how.side, how.most)

    size = sum(len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in sequences)
    return await model.compute(request, Kind.LOGITS, size, encode)


async def _limited_logits(
    request: Request, model: ServedModel, pairs: list[tuple[str, str]], asked: PairLimits
) -> Computed:
    limits = (
        own_limit("max_tokens_per_query", asked.max_tokens_per_query),
        own_limit("max_tokens_per_doc", asked.max_tokens_per_doc),
    )
    return await logits(request, model, list(pairs), limited_reading(asked, model, pairs=True), limits)


def _activated(model: ServedModel, done: Computed, wanted: bool | None) -> NDArray[np.float32]:
    """float32 [sequences, labels]: the scores by the folder's activation, or the logits where it is not wanted."""
    return done.rows if wanted is False else ACTIVATIONS[model.about.activation](done.rows)


def _best_first(logits: NDArray[np.float32]) -> list[int]:
    """Places of the highest first, equal ones in their order."""
    return np.argsort(-logits, kind="stable").tolist()  # type: ignore[no-any-return]


def _ranker(app: App, request: Request, name: str | None, texts: int) -> ServedModel:
    """The model that ranks so many texts, counted."""
    model = app.model(name, "reranker")
    check_count(texts, app.settings)
    count_request(app, texts, "predict")
    model.expect("reranker")
    return model


def _sequences(inputs: str | list[str | list[str]]) -> tuple[bool, Sequences]:
    """TEI's union: a text, [text], a pair [a, b], or a list of lists of those. True: one result, not a list of them."""
    if isinstance(inputs, str):
        return True, [inputs]
    if not inputs:
        raise ApiError("Empty", "`inputs` cannot be empty")
    flat = [one for one in inputs if isinstance(one, str)]
    if len(flat) == len(inputs):
        return True, [_one_or_pair(flat)]
    if flat:
        raise validation("`inputs` must be a text, a pair of texts, or a list of lists of one or two texts")
    return False, [_one_or_pair(one) for one in inputs if isinstance(one, list)]


def _one_or_pair(texts: list[str]) -> str | tuple[str, str]:
    if len(texts) == 1:
        return texts[0]
    if len(texts) == 2:
        return texts[0], texts[1]
    raise validation(f"each of `inputs` must be one or two texts; got {len(texts)}")
