"""/predict and both dialects of /rerank; vLLM's /classify and /score. All on the sequence classification head; /rerank
also by vectors of tokens (ColBERT), whose scores are as they are.

TEI's routes give probabilities. The others apply the folder's activation, as `Model.predict` and vLLM do. An order is
that of the logits: scores may be equal where these differ.
"""

from __future__ import annotations

import uuid
from collections.abc import Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftbert.server.activations import ACTIVATIONS, probabilities
from ftbert.server.app import App, Asked, Made, computes
from ftbert.server.errors import ApiError, validation
from ftbert.server.inputs import Reading, check_count, limited_reading, own_limit, reading
from ftbert.server.instructions import instructed_prompt, instruction_of
from ftbert.server.job import Kind
from ftbert.server.json_bodies import decode, fields_of, json_list, to_json
from ftbert.server.messages import Request, Response
from ftbert.server.pipeline_routes import token_classify
from ftbert.server.purposes import cut_as
from ftbert.server.schemas import Classify, JinaRerank, PairLimits, Predict, Score, TeiRerank
from ftbert.server.served_model import Computed, ServedModel
from ftbert.server.settings import Settings
from ftbert.server.text_encoder import Encoded
from ftbert.server.token_vectors import similarities

Sequences = list[str | tuple[str, str]]
_CLASSIFIERS = ("classifier", "reranker")


def _predicted(body: Predict, settings: Settings) -> Sequences:
    """TEI's union: a text, [text], a pair [a, b], or a list of lists of those."""
    inputs = body.inputs
    if isinstance(inputs, str):
        return [inputs]
    if not inputs:
        raise ApiError("Empty", "`inputs` cannot be empty")
    flat = [one for one in inputs if isinstance(one, str)]
    if len(flat) == len(inputs):
        return [_one_or_pair(flat)]
    if flat:
        raise validation("`inputs` must be a text, a pair of texts, or a list of lists of one or two texts")
    found = [_one_or_pair(one) for one in inputs if isinstance(one, list)]
    check_count(found, settings)
    return found


@computes(Predict, "predict", *_CLASSIFIERS, texts=_predicted)
async def _predict(asked: Asked[Predict]) -> Made:
    body, labels = asked.body, asked.model.about.scores.labels
    done = await _logits(asked, reading(body, asked.model))
    scores = done.rows if body.raw_scores else probabilities(done.rows)
    found = (
        [{"score": float(row[i]), "label": labels[i]} for i in _best_first(raw)]
        for raw, row in zip(done.rows, scores, strict=True)
    )
    single = isinstance(body.inputs, str) or isinstance(body.inputs[0], str)
    return done, to_json(next(found)) if single else await json_list(found)


def predict(app: App, request: Request) -> Coroutine[Any, Any, Response]:
    body = decode(request.body, Predict)
    model = app.model(body.model, *_CLASSIFIERS, "token_classifier")
    if model.task == "token_classifier":
        return token_classify(app, request)
    return _predict.answer(app, request, body, model)


def _ranked(body: TeiRerank, settings: Settings) -> Sequences:
    check_count(body.texts, settings, "texts")
    return [(body.query, text) for text in body.texts]


@computes(TeiRerank, "predict", "reranker", "multi_vector", texts=_ranked)
async def _rerank_texts(asked: Asked[TeiRerank]) -> Made:
    body = asked.body
    how, late = reading(body, asked.model), asked.model.about.task == "multi_vector"
    done = await (_similarities(asked, how) if late else _logits(asked, how))
    scores = done.rows[:, 0] if body.raw_scores or late else probabilities(done.rows)[:, 0]
    found: list[dict[str, Any]] = []
    for index in _best_first(done.rows[:, 0]):
        found.append({"index": index, "score": float(scores[index])})
        if body.return_text:
            found[-1]["text"] = body.texts[index]
    return done, to_json(found)


