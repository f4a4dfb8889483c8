"""Every path that the server knows."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ftbert.server import (
    azure_routes,
    cohere_routes,
    embed_routes,
    generation_schemas,
    info_routes,
    llama_cpp_routes,
    model_routes,
    ollama_generation,
    ollama_routes,
    openai_generation,
    pipeline_routes,
    rank_routes,
    schemas,
    token_routes,
)
from ftbert.server.app import App, Route, Routes
from ftbert.server.errors import ApiError
from ftbert.server.json_bodies import fields_of
from ftbert.server.messages import Request, Response

# Of OpenAI's newer interface and TGI.
_NOT_HERE = ("/v1/responses", "/generate", "/generate_stream")


def all_routes() -> Routes:
    routes: Routes = {
        ("GET", "/"): Route(info_routes.page, public=True, counted=False),
        ("GET", "/docs"): Route(info_routes.docs, public=True, counted=False),
        ("GET", "/favicon.ico"): Route(info_routes.no_icon, public=True, counted=False),
        ("POST", "/v1/embeddings"): Route(
            embed_routes.embeddings, openai=True, gives=schemas.Embeddings, words="OpenAI: a vector for each text"
        ),
        ("POST", "/openai/deployments/{deployment}/embeddings"): Route(
            azure_routes.embeddings, openai=True, takes=schemas.OpenAIEmbed, gives=schemas.Embeddings,
            words="Azure: as /v1/embeddings, of the model that the path names",
        ),
        ("POST", "/v2/embed"): Route(
            cohere_routes.embed, openai=True, gives=cohere_routes.CohereEmbeddings,
            words="Cohere: vectors of texts, by type",
        ),
        ("POST", "/v1/embed"): Route(
            cohere_routes.embed_v1, openai=True, gives=cohere_routes.CohereEmbeddings,
            words="Cohere, first API: vectors of texts, by type where types are named",
        ),
        ("POST", "/api/embed"): Route(
            ollama_routes.embed, gives=ollama_routes.OllamaVectors, words="Ollama: a vector for each text"
        ),
        ("POST", "/api/embeddings"): Route(
            ollama_routes.embeddings, gives=ollama_routes.OllamaVector, words="Ollama, older: a vector of one text"
        ),
        ("POST", "/embed"): Route(embed_routes.embed, gives=schemas.Matrix, words="TEI: a vector for each text"),
        ("POST", "/embed_all"): Route(
            embed_routes.embed_all, gives=schemas.Matrices, words="TEI: a vector for each token"
        ),
        ("POST", "/embed_sparse"): Route(
            embed_routes.embed_sparse, gives=list[list[schemas.SparseValue]],
            words="TEI: a sparse vector for each text (SPLADE, BGE-M3)",
        ),
        ("POST", "/similarity"): Route(
            embed_routes.similarity, gives=list[float], words="TEI: cosines of a text with others"
        ),
        ("POST", "/predict"): Route(
            rank_routes.predict, takes=schemas.Predict, gives=schemas.Predictions,
            words="TEI: classes of texts or pairs",
        ),
        ("POST", "/token_classify"): Route(
            pipeline_routes.token_classify, gives=schemas.Entities,
            words="HuggingFace: entities of texts, with their places (as /predict and / of such a model)",
        ),
        ("POST", "/fill_mask"): Route(
            pipeline_routes.fill_mask, gives=schemas.Fillings,
            words="HuggingFace: what may stand in the place of a mask token",
        ),
        ("POST", "/rerank"): Route(
            rank_routes.rerank, takes=schemas.TeiRerank, gives=list[schemas.Rank],
            words="TEI: texts by their relevance to a query; with documents as /v1/rerank",
        ),
        ("POST", "/v1/rerank"): Route(
            rank_routes.rerank_documents, openai=True, gives=schemas.Ranking,
            words="Jina, Cohere (as /v2/rerank too): documents by their relevance to a query",
        ),
        ("POST", "/classify"): Route(
            rank_routes.classify, openai=True, gives=schemas.Classification, words="vLLM: classes of texts"
        ),
        ("POST", "/score"): Route(
            rank_routes.score, openai=True, gives=schemas.PairScores, words="vLLM: scores of pairs of texts"
        ),
        ("POST", "/pooling"): Route(
            embed_routes.pooling, openai=True, gives=schemas.PooledList,
            words="vLLM: a vector for each text, or for each token (ColBERT, BGE-M3)",
        ),
        ("POST", "/tokenize"): Route(
            token_routes.tokenize, counted=False, takes=schemas.Tokenize, gives=list[list[schemas.Token]],
            words="TEI: the tokens of texts; with prompt as vLLM",
        ),
        ("POST", "/decode"): Route(
            token_routes.decode_ids, counted=False, takes=schemas.Decode, gives=list[str], words="TEI: ids to texts"
        ),
        ("POST", "/detokenize"): Route(
            token_routes.detokenize, openai=True, counted=False, takes=schemas.Detokenize, gives=schemas.Detokenized,
            words="vLLM: ids to a text",
        ),
        ("POST", "/v1/completions"): Route(
            openai_generation.completions, openai=True, gives=generation_schemas.Completed,
            words="OpenAI: the text that follows a prompt, whole or streamed",
        ),
        ("POST", "/v1/chat/completions"): Route(
            openai_generation.chat_completions, openai=True, gives=generation_schemas.ChatCompleted,
            words="OpenAI: the answer to messages, whole or streamed",
        ),
        ("POST", "/completion"): Route(llama_cpp_routes.completion, words="llama.cpp: the text that follows a prompt"),
        ("GET", "/props"): Route(
            llama_cpp_routes.props, counted=False, words="llama.cpp: slots and context of the model that generates"
        ),
        ("POST", "/api/generate"): Route(
            ollama_generation.generate, words="Ollama: the answer to a prompt, streamed unless told otherwise"
        ),
        ("POST", "/api/chat"): Route(
            ollama_generation.chat, words="Ollama: the answer to messages, streamed unless told otherwise"
        ),
        ("GET", "/api/tags"): Route(ollama_generation.tags, counted=False, words="Ollama: the models"),
        ("POST", "/api/show"): Route(ollama_generation.show, counted=False),
        ("GET", "/api/version"): Route(ollama_generation.version, counted=False),
        ("POST", "/"): Route(_by_model),
        ("POST", "/invocations"): Route(_by_model),
        ("GET", "/v1/models"): Route(
            info_routes.models, openai=True, counted=False, gives=schemas.ModelCards, words="OpenAI: the models"
        ),
        ("GET", "/v1/models/{id}"): Route(
            info_routes.one_model, openai=True, counted=False, gives=schemas.ModelCard,
            words="OpenAI: one of the models",
        ),
        ("GET", "/models"): Route(info_routes.models, openai=True, counted=False),
        ("POST", "/models/load"): Route(
            model_routes.load, openai=True, counted=False, takes=schemas.NamedModel, gives=schemas.Success,
            words="llama.cpp: begins to load a model of --models-dir",
        ),
        ("POST", "/models/unload"): Route(
            model_routes.unload, openai=True, counted=False, takes=schemas.NamedModel, gives=schemas.Success,
            words="llama.cpp: unloads one, behind the requests that it has",
        ),
        ("GET", "/info"): Route(
            info_routes.info, counted=False, gives=schemas.Info, words="TEI: the model and the limits; ?model=NAME"
        ),
        ("GET", "/health"): Route(
            info_routes.health, public=True, probe=True, counted=False,
            words="200, or 503 while requests are not answered; ?model=NAME",
        ),
        ("GET", "/ping"): Route(info_routes.health, public=True, probe=True, counted=False),
        ("GET", "/live"): Route(
            info_routes.live, public=True, probe=True, counted=False, words="200 as long as the process answers"
        ),
        ("GET", "/metrics"): Route(
            info_routes.metrics, public=True, probe=True, counted=False, words="Prometheus' text, with TEI's names"
        ),
        ("GET", "/version"): Route(
            info_routes.version, counted=False, gives=schemas.Version, words="the version of ftbert"
        ),
    }  # fmt: skip
    for path in ("/openapi.json", "/api-doc/openapi.json"):
        routes["GET", path] = Route(info_routes.openapi, public=True, counted=False)
    for path, same in (
        ("/embeddings", "/v1/embeddings"), ("/openai/v1/embeddings", "/v1/embeddings"),
        ("/v2/rerank", "/v1/rerank"), ("/v1/score", "/score"),
        ("/v1/token_classify", "/token_classify"), ("/v1/fill_mask", "/fill_mask"),
        ("/chat/completions", "/v1/chat/completions"), ("/completions", "/v1/completions"),
    ):  # fmt: skip
        routes["POST", path] = replace(routes["POST", same], words="")
    for path in _NOT_HERE:
        routes["POST", path] = Route(_no_generation, openai=path.startswith("/v1/"), counted=False)
    return routes


async def _no_generation(app: App, request: Request) -> Response:
    """Other paths at which others' servers generate text."""
    words = f"{request.path} has no answer; text is generated at /v1/chat/completions and /v1/completions"
    raise ApiError("Unsupported", words)


async def _by_model(app: App, request: Request) -> Response:
    """POST / and /invocations: rerank, predict, token_classify, embed, embed_sparse or embed_all as the model is;
    similarity where the body asks for it."""
    fields = await fields_of(request.body)
    task = app.model(_named(fields)).about.task
    if task == "token_classifier":
        return await pipeline_routes.token_classify(app, request)
    if task == "sparse":
        return await embed_routes.embed_sparse(app, request)
    if task == "multi_vector":
        return await (rank_routes.rerank if "query" in fields else embed_routes.embed_all)(app, request)
    if task == "embedding":
        similar = "source_sentence" in await fields_of(fields.get("inputs", msgspec.Raw()))
        return await (embed_routes.similarity if similar else embed_routes.embed)(app, request)
    return await (rank_routes.rerank if "query" in fields else rank_routes.predict)(app, request)


def _named(fields: dict[str, msgspec.Raw]) -> str | None:
    """The model that a body names; None for whatever the route will refuse."""
    try:
        return msgspec.json.decode(fields.get("model", b"null"), type=str | None)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
