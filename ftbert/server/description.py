"""What a worker must know of a model that an engine has loaded. Workers import no torch, which `describe` needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ftbert.server.activations import choose_activation
from ftbert.server.job import Kind
from ftbert.server.settings import Settings
from ftbert.text import PairTemplate, TextOptions, TextSettings, Tokenizer, unweighted

if TYPE_CHECKING:
    from ftbert.model import Model

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
    mask_token: None where no head predicts masked tokens.
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


class VectorFacts(msgspec.Struct, frozen=True):
    """sparse: how sparse vectors come about, "splade", "lexical" (see ftbert.text.lexical; unweighted: its ids without
    a weight) or "" where there are none. skipped: ids without a vector in texts for "query" or "document", of a model
    that compares vectors of tokens ("multi_vector", or beside vectors of texts: BGE-M3); else empty. first_token: a
    text's first token may have a vector. expands: queries are made longer, which a server does not do."""

    pooling: str
    truncate_dim: int | None
    sparse: str = ""
    unweighted: list[int] = []
    skipped: dict[str, list[int]] = {}
    first_token: bool = True
    expands: bool = False


class ScoreFacts(msgspec.Struct, frozen=True):
    """labels: none where there are no scores. activation: from logits to scores, one of activations.ACTIVATIONS.
    score_ids: of a reranker that scores by the logits of these tokens; templates: by prompts, what its pairs go
    through; instructed: the same of any prompt, see PairTemplate.instructed."""

    labels: list[str]
    activation: str
    score_ids: list[int] = []
    templates: dict[str, PairTemplate] = {}
    instructed: PairTemplate | None = None


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
    """task: one of TASKS. batch_tokens, rate: tokens of a batch, and tokens/s at that size, once these are timed."""

    name: str
    source: str
    task: str
    model: ModelFacts
    text: TextFacts
    vectors: VectorFacts
    scores: ScoreFacts
    batch_tokens: int = 0
    rate: float = 0.0


def describe(model: Model, name: str, source: str, settings: Settings) -> Description:
    """ValueError where the model's folder has no tokenizer that a worker can use, or a choice in `settings` does not
    fit the model."""
    from ftbert.dtypes import told_dtype
    from ftbert.text import ScoreSettings, tokenizer_of

    if model.folder is None:
        raise ValueError(f"{source}: no folder with a tokenizer, which a server needs")
    task, labels = _task(model)
    activation, config = "Identity", model.checkpoint.config.huggingface
    if TASKS[task].kind == Kind.LOGITS:
        named = ScoreSettings.of(model.folder, config).activation
        name_of = None if named is None else type(named).__name__
        activation = choose_activation(name_of, config.get("problem_type"), len(labels))
    checked, hidden = tokenizer_of(model, scores=bool(labels)), model.config.hidden
    text = checked.settings
    if not labels and text.other:
        task = "sparse" if text.sparse is not None else "multi_vector"
    # Refuses an unknown pooling.
    options = TextOptions.choose(checked, hidden, pooling=settings.pooling, vectors=TASKS[task].vectors)
    if checked.backend is None:
        words = f"a server needs a fast tokenizer, and {type(checked.loaded).__name__} is written in Python"
        raise ValueError(f"{model.folder}: {words}")
    facts = ModelFacts(
        dtype=told_dtype(model.dtype),
        device=str(model.device),
        hidden=text.width(hidden, options.pooling),
        token_width=_token_width(text, hidden) if task == "multi_vector" else text.state_width(hidden),
        vocab=model.config.vocab,
        token_types=model.config.token_types,
    )
    texts = _text(checked, _default_prompt(text, settings), FILLS in model.tasks)
    pooling = TASKS[task].pooling or options.pooling
    found = _scores(checked, labels, activation, texts.default_prompt if task == "reranker" else None)
    return Description(name, source, task, facts, texts, _vectors(checked, pooling, options.truncate_dim), found)


def _text(tokenizer: Tokenizer, default_prompt: str, fills: bool) -> TextFacts:
    text, loaded, fast = tokenizer.settings, tokenizer.loaded, tokenizer.backend
    assert fast is not None
    return TextFacts(
        tokenizer=fast.to_str(),
        encode_special_tokens=bool(fast.encode_special_tokens),
        truncation_side=loaded.truncation_side,
        max_length=tokenizer.max_length,
        query_length=_length(text.query_length, tokenizer.longest),
        document_length=_length(text.document_length, tokenizer.longest),
        special=loaded.num_special_tokens_to_add(pair=False),
        special_ids=sorted(tokenizer.special_ids),
        prompts=dict(text.prompts),
        default_prompt=default_prompt,
        include_prompt=text.include_prompt,
        unknown_id=loaded.unk_token_id,
        pad_id=loaded.pad_token_id,
        mask_id=loaded.mask_token_id if fills else None,
        mask_token=loaded.mask_token if fills else None,
        # transformers leaves BPE as it is, whatever the file says.
        clean_up=bool(loaded.clean_up_tokenization_spaces) and type(fast.model).__name__ != "BPE",
    )


def _vectors(tokenizer: Tokenizer, pooling: str, truncate_dim: int | None) -> VectorFacts:
    from ftbert.text import skipped_ids

    sparse, multi = tokenizer.settings.sparse, tokenizer.settings.multi
    return VectorFacts(
        pooling=pooling,
        truncate_dim=truncate_dim,
        sparse="" if sparse is None else "lexical" if sparse.linear else "splade",
        unweighted=unweighted(tokenizer.loaded).tolist(),
        skipped={}
        if multi is None
        else {task: skipped_ids(tokenizer, multi, task).tolist() for task in ("query", "document")},
        first_token=multi is None or multi.first,
        expands=multi is not None and multi.expansion is not None,
    )


def _scores(tokenizer: Tokenizer, labels: list[str], activation: str, prompt: str | None) -> ScoreFacts:
    """prompt: the default one of a reranker, else None."""
    from ftbert.text import score_ids

    text = tokenizer.settings
    if prompt is None or text.logit_score is None:
        return ScoreFacts(labels, activation)
    found = {one: tokenizer.pair_template(one) for one in {"", prompt, *text.prompts.values()}}
    templates = {one: template for one, template in found.items() if template is not None}
    instructed = tokenizer.instructed_template() if templates else None
    return ScoreFacts(labels, activation, score_ids(tokenizer), templates, instructed)


def _token_width(text: TextSettings, hidden: int) -> int:
    return text.multi.dense[-1].outputs if text.multi is not None and text.multi.dense else text.state_width(hidden)


def _task(model: Model) -> tuple[str, list[str]]:
    """What it is served for, and the names of the labels of its scores; without scores "embedding"."""
    from ftbert.text import score_task

    if (found := score_task(model)) is None:
        return "embedding", []
    labels = list(model.id2label.values())
    if found[0] == TAGS:
        return "token_classifier", labels
    return "reranker" if len(labels) == 1 else "classifier", labels


def _length(own: int | None, longest: int) -> int | None:
    return None if own is None else min(own, longest)


def _default_prompt(text: TextSettings, settings: Settings) -> str:
    if settings.default_prompt is not None:
        return settings.default_prompt
    if (name := settings.default_prompt_name) is None:
        return text.default_prompt
    if name not in text.prompts:
        known = ", ".join(map(repr, text.prompts)) or "those of the folder, which has none"
        raise ValueError(f"default-prompt-name must be one of {known}; got {name!r}")
    return text.prompts[name]