def _ranked_documents(body: JinaRerank, settings: Settings) -> Sequences:
    check_count(body.documents, settings, "documents")
    for name, most in (("top_n", body.top_n), ("top_k", body.top_k)):
        if most is not None and most < 1:
            raise validation(f"`{name}` must be at least 1; got {str(most)[:20]}", param=name)
    if None not in (body.top_n, body.top_k) and body.top_n != body.top_k:
        raise validation("`top_n` and `top_k` differ; give one of them", param="top_k")
    return [(body.query, one if isinstance(one, str) else one.text) for one in body.documents]


@computes(JinaRerank, "predict", "reranker", "multi_vector", texts=_ranked_documents)
async def rerank_documents(asked: Asked[JinaRerank]) -> Made:
    body, model = asked.body, asked.model
    late = model.about.task == "multi_vector"
    how = cut_as(limited_reading(body, model, pairs=not late), body.truncation, "truncation")
    done = await (_similarities(asked, how) if late else _limited_logits(asked, how))
    scores = _activated(model, done, False if late else body.use_activation)[:, 0]
    voyage = body.top_k is not None or body.truncation is not None
    results: list[dict[str, Any]] = []
    for index in _best_first(done.rows[:, 0])[: body.top_n or body.top_k]:
        results.append({"index": index, "relevance_score": float(scores[index])})
        if voyage:
            if body.return_documents:
                results[-1]["document"] = asked.texts[index][1]
        elif body.return_documents is not False:  # in vLLM Cohere's second API always has them; clients may rely on it
            results[-1]["document"] = {"text": asked.texts[index][1]}
    head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model.name, "usage": done.usage}
    if voyage:
        return done, to_json({"object": "list", "data": results, **head})
    return done, to_json({**head, "results": results, "meta": {"billed_units": {"search_units": 1}}})


async def rerank(app: App, request: Request) -> Response:
    """TEI's with `texts`, Jina's and Cohere's with `documents`."""
    fields = await fields_of(request.body)
    of_documents = "documents" in fields and "texts" not in fields
    return await (rerank_documents if of_documents else _rerank_texts)(app, request)


def _classified(body: Classify, settings: Settings) -> list[str]:
    texts = [body.input] if isinstance(body.input, str) else body.input
    check_count(texts, settings, "input")
    return texts


@computes(Classify, "predict", *_CLASSIFIERS, texts=_classified)
async def classify(asked: Asked[Classify]) -> Made:
    model, labels = asked.model, asked.model.about.scores.labels
    done = await _logits(asked, limited_reading(asked.body, model))
    rows, best = _activated(model, done, asked.body.use_activation), done.rows.argmax(axis=1).tolist()
    data = await json_list(
        {"index": i, "label": labels[place], "probs": row, "num_classes": len(labels)}
        for i, (place, row) in enumerate(zip(best, rows, strict=True))
    )
    head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "model": model.name, "usage": done.usage}
    return done, [to_json(head)[:-1], b',"data":', *data, b"}"]


def _paired(body: Score, settings: Settings) -> Sequences:
    """One text with each of another list, or two lists of one length in pairs."""
    first = next((x for x in (body.queries, body.data_1, body.text_1) if x is not None), None)
    second = next((x for x in (body.documents, body.items, body.data_2, body.text_2) if x is not None), None)
    if first is None or second is None:
        raise validation("expected `queries` and `documents`, or `data_1` and `data_2`, or `text_1` and `text_2`")
    left = [first] if isinstance(first, str) else first
    right = [second] if isinstance(second, str) else second
    if not left or not right:
        raise ApiError("Empty", "the texts to score cannot be empty")
    left = left * len(right) if len(left) == 1 else left
    if len(left) != len(right):
        raise validation(f"expected one text, or as many as of the others ({len(right)}); got {len(left)}")
    check_count(right, settings)
    return list(zip(left, right, strict=True))


