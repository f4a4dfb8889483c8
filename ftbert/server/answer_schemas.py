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


class Entity(msgspec.Struct):
    """start, end: in characters of the text. entity, index: of a token; entity_group: where tokens are aggregated."""

    score: float
    word: str
    start: int
    end: int
    entity: str | None = None
    index: int | None = None
    entity_group: str | None = None


class Filled(msgspec.Struct):
    """token: an id that may stand in the place of the mask. sequence: the text with it."""

    score: float
    token: int
    token_str: str
    sequence: str


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


class Detokenized(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


Info = dict[str, Any]
Predictions = list[Prediction | list[Prediction]]  # of one input, or of each
Entities = list[Entity | list[Entity]]  # of one text, or of each
Fillings = list[Filled | list[Filled | list[Filled]]]  # of one mask, of each of a text, or of each text
EmbedAll = list[list[list[float]]]
