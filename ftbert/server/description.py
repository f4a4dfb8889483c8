"""What a worker must know of a model that an engine has loaded. Workers import no torch, which `describe` needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ftbert.server.activations import choose_activation
from ftbert.server.settings import Settings
from ftbert.text import PairTemplate, TextOptions, TextSettings, Tokenizer, unweighted

# Tasks of heads.
CLASSIFIES, TAGS, FILLS = "sequence_classification", "token_classification", "masked_lm"


class Description(msgspec.Struct, frozen=True):
    """task: "embedding", "sparse", "multi_vector", "classifier", "reranker" or "token_classifier". labels: of the
    last three. tokenizer: tokenizer.json's text, without truncation and padding.

    hidden: entries of a text's vector, token_width: of a token's. max_length: tokens of a text with the special ones;
    special: how many of these are added to one text. query_length, document_length: tokens of such texts, where the
    folder has a length for them. truncation_side: the tokenizer's own. activation: from logits to scores, one of
    activations.ACTIVATIONS. unknown_id, pad_id: of the tokenizer; clean_up: what it decodes loses the space before
    punctuation. mask_id, mask_token: None where no head predicts masked tokens. sparse: how sparse vectors come about,
    "splade", "lexical" (see ftbert.text.lexical; unweighted: its ids without a weight) or "" where there are none.
    score_ids: of a reranker that scores by the logits of these tokens; templates: by prompts, what its pairs go
    through; instructed: the same of any prompt, see PairTemplate.instructed. skipped: of a model with vectors of tokens
    to compare, "multi_vector" or beside those of texts (BGE-M3), the ids without one in texts for "query" or
    "document", else empty; first_token: a text's first token may have one; expands: queries are made longer, which a
    server does not do.
    """

    name: str
    source: str
    task: str
    dtype: str
    device: str
    hidden: int
    token_width: int
    vocab: int
    token_types: int
    max_length: int
    query_length: int | None
    document_length: int | None
    special: int
    special_ids: list[int]
    tokenizer: str
    encode_special_tokens: bool
    truncation_side: str
    pooling: str
    prompts: dict[str, str]
    default_prompt: str
    include_prompt: bool
    truncate_dim: int | None
    labels: list[str]
    activation: str
    batch_tokens: int
    rate: float
    unknown_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None
    mask_token: str | None = None
    clean_up: bool = False
    sparse: str = ""
    unweighted: list[int] = []
    score_ids: list[int] = []
    templates: dict[str, PairTemplate] = {}
    instructed: PairTemplate | None = None
    skipped: dict[str, list[int]] = {}
    first_token: bool = True
    expands: bool = False

    @property
    def computes_with(self) -> str:
        """The value of x-compute-type."""
        return "gpu+optimized" if self.device.startswith("cuda") else "cpu"


def describe(model: Any, name: str, source: str, settings: Settings) -> Description:
    """`model`: an ftbert.Model. ValueError where its folder has no tokenizer that a worker can use, or a choice in
    `settings` does not fit the model."""
    from ftbert.dtypes import told_dtype
    from ftbert.text import ScoreSettings, score_ids

    if model.folder is None:
        raise ValueError(f"{source}: no folder with a tokenizer, which a server needs")
    folder = Path(model.folder)
    task, labels = _task(model)
    activation, config = "Identity", model.checkpoint.config.huggingface
    if task == "embedding":
        text = TextSettings.from_folder(folder)
        if text.other:
            task = "sparse" if text.sparse is not None else "multi_vector"
    else:
        scores = ScoreSettings.of(folder, config)
        text = scores.text
        if task != "token_classifier":
            named = None if scores.activation is None else type(scores.activation).__name__
            activation = choose_activation(named, config.get("problem_type"), len(labels))
    checked, hidden = Tokenizer(folder, text, model.config.max_seq), model.config.hidden
    # Refuses an unknown pooling.
    vectors = {"sparse": "sparse", "multi_vector": "multi"}.get(task, "dense")
    options = TextOptions.choose(checked, model.config.hidden, pooling=settings.pooling, vectors=vectors)
    loaded, fast = checked.loaded, checked.backend
    if fast is None:
        raise ValueError(f"{folder}: a server needs a fast tokenizer, and {type(loaded).__name__} is written in Python")
    default_prompt = _default_prompt(text, settings)
    scored = task == "reranker" and text.logit_score is not None
    templates = _templates(checked, {"", default_prompt, *text.prompts.values()}) if scored else {}
    # transformers leaves BPE as it is, whatever the file says.
    clean_up = bool(loaded.clean_up_tokenization_spaces) and type(fast.model).__name__ != "BPE"
    return Description(
        name=name,
        source=source,
        task=task,
        dtype=told_dtype(model.dtype),
        device=str(model.device),
        hidden=text.width(model.config.hidden, options.pooling),
        token_width=(_token_width(text, hidden) if task == "multi_vector" else text.state_width(hidden)),
        vocab=model.config.vocab,
        token_types=model.config.token_types,
        max_length=checked.max_length,
        query_length=_length(text.query_length, checked.longest),
        document_length=_length(text.document_length, checked.longest),
        special=loaded.num_special_tokens_to_add(pair=False),
        special_ids=sorted(checked.special_ids),
        unknown_id=loaded.unk_token_id,
        pad_id=loaded.pad_token_id,
        mask_id=loaded.mask_token_id if FILLS in model.tasks else None,
        mask_token=loaded.mask_token if FILLS in model.tasks else None,
        clean_up=clean_up,
        tokenizer=fast.to_str(),
        encode_special_tokens=bool(fast.encode_special_tokens),
        truncation_side=loaded.truncation_side,
        pooling={"sparse": "splade", "multi_vector": "token_embed"}.get(task, options.pooling),
        prompts=dict(text.prompts),
        default_prompt=default_prompt,
        include_prompt=text.include_prompt,
        truncate_dim=options.truncate_dim,
        labels=labels,
        activation=activation,
        batch_tokens=0,
        rate=0.0,
        sparse="" if text.sparse is None else "lexical" if text.sparse.linear else "splade",
        unweighted=unweighted(loaded).tolist(),
        score_ids=score_ids(checked) if scored else [],
        templates=templates,
        instructed=checked.instructed_template() if templates else None,
        skipped={} if text.multi is None else _skipped(checked),
        first_token=text.multi is None or text.multi.first,
        expands=text.multi is not None and text.multi.expansion is not None,
    )


def _token_width(text: TextSettings, hidden: int) -> int:
    return text.multi.dense[-1].outputs if text.multi is not None and text.multi.dense else text.state_width(hidden)


def _skipped(tokenizer: Tokenizer) -> dict[str, list[int]]:
    from ftbert.text import skipped_ids

    assert tokenizer.settings.multi is not None
    multi = tokenizer.settings.multi
    return {task: skipped_ids(tokenizer, multi, task).tolist() for task in ("query", "document")}


def _templates(tokenizer: Tokenizer, prompts: set[str]) -> dict[str, PairTemplate]:
    found = {prompt: tokenizer.pair_template(prompt) for prompt in prompts}
    return {prompt: template for prompt, template in found.items() if template is not None}


def _task(model: Any) -> tuple[str, list[str]]:
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