@computes(Score, "predict", "reranker", texts=_paired)
async def score(asked: Asked[Score]) -> Made:
    done = await _limited_logits(asked, limited_reading(asked.body, asked.model, pairs=True))
    scores = _activated(asked.model, done, asked.body.use_activation)[:, 0]
    return done, to_json({
        "id": f"score-{uuid.uuid4().hex}", "object": "list", "model": asked.model.name,
        "data": [{"index": i, "object": "score", "score": float(one)} for i, one in enumerate(scores)],
        "usage": done.usage,
    })  # fmt: skip


def _logits(
    asked: Asked[Any], how: Reading, limits: tuple[int | None, int | None] = (None, None)
) -> Coroutine[Any, Any, Computed]:
    """rows: float32 [sequences, labels]. limits: of pairs, see TextEncoder.encode_pairs."""
    sequences, encoder, about = asked.texts, asked.model.encoder(), asked.model.about
    instruction = instruction_of(asked.body) if isinstance(asked.body, TeiRerank | PairLimits) else None
    prompt, instruct = how.prompt, None if instruction is None else instruction.text
    if instruction is not None and about.scores.instructed is None:
        if about.scores.templates:
            raise instruction.refused("this model's template has no place for an instruction")
        prompt, instruct = instructed_prompt(about, instruction), None

    def encode() -> Encoded:
        pairs = [one for one in sequences if isinstance(one, tuple)]
        if pairs and len(pairs) == len(sequences):
            return encoder.encode_pairs(
                pairs, how.truncate, how.side, prompt=prompt, most=how.most, limits=limits, instruct=instruct
            )
        if pairs:
            raise validation("`inputs` must be all texts or all pairs")
        if about.scores.templates:
            raise validation("`inputs` must be pairs: this model scores a query and a document")
        return encoder.encode(sequences, how.prompt, how.truncate, how.side, how.most)

    size = sum(len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in sequences)
    return asked.model.compute(asked.request, Kind.LOGITS, size, encode)


def _similarities(asked: Asked[Any], how: Reading) -> Coroutine[Any, Any, Computed]:
    """rows: float32 [documents, 1]. ApiError 422 for what is of pairs."""
    body = asked.body
    if (instruction := instruction_of(body)) is not None:
        raise instruction.refused("queries and texts have prompts of their own")
    if isinstance(body, TeiRerank) and body.prompt_name is not None:
        words = "`prompt_name` is not supported: queries and texts have prompts of their own"
        raise validation(words, param="prompt_name")
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if getattr(body, name, None):
            words = f"`{name}` is not supported: lengths are the folder's; `truncate_prompt_tokens` is a document's"
            raise validation(words, param=name)
    return similarities(asked, body.query, [text for _, text in asked.texts], how)


def _limited_logits(asked: Asked[JinaRerank] | Asked[Score], how: Reading) -> Coroutine[Any, Any, Computed]:
    body = asked.body
    limits = (
        own_limit("max_tokens_per_query", body.max_tokens_per_query),
        own_limit("max_tokens_per_doc", body.max_tokens_per_doc),
    )
    return _logits(asked, how, limits)


def _activated(model: ServedModel, done: Computed, wanted: bool | None) -> NDArray[np.float32]:
    """float32 [sequences, labels]: the scores by the folder's activation, or the logits where it is not wanted."""
    return done.rows if wanted is False else ACTIVATIONS[model.about.scores.activation](done.rows)


def _best_first(logits: NDArray[np.float32]) -> list[int]:
    """Places of the highest first, equal ones in their order."""
    return np.argsort(-logits, kind="stable").tolist()  # type: ignore[no-any-return]


def _one_or_pair(texts: list[str]) -> str | tuple[str, str]:
    if len(texts) == 1:
        return texts[0]
    if len(texts) == 2:
        return texts[0], texts[1]
    raise validation(f"each of `inputs` must be one or two texts; got {len(texts)}")
