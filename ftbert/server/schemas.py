"""Bodies of requests. Unknown fields are ignored, as TEI and OpenAI do, but for those of ONLY, which would change the
answer."""

from __future__ import annotations

import json
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


class EmbedAll(Cut, kw_only=True):
    inputs: Inputs


class TokenLimits(msgspec.Struct, kw_only=True):
    """vLLM's. truncate_prompt_tokens: most tokens with the special ones, -1: the model's maximum. truncation_side: null
    is the tokenizer's own."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


class OpenAIEmbed(TokenLimits, kw_only=True):
    """truncate: true or false as TEI, NONE, START or END as Cohere and NVIDIA. prompt_name, input_type, task: see
    openai_routes. use_activation: false leaves the length of vectors as it is."""

    input: Inputs
    user: str | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None
    truncate: bool | str | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    use_activation: bool | None = None


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


class PairLimits(TokenLimits, kw_only=True):
    """max_tokens_per_query, max_tokens_per_doc: of their own tokens, before they are paired; 0: all."""

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    use_activation: bool | None = None


class JinaRerank(PairLimits, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None


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


class Detokenize(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class Classify(TokenLimits, kw_only=True):
    input: str | list[str]
    use_activation: bool | None = None


class Score(PairLimits, kw_only=True):
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None


class Pooling(TokenLimits, kw_only=True):
    input: Inputs
    task: str | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None
    use_activation: bool | None = None


# Fields of vLLM, Jina, Cohere, Voyage and NVIDIA that change an answer and are not computed: null and these values mean
# nothing else than what is done anyway; any other is refused. `()`: no value is.
_NOT_HERE: dict[str, tuple[Any, ...]] = {"prompt": (), "instruction": (), "chat_template": ()}
_WRITTEN: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,), "embed_dtype": ("float32",), "endianness": ("native", "little"),
    "embedding_type": ("float",), "encoding_type": ("float",), "output_dtype": ("float",), "output_dimension": (),
    "normalize": (True,), "normalized": (True,), "late_chunking": (False,), "return_multivector": (False,),
    "truncation": (True,), "modality": ("text",), **_NOT_HERE,
}  # fmt: skip
ONLY: dict[Any, dict[str, tuple[Any, ...]]] = {
    EmbedAll: {"normalize": (False,), "dimensions": ()},
    TokenClassify: {"raw_scores": (False,), "prompt_name": ()},
    OpenAIEmbed: _WRITTEN,
    Pooling: {**_WRITTEN, "prompt_name": (), "input_type": ()},
    Classify: {"add_special_tokens": (True,), "activation": (True,), "softmax": (True,), "labels": (), **_NOT_HERE},
    Score: _NOT_HERE,
    JinaRerank: {
        "rank_fields": (["text"],), "max_chunks_per_doc": (), "top_k": (), "truncation": (True,),
        "return_embeddings": (False,), "raw_scores": (False,), **_NOT_HERE,
    },
}  # fmt: skip

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
        found = _decoded(decoder, body)
    except msgspec.ValidationError as error:
        raise validation(_short(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError("Validation", f"the body is not valid JSON: {_short(error)}", status=400) from None
    except UnicodeDecodeError:
        raise ApiError("Validation", "the body is not valid UTF-8", status=400) from None
    except RecursionError:
        raise ApiError("Validation", "the body is nested too deeply", status=400) from None
    _expect_only(body, ONLY.get(schema, {}))
    return found  # type: ignore[no-any-return]


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes | bytearray) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not any(word in str(error) for word in ("`float`", "`null`")):
            raise
        try:
            return decoder.decode(_plain(body))
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise error from None


def _plain(body: bytes | bytearray) -> bytes:
    """`body` with integers where it has 1.0, and without the fields that are null, in objects inside too: some clients
    write a default as null. Raises several for what Python does not read."""

    def number(text: str) -> int | float:
        value = float(text)
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value

    def constant(text: str) -> None:
        raise ValueError(text)

    def fields(given: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in given.items() if value is not None}

    return msgspec.json.encode(json.loads(body, object_hook=fields, parse_float=number, parse_constant=constant))


def _expect_only(body: bytes | bytearray, known: dict[str, tuple[Any, ...]]) -> None:
    """ApiError 422 for a field among `known` with another value than it allows."""
    if not known or not (b"\\u" in body or any(b'"%s"' % name.encode() in body for name in known)):
        return
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])  # texts stay as they are
    for name in (one for one in known if one in fields):
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in known[name]:
            only = " or ".join(msgspec.json.encode(one).decode() for one in known[name])
            raise validation(f"`{name}` is not supported{f', but as {only}' if only else ''}", param=name)


def _short(error: Exception) -> str:
    return str(error)[:200]
