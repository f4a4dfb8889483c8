"""Shapes of requests and answers. Unknown fields of a request are ignored, as TEI and OpenAI do, but for those of ONLY,
which would change the answer."""

from __future__ import annotations

from types import GenericAlias
from typing import Any

import msgspec

Text = str | list[int]
Inputs = str | list[str | int | list[int]]


class Cut(msgspec.Struct):
    """How texts that are too long are treated."""

    truncate: bool | None = None
    truncation_direction: str = "right"
    prompt_name: str | None = None
    model: str | None = None


class Embed(Cut, kw_only=True):
    """task: see purposes. instruct, instruction: what is searched for, in the place of a prompt for it; see
    instructions."""

    inputs: Inputs
    normalize: bool = True
    dimensions: int | None = None
    task: str | None = None
    instruct: str | None = None
    instruction: str | None = None


class EmbedAll(Cut, kw_only=True):
    inputs: Inputs


class TokenLimits(msgspec.Struct, kw_only=True):
    """vLLM's. truncate_prompt_tokens: most tokens with the special ones, -1: the model's maximum. truncation_side: null
    is the tokenizer's own."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


class Written(TokenLimits, kw_only=True):
    """encoding_format: float, base64, or bytes and bytes_only, without JSON. embed_dtype, endianness: of what is no
    list: float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2; native, little or big."""

    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None


class Part(msgspec.Struct):
    text: str


class OpenAIEmbed(Written, kw_only=True):
    """input: a text as Jina's object too. truncate: true or false as TEI, NONE, START or END as Cohere and NVIDIA;
    truncation: as Voyage. output_dimension, output_dtype (float, int8, uint8, binary, ubinary): Voyage's and Mistral's;
    embedding_type (float, base64, binary, ubinary), normalized: Jina's. prompt_name, input_type, task: see purposes.
    instruct, instruction: see instructions. use_activation: false leaves the length of vectors as it is.
    late_chunking: as Jina, the inputs are parts of one text."""

    input: str | list[str | int | list[int] | Part]
    user: str | None = None
    dimensions: int | None = None
    output_dimension: int | None = None
    output_dtype: str | None = None
    embedding_type: str | None = None
    truncate: bool | str | None = None
    truncation: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    task: str | None = None
    normalized: bool | None = None
    use_activation: bool | None = None
    late_chunking: bool | None = None
    instruct: str | None = None
    instruction: str | None = None


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
    """instruct, instruction: see PairLimits."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False
    instruct: str | None = None
    instruction: str | None = None


class Document(msgspec.Struct):
    text: str


class PairLimits(TokenLimits, kw_only=True):
    """max_tokens_per_query, max_tokens_per_doc: of their own tokens, before they are paired; 0: all. instruct,
    instruction: of a reranker whose template or prompt has a place for one; chat_template_kwargs may have it too."""

    instruct: str | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, str | None] | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    use_activation: bool | None = None


