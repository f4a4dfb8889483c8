"""Bodies of requests. Unknown fields are ignored, as TEI and OpenAI do."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ftbert.server.errors import ApiError, validation

Text = str | list[int]
Inputs = str | list[str | int | list[int]]


class Cut(msgspec.Struct):
    """How texts that are too long are treated."""

    truncate: bool | None = None
    truncation_direction: str = "right"
    prompt_name: str | None = None
    model: str | None = None


class Embed(Cut, kw_only=True):
    inputs: Inputs
    normalize: bool = True
    dimensions: int | None = None


class OpenAIEmbed(msgspec.Struct):
    input: Inputs
    model: str | None = None
    user: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"
    embed_dtype: str = "float32"
    endianness: str = "native"
    add_special_tokens: bool = True


class Sentences(msgspec.Struct):
    source_sentence: str
    sentences: list[str]


class Similarity(msgspec.Struct):
    inputs: Sentences
    parameters: Cut | None = None
    model: str | None = None


class Predict(Cut, kw_only=True):
    inputs: str | list[str | list[str]]
    raw_scores: bool = False


class Aggregation(msgspec.Struct):
    """aggregation_strategy: none, simple, first, average or max. ignore_labels: without them "O"."""

    aggregation_strategy: str = "none"
    ignore_labels: list[str] | None = None
    stride: int | None = None


class TokenClassify(Aggregation, kw_only=True):
    """parameters: instead of those beside it."""

    inputs: str | list[str | list[str]]
    parameters: Aggregation | None = None
    truncate: bool | None = None
    truncation_direction: str = "right"
    model: str | None = None


class Filling(msgspec.Struct):
    """targets: words, which alone are asked for."""

    top_k: int = 5
    targets: str | list[str] | None = None


class FillMask(Filling, kw_only=True):
    """parameters: instead of those beside it."""

    inputs: str | list[str | list[str]]
    parameters: Filling | None = None
    truncate: bool | None = None
    truncation_direction: str = "right"
    model: str | None = None


class TeiRerank(Cut, kw_only=True):
    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class Document(msgspec.Struct):
    text: str


class JinaRerank(msgspec.Struct):
    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None


class Tokenize(msgspec.Struct):
    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    model: str | None = None


class TokenizePrompt(msgspec.Struct):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class Decode(msgspec.Struct):
    ids: list[int | list[int]]
    skip_special_tokens: bool = True
    model: str | None = None


class Classify(msgspec.Struct):
    input: str | list[str]
    model: str | None = None
    use_activation: bool | None = None


class Score(msgspec.Struct):
    model: str | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    use_activation: bool | None = None


class Pooling(msgspec.Struct):
    input: Inputs
    model: str | None = None
    task: str | None = None
    encoding_format: str = "float"


T = TypeVar("T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(body: bytes | bytearray, schema: type[T]) -> T:
    """ApiError 400 for what is no JSON, 422 for another shape. A key that is there twice is json_keys' business."""
    if not body:
        raise ApiError("Empty", "the request has no body", status=400)
    decoder = _decoders.get(schema)
    if decoder is None:
        decoder = _decoders[schema] = msgspec.json.Decoder(schema)
    try:
        return decoder.decode(body)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise validation(_short(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError("Validation", f"the body is not valid JSON: {_short(error)}", status=400) from None
    except UnicodeDecodeError:
        raise ApiError("Validation", "the body is not valid UTF-8", status=400) from None
    except RecursionError:
        raise ApiError("Validation", "the body is nested too deeply", status=400) from None


def _short(error: Exception) -> str:
    return str(error)[:200]
