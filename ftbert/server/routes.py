"""Every path that the server knows."""

from __future__ import annotations

from dataclasses import replace

from ftbert.server import answer_schemas as gives
from ftbert.server import (
    embed_routes,
    info_routes,
    openai_routes,
    openapi,
    pipeline_routes,
    rank_routes,
    schemas,
    token_routes,
)
from ftbert.server.app import Route, Routes


def all_routes() -> Routes:
    routes: Routes = {
        ("GET", "/"): Route(info_routes.page, public=True, counted=False),
        ("GET", "/docs"): Route(openapi.docs, public=True, counted=False),
        ("GET", "/favicon.ico"): Route(info_routes.no_icon, public=True, counted=False),
        ("POST", "/v1/embeddings"): Route(
            openai_routes.embeddings, openai=True, takes=schemas.OpenAIEmbed, gives=gives.Embeddings,
            words="OpenAI: a vector for each text",
        ),
        ("POST", "/embed"): Route(
            embed_routes.embed, takes=schemas.Embed, gives=gives.Matrix, words="TEI: a vector for each text"
        ),
        ("POST", "/embed_all"): Route(
            embed_routes.embed_all, takes=schemas.EmbedAll, gives=gives.EmbedAll, words="TEI: a vector for each token"
        ),
        ("POST", "/embed_sparse"): Route(embed_routes.embed_sparse, takes=schemas.Embed),
        ("POST", "/similarity"): Route(
            embed_routes.similarity, takes=schemas.Similarity, gives=list[float],
            words="TEI: cosines of a text with others",
        ),
        ("POST", "/predict"): Route(
            rank_routes.predict, takes=schemas.Predict, gives=gives.Predictions, words="TEI: classes of texts or pairs"
        ),
        ("POST", "/token_classify"): Route(
            pipeline_routes.token_classify, takes=schemas.TokenClassify, gives=gives.Entities,
            words="HuggingFace: entities of texts, with their places (as /predict and / of such a model)",
        ),
        ("POST", "/fill_mask"): Route(
            pipeline_routes.fill_mask, takes=schemas.FillMask, gives=gives.Fillings,
            words="HuggingFace: what may stand in the place of a mask token",
        ),
        ("POST", "/rerank"): Route(
            rank_routes.rerank, takes=schemas.TeiRerank, gives=list[gives.Rank],
            words="TEI: texts by their relevance to a query; with documents as /v1/rerank",
        ),
        ("POST", "/v1/rerank"): Route(
            rank_routes.rerank_documents, openai=True, takes=schemas.JinaRerank, gives=gives.Ranking,
            words="Jina, Cohere (as /v2/rerank too): documents by their relevance to a query",
        ),
        ("POST", "/classify"): Route(
            rank_routes.classify, openai=True, takes=schemas.Classify, gives=gives.Classification,
            words="vLLM: classes of texts",
        ),
        ("POST", "/score"): Route(
            rank_routes.score, openai=True, takes=schemas.Score, gives=gives.PairScores,
            words="vLLM: scores of pairs of texts",
        ),
        ("POST", "/pooling"): Route(
            openai_routes.pooling, openai=True, takes=schemas.Pooling, gives=gives.PooledList,
            words="vLLM: a vector for each text, or for each token",
        ),
        ("POST", "/tokenize"): Route(
            token_routes.tokenize, counted=False, takes=schemas.Tokenize, gives=list[list[gives.Token]],
            words="TEI: the tokens of texts; with prompt as vLLM",
        ),
        ("POST", "/decode"): Route(
            token_routes.decode_ids, counted=False, takes=schemas.Decode, gives=list[str], words="TEI: ids to texts"
        ),
        ("POST", "/detokenize"): Route(
            token_routes.detokenize, openai=True, counted=False, takes=schemas.Detokenize, gives=gives.Detokenized,
            words="vLLM: ids to a text",
        ),
        ("POST", "/"): Route(info_routes.by_model),
        ("POST", "/invocations"): Route(info_routes.by_model),
        ("GET", "/v1/models"): Route(
            openai_routes.models, openai=True, counted=False, gives=gives.ModelCards, words="OpenAI: the models"
        ),
        ("GET", "/v1/models/{id}"): Route(
            openai_routes.one_model, openai=True, counted=False, gives=gives.ModelCard,
            words="OpenAI: one of the models",
        ),
        ("GET", "/models"): Route(openai_routes.models, openai=True, counted=False),
        ("GET", "/info"): Route(
            info_routes.info, counted=False, gives=gives.Info, words="TEI: the model and the limits; ?model=NAME"
        ),
        ("GET", "/health"): Route(
            info_routes.health, public=True, counted=False, words="200, or 503 while requests are not answered"
        ),
        ("GET", "/ping"): Route(info_routes.health, public=True, counted=False),
        ("GET", "/live"): Route(
            info_routes.live, public=True, counted=False, words="200 as long as the process answers"
        ),
        ("GET", "/metrics"): Route(
            info_routes.metrics, public=True, counted=False, words="Prometheus' text, with TEI's names"
        ),
        ("GET", "/version"): Route(
            info_routes.version, counted=False, gives=gives.Version, words="the version of ftbert"
        ),
    }  # fmt: skip
    for path in ("/openapi.json", "/api-doc/openapi.json"):
        routes["GET", path] = Route(openapi.openapi, public=True, counted=False)
    for path, same in (
        ("/embeddings", "/v1/embeddings"), ("/v2/rerank", "/v1/rerank"), ("/v1/score", "/score"),
        ("/v1/token_classify", "/token_classify"), ("/v1/fill_mask", "/fill_mask"),
    ):  # fmt: skip
        routes["POST", path] = replace(routes["POST", same], words="")
    return routes
