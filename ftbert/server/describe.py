"""Reads from a loaded model and its folder what workers need. Only in the engine: it imports torch and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftbert.server.activations import choose_activation
from ftbert.server.description import Description
from ftbert.server.settings import Settings
from ftbert.text import ScoreSettings, TextSettings, Tokenizer, load_tokenizer, lower_first, text_options

CLASSIFIES, TAGS, FILLS = "sequence_classification", "token_classification", "masked_lm"


def describe(model: Any, name: str, source: str, settings: Settings) -> Description:
    """`model`: an ftbert.Model. ValueError where its folder has no tokenizer that a worker can use, or a choice in
    `settings` does not fit the model."""
    if model.folder is None:
        raise ValueError(f"{source}: no folder with a tokenizer, which a server needs")
    folder = Path(model.folder)
    text = TextSettings.from_folder(folder)
    checked = Tokenizer(folder, text, model.config.max_seq)
    options = text_options(model, pooling=settings.pooling)  # refuses an unknown pooling
    loaded = load_tokenizer(folder, text.tokenizer_arguments)
    fast = getattr(loaded, "backend_tokenizer", None)
    if fast is None:
        raise ValueError(f"{folder}: a server needs a fast tokenizer, and {type(loaded).__name__} is written in Python")
    fast.no_padding()
    fast.no_truncation()
    if text.lower_case:
        lower_first(fast)
    task, labels = _task(model)
    # transformers leaves BPE as it is, whatever the file says.
    clean_up = bool(loaded.clean_up_tokenization_spaces) and type(fast.model).__name__ != "BPE"
    activation = "Identity"
    if task in ("classifier", "reranker"):
        config = model.checkpoint.config.huggingface
        scores = ScoreSettings.of(folder, config)
        named = None if scores.activation is None else type(scores.activation).__name__
        activation = choose_activation(named, config.get("problem_type"), len(labels))
    return Description(
        name=name,
        source=source,
        task=task,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        hidden=model.config.hidden,
        vocab=model.config.vocab,
        token_types=model.config.token_types,
        longest=checked.longest,
        max_length=checked.max_length,
        special=loaded.num_special_tokens_to_add(pair=False),
        special_ids=sorted(checked.special_ids),
        unknown_id=loaded.unk_token_id,
        pad_id=loaded.pad_token_id,
        mask_id=loaded.mask_token_id if FILLS in model.tasks else None,
        mask_token=loaded.mask_token if FILLS in model.tasks else None,
        clean_up=clean_up,
        tokenizer=fast.to_str(),
        encode_special_tokens=bool(fast.encode_special_tokens),
        pooling=options.pooling,
        prompts=dict(text.prompts),
        default_prompt=_default_prompt(text, settings),
        include_prompt=text.include_prompt,
        truncate_dim=options.truncate_dim,
        normalize=text.normalize,
        labels=labels,
        activation=activation,
        batch_tokens=0,
        rate=0.0,
    )


def _task(model: Any) -> tuple[str, list[str]]:
    """What it is served for, and the names of the labels of its head; without such a head "embedding"."""
    head = next((head for head in model.heads if head.task in (CLASSIFIES, TAGS)), None)
    if head is None:
        return "embedding", []
    names = model.checkpoint.config.huggingface.get("id2label") or {}
    labels = [str(names.get(str(i), f"LABEL_{i}")) for i in range(len(head.out_bias))]
    if head.task == TAGS:
        return "token_classifier", labels
    return "reranker" if len(labels) == 1 else "classifier", labels


def _default_prompt(text: TextSettings, settings: Settings) -> str:
    if settings.default_prompt is not None:
        return settings.default_prompt
    if (name := settings.default_prompt_name) is None:
        return text.default_prompt
    if name not in text.prompts:
        raise ValueError(f"default-prompt-name must be one of {', '.join(map(repr, text.prompts))}; got {name!r}")
    return text.prompts[name]
