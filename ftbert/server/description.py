"""What a worker must know of a model that an engine has loaded: describe.py. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ftbert.server.job import Kind
from ftbert.text import Model2vecReading, PairTemplate

# Tasks of heads.
CLASSIFIES, TAGS, FILLS = "sequence_classification", "token_classification", "masked_lm"


class ModelFacts(msgspec.Struct, frozen=True):
    """hidden: entries of a text's vector, token_width: of a token's."""

    dtype: str
    device: str
    hidden: int
    token_width: int
    vocab: int
    token_types: int

    @property
    def computes_with(self) -> str:
        """The value of x-compute-type."""
        return "gpu+optimized" if self.device.startswith("cuda") else "cpu"


class TextFacts(msgspec.Struct, frozen=True):
    """How texts become ids. tokenizer: tokenizer.json's text, without truncation and padding.

    max_length: tokens of a text with the special ones; special: how many of these are added to one text. query_length,
    document_length: tokens of such texts, where the folder has a length for them. truncation_side: the tokenizer's own.
    unknown_id, pad_id: of the tokenizer; clean_up: what it decodes loses the space before punctuation. mask_id,
    mask_token: None where no head predicts masked tokens. reading: as of Tokenizer.
    """

    tokenizer: str
    encode_special_tokens: bool
    truncation_side: str
    max_length: int
    query_length: int | None
    document_length: int | None
    special: int
    special_ids: list[int]
    prompts: dict[str, str]
    default_prompt: str
    include_prompt: bool
    unknown_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None
    mask_token: str | None = None
    clean_up: bool = False
    reading: Model2vecReading | None = None


class ExpansionFacts(msgspec.Struct, frozen=True):
    """Queries become `length` tokens by `token`, to which others attend or not; exact: longer ones are cut."""

    token: int
    length: int
    exact: bool
    attend: bool


class VectorFacts(msgspec.Struct, frozen=True):
    """sparse: how sparse vectors come about, "splade", "lexical" (see ftbert.text.lexical; unweighted: its ids without
    a weight) or "" where there are none. skipped: ids without a vector in texts for "query" or "document", of a model
    that compares vectors of tokens ("multi_vector", or beside vectors of texts: BGE-M3); else empty. first_token: a
    text's first token may have a vector. expansion: None: queries stay as they are. chunks: parts of a text have
    vectors (late chunking)."""

    pooling: str
    truncate_dim: int | None
    sparse: str = ""
    unweighted: list[int] = []
    skipped: dict[str, list[int]] = {}
    first_token: bool = True
    expansion: ExpansionFacts | None = None
    chunks: bool = False


class TableFacts(msgspec.Struct, frozen=True):
    """Sparse vectors of texts for the tasks `tasks` (None: for no named one), which a table gives and no engine
    computes. text: how they become ids; weights: float32 [vocab], as bytes."""

    tasks: list[str | None]
    text: TextFacts
    weights: bytes


class ScoreFacts(msgspec.Struct, frozen=True):
    """labels: none where there are no scores. activation: from logits to scores, one of activations.ACTIVATIONS.
    score_ids: of a reranker that scores by the logits of these tokens; templates: by prompts, what its pairs go
    through; instructed: the same of any prompt, see PairTemplate.instructed."""

    labels: list[str]
    activation: str
    score_ids: list[int] = []
    templates: dict[str, PairTemplate] = {}
    instructed: PairTemplate | None = None


class GenerationFacts(msgspec.Struct, frozen=True):
    """Of a model that writes texts. slots: at the same time; positions: tokens of one, prompt included; bounded: the
    folder says how long a text is where a request does not. template: of chats, None: the folder has none; names: what
    it may use. special: ids that no text shows, and how they are spelled. stop: the folder's own strings that end a
    text."""

    slots: int
    positions: int
    bounded: bool
    template: str | None
    names: dict[str, str]
    special: dict[int, str]
    stop: list[str]


class Task(NamedTuple):
    """What a model is for. words: of the error where it is not. kind: of the batches that its engine times at first.
    vectors: of TextOptions. pooling: as /info says it, "" where settings do."""

    words: str
    kind: Kind
    vectors: str = "dense"
    pooling: str = ""


TASKS = {
    "embedding": Task("an embedding", Kind.EMBED),
    "sparse": Task("a SPLADE", Kind.SPARSE, "sparse", "splade"),
    "multi_vector": Task("a multi-vector", Kind.VECTORS, "multi", "token_embed"),
    "classifier": Task("a classifier", Kind.LOGITS),
    "reranker": Task("a re-ranker", Kind.LOGITS),
    "token_classifier": Task("a token classification", Kind.TOKEN_LOGITS),
}


class Description(msgspec.Struct, frozen=True):
    """task: one of TASKS. adapters: names of the tasks that a request may name. batch_tokens, rate: tokens of a batch,
    and tokens/s at that size, once these are timed."""

    name: str
    source: str
    task: str
    model: ModelFacts
    text: TextFacts
    vectors: VectorFacts
    scores: ScoreFacts
    batch_tokens: int = 0
    rate: float = 0.0
    table: TableFacts | None = None
    generation: GenerationFacts | None = None
    adapters: list[str] = []
