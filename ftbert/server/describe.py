"""What an engine tells its workers of the model that it has loaded."""

from __future__ import annotations

import msgspec

from ftbert.dtypes import told_dtype
from ftbert.model import Model
from ftbert.server.activations import choose_activation
from ftbert.server.description import (
    FILLS,
    TAGS,
    TASKS,
    Description,
    ExpansionFacts,
    ModelFacts,
    ScoreFacts,
    TableFacts,
    TextFacts,
    VectorFacts,
)
from ftbert.server.job import Kind
from ftbert.server.settings import Settings
from ftbert.text import (
    Expansion,
    ScoreSettings,
    TextOptions,
    TextSettings,
    Tokenizer,
    expansion_token,
    score_ids,
    score_task,
    skipped_ids,
    table_tokenizer,
    table_weights,
    takes_chunks,
    tokenizer_of,
    unweighted,
    width_behind,
)


def describe(model: Model, name: str, source: str, settings: Settings) -> Description:
    """ValueError where the model's folder has no tokenizer that a worker can use, or a choice in `settings` does not
    fit the model."""
    if model.folder is None:
        raise ValueError(f"{source}: no folder with a tokenizer, which a server needs")
    if not (model.checkpoint.bare or model.checkpoint.task):
        listed = ", ".join(model.checkpoint.tasks)
        raise ValueError(f"{source}: has an adapter for each task and is none without: --task names one of {listed}")
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
    options = TextOptions.choose(
        checked, hidden, pooling=settings.pooling, vectors=TASKS[task].vectors, adapter=model.checkpoint.task
    )
    if checked.backend is None:
        words = f"a server needs a fast tokenizer, and {type(checked.loaded).__name__} is written in Python"
        raise ValueError(f"{model.folder}: {words}")
    compared = text.multi.dense if task == "multi_vector" and text.multi is not None else ()
    facts = ModelFacts(
        dtype=told_dtype(model.dtype),
        device=str(model.device),
        hidden=text.width(hidden, options.pooling),
        token_width=width_behind(compared, text.state_width(hidden)),
        vocab=model.config.vocab,
        token_types=model.config.token_types,
    )
    texts = _text(checked, _default_prompt(text, settings, options.prompt), FILLS in model.tasks)
    pooling = TASKS[task].pooling or options.pooling
    found = _scores(checked, labels, activation, texts.default_prompt if task == "reranker" else None)
    vectors, table = _vectors(checked, pooling, options.truncate_dim), None
    if text.sparse is not None and text.sparse.table is not None:
        facts_of_table = _text(table_tokenizer(model, text.sparse.table), texts.default_prompt, fills=False)
        facts_of_table = msgspec.structs.replace(facts_of_table, prompts=texts.prompts)
        weights = table_weights(model, text.sparse.table).tobytes()
        table = TableFacts(list(text.sparse.table_for), facts_of_table, weights)
    adapters = list(model.checkpoint.tasks)
    return Description(name, source, task, facts, texts, vectors, found, table=table, adapters=adapters)


def _text(tokenizer: Tokenizer, default_prompt: str, fills: bool) -> TextFacts:
    text, loaded, fast = tokenizer.settings, tokenizer.loaded, tokenizer.backend
    assert fast is not None
    return TextFacts(
        tokenizer=fast.to_str(),
        encode_special_tokens=bool(fast.encode_special_tokens),
        truncation_side=loaded.truncation_side,
        max_length=tokenizer.max_length,
        query_length=None if text.query_length is None else min(text.query_length, tokenizer.longest),
        document_length=None if text.document_length is None else min(text.document_length, tokenizer.longest),
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
        reading=tokenizer.reading,
    )


def _vectors(tokenizer: Tokenizer, pooling: str, truncate_dim: int | None) -> VectorFacts:
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
        expansion=None if multi is None else _expansion(tokenizer, multi.expansion),
        chunks=takes_chunks(tokenizer.settings),
    )


def _expansion(tokenizer: Tokenizer, found: Expansion | None) -> ExpansionFacts | None:
    if found is None:
        return None
    length = tokenizer.check_length(found.length, "query_expansion: length")
    return ExpansionFacts(expansion_token(tokenizer, found), length, found.exact, found.attend)


def _scores(tokenizer: Tokenizer, labels: list[str], activation: str, prompt: str | None) -> ScoreFacts:
    """prompt: the default one of a reranker, else None."""
    text = tokenizer.settings
    if prompt is None or text.logit_score is None:
        return ScoreFacts(labels, activation)
    found = {one: tokenizer.pair_template(one) for one in {"", prompt, *text.prompts.values()}}
    templates = {one: template for one, template in found.items() if template is not None}
    instructed = tokenizer.instructed_template() if templates else None
    return ScoreFacts(labels, activation, score_ids(tokenizer), templates, instructed)


def _task(model: Model) -> tuple[str, list[str]]:
    """What it is served for, and the names of the labels of its scores; without scores "embedding"."""
    if (found := score_task(model)) is None:
        return "embedding", []
    labels = list(model.id2label.values())
    if found[0] == TAGS:
        return "token_classifier", labels
    return "reranker" if len(labels) == 1 else "classifier", labels


def _default_prompt(text: TextSettings, settings: Settings, own: str) -> str:
    if settings.default_prompt is not None:
        return settings.default_prompt
    if (name := settings.default_prompt_name) is None:
        return own
    if name not in text.prompts:
        known = ", ".join(map(repr, text.prompts)) or "those of the folder, which has none"
        raise ValueError(f"default-prompt-name must be one of {known}; got {name!r}")
    return text.prompts[name]