class JinaRerank(PairLimits, kw_only=True):
    """top_k, truncation: Voyage's, which is answered in its form."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    top_k: int | None = None
    truncation: bool | None = None
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


class NamedModel(msgspec.Struct):
    model: str


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


class Pooling(Written, kw_only=True):
    input: Inputs
    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None


# Fields of vLLM, Jina, Cohere, Voyage and NVIDIA that change an answer and are not computed: null and these values mean
# nothing else than what is done anyway; any other is refused. `()`: no value is.
_NO_PROMPT: dict[str, tuple[Any, ...]] = {"prompt": (), "chat_template": ()}
NO_INSTRUCTION: dict[str, tuple[Any, ...]] = {"instruct": (), "instruction": ()}
_NOT_HERE = {**NO_INSTRUCTION, **_NO_PROMPT}
_EMBEDDED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,), "encoding_type": ("float",), "normalize": (True,), "return_multivector": (False,),
    "modality": ("text",), "lora_path": (), "embed_overrides": (), **_NO_PROMPT,
}  # fmt: skip
_OF_TEXTS: dict[str, tuple[Any, ...]] = {
    "embedding_type": ("float",), "output_dtype": ("float",), "output_dimension": (), "normalized": (True,),
    "truncation": (True,), "prompt_name": (), "input_type": (), "late_chunking": (False,), **NO_INSTRUCTION,
}  # fmt: skip
ONLY: dict[Any, dict[str, tuple[Any, ...]]] = {
    EmbedAll: {"normalize": (False,), "dimensions": (), **NO_INSTRUCTION},
    Similarity: NO_INSTRUCTION,
    Predict: NO_INSTRUCTION,
    TokenClassify: {"raw_scores": (False,), "prompt_name": ()},
    OpenAIEmbed: _EMBEDDED,
    Pooling: {**_EMBEDDED, **_OF_TEXTS},
    Classify: {"add_special_tokens": (True,), "activation": (True,), "softmax": (True,), "labels": (), **_NOT_HERE},
    Score: _NO_PROMPT,
    JinaRerank: {
        "rank_fields": (["text"],), "max_chunks_per_doc": (),
        "return_embeddings": (False,), "raw_scores": (False,), **_NO_PROMPT,
    },
}  # fmt: skip


# ---- answers, for /openapi.json: routes write them from arrays, without these

Matrix = list[list[float]]
Matrices = list[Matrix]


def answer(name: str, words: str | None = None, /, **fields: Any) -> Any:
    """The struct `name`. fields: their types; a pair: a type, and the value of a field that is left out."""
    kinds = [(field, *kind) if isinstance(kind, tuple) else (field, kind) for field, kind in fields.items()]
    return msgspec.defstruct(name, kinds, namespace={"__doc__": words} if words else {}, module=__name__)


def many(kind: Any) -> Any:
    """list[kind], of a struct made here, which is no type to mypy."""
    return GenericAlias(list, (kind,))


_MAYBE_TEXT = (str | None, None)
Usage = answer("Usage", prompt_tokens=int, total_tokens=int)
SparseValue = answer("SparseValue", "Of an entry of the vocabulary that has a weight.", index=int, value=float)
Embedding = answer(
    "Embedding", "embedding: a list of numbers, or base64 of their bytes, little-endian float32 where none is named.",
    object=str, index=int, embedding=list[float] | str,
)  # fmt: skip
Embeddings = answer("Embeddings", id=str, object=str, data=many(Embedding), model=str, usage=Usage)
Pooled = answer("Pooled", "data: a vector, of task token_embed one a token.", object=str, index=int, data=Any)
PooledList = answer("PooledList", object=str, data=many(Pooled), model=str, usage=Usage)
ModelStatus = answer(
    "ModelStatus", "value: loaded, loading or unloaded. failed: it could not be loaded; exit_code: of its process.",
    value=str, failed=(bool | None, None), exit_code=(int | None, None), error=_MAYBE_TEXT,
)  # fmt: skip
ModelCard = answer(
    "ModelCard", "capabilities: what it is for, and completion and chat where it generates.",
    id=str, object=str, created=int, owned_by=str, root=str, status=ModelStatus,
    max_model_len=(int | None, None), capabilities=(list[str] | None, None),
)  # fmt: skip
ModelCards = answer("ModelCards", object=str, data=many(ModelCard))
Success = answer("Success", success=bool)
Prediction = answer("Prediction", score=float, label=str)
Entity = answer(
    "Entity",
    "start, end: in characters of the text. entity, index: of a token; entity_group: where tokens are aggregated.",
    score=float, word=str, start=int, end=int, entity=_MAYBE_TEXT, index=(int | None, None), entity_group=_MAYBE_TEXT,
)  # fmt: skip
Filled = answer(
    "Filled", "token: an id that may stand in the place of the mask. sequence: the text with it.",
    score=float, token=int, token_str=str, sequence=str,
)  # fmt: skip
Rank = answer("Rank", index=int, score=float, text=_MAYBE_TEXT)
RankedDocument = answer("RankedDocument", index=int, relevance_score=float, document=(dict[str, str] | None, None))
Ranking = answer(
    "Ranking", "data: Voyage's results, instead of results.",
    id=str, model=str, usage=Usage, results=(many(RankedDocument), []), meta=(dict[str, Any], {}),
    object=(str, "list"), data=(list[dict[str, Any]], []),
)  # fmt: skip
ClassScores = answer("ClassScores", index=int, label=str, probs=list[float], num_classes=int)
Classification = answer("Classification", id=str, object=str, model=str, data=many(ClassScores), usage=Usage)
PairScore = answer("PairScore", index=int, object=str, score=float)
PairScores = answer("PairScores", id=str, object=str, model=str, data=many(PairScore), usage=Usage)
Token = answer("Token", id=int, text=str, special=bool, start=int | None, stop=int | None)
Detokenized = answer("Detokenized", prompt=str)
Version = answer("Version", version=str)
TeiError = answer("TeiError", error=str, error_type=str)
_Object = answer("OpenAIErrorObject", message=str, type=str, param=str | None, code=str | None)
OpenAIError = answer("OpenAIError", error=_Object, message=str, code=int, type=str, detail=str)

Info = dict[str, Any]
Predictions = many(Prediction | many(Prediction))  # of one input, or of each
Entities = many(Entity | many(Entity))  # of one text, or of each
Fillings = many(Filled | many(Filled | many(Filled)))  # of one mask, of each of a text, or of each text
