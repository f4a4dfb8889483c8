"""Every path that the server knows."""

from __future__ import annotations

from ftbert.server import embed_routes, info_routes, openai_routes, rank_routes, token_routes
from ftbert.server.app import Route, Routes


def all_routes() -> Routes:
    routes: Routes = {
        ("GET", "/"): Route(info_routes.page, public=True, counted=False),
        ("GET", "/info"): Route(info_routes.info, counted=False),
        ("GET", "/version"): Route(info_routes.version, counted=False),
        ("GET", "/metrics"): Route(info_routes.metrics, public=True, counted=False),
        ("GET", "/live"): Route(info_routes.live, public=True, counted=False),
        ("GET", "/v1/models"): Route(openai_routes.models, openai=True, counted=False),
        ("GET", "/models"): Route(openai_routes.models, openai=True, counted=False),
        ("POST", "/embed"): Route(embed_routes.embed),
        ("POST", "/embed_all"): Route(embed_routes.embed_all),
        ("POST", "/embed_sparse"): Route(embed_routes.embed_sparse),
        ("POST", "/similarity"): Route(embed_routes.similarity),
        ("POST", "/predict"): Route(rank_routes.predict),
        ("POST", "/rerank"): Route(rank_routes.rerank),
        ("POST", "/classify"): Route(rank_routes.classify, openai=True),
        ("POST", "/score"): Route(rank_routes.score, openai=True),
        ("POST", "/v1/score"): Route(rank_routes.score, openai=True),
        ("POST", "/pooling"): Route(openai_routes.pooling, openai=True),
        ("POST", "/tokenize"): Route(token_routes.tokenize, counted=False),
        ("POST", "/decode"): Route(token_routes.decode_ids, counted=False),
        ("POST", "/"): Route(info_routes.by_model),
        ("POST", "/invocations"): Route(info_routes.by_model),
    }
    for path in ("/health", "/ping"):
        routes["GET", path] = Route(info_routes.health, public=True, counted=False)
    for path in ("/v1/embeddings", "/embeddings"):
        routes["POST", path] = Route(openai_routes.embeddings, openai=True)
    for path in ("/v1/rerank", "/v2/rerank"):
        routes["POST", path] = Route(rank_routes.rerank_documents, openai=True)
    return routes
