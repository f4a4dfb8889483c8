"""Shapes of answers, for /openapi.json. The routes write them from arrays, without these."""

from __future__ import annotations

from typing import Any

import msgspec

Matrix = list[list[float]]


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """embedding: a list of numbers, or base64 of little-endian float32."""

    object: str
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    object: str
    data: list[Embedding]
    model: str
    usage: Usage


class Pooled(msgspec.Struct):
    """data: a vector, of task token_embed one a token."""

    object: str
    index: int
    data: Any


class PooledList(msgspec.Struct):
    object: str
    data: list[Pooled]
    model: str
    usage: Usage


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str


class ModelCards(msgspec.Struct):
    object: str
    data: list[ModelCard]


class Prediction(msgspec.Struct):
    score: float
    label: str


class Rank(msgspec.Struct):
    index: int
    score: float
    text: str | None = None


class RankedDocument(msgspec.Struct):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(msgspec.Struct):
    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage
    meta: dict[str, Any]


class ClassScores(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(msgspec.Struct):
    id: str
    object: str
    model: str
    data: list[ClassScores]
    usage: Usage


class PairScore(msgspec.Struct):
    index: int
    object: str
    score: float


class PairScores(msgspec.Struct):
    id: str
    object: str
    model: str
    data: list[PairScore]
    usage: Usage


class Token(msgspec.Struct):
    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Version(msgspec.Struct):
    version: str


Info = dict[str, Any]
Predictions = list[Prediction | list[Prediction]]  # of one input, or of each
EmbedAll = list[list[list[float]]]
