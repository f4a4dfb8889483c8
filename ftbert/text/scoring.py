"""Texts or pairs of texts in, a task head's scores out: classification, token classification, reranking."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftbert.checkpoint import CAUSAL_LM, VOCABULARY
from ftbert.input_file import read_json_object
from ftbert.packed_model import PackedModel
from ftbert.progress import Progress
from ftbert.text.activations import Activation, activation
from ftbert.text.batching import Batch
from ftbert.text.checks import one_of, positive
from ftbert.text.computing import Work, compute_all, compute_windows, rows_of_texts
from ftbert.text.encoding import has_score_head, tokenise, tokenizer_of
from ftbert.text.options import choose_prompt
from ftbert.text.pooling import Upload, text_vectors
from ftbert.text.settings import TextSettings
from ftbert.text.shared_prefix import sharing
from ftbert.text.token_classification import IGNORED, STRATEGIES, TokenLabels
from ftbert.text.tokenizer import Tokenizer
from ftbert.text.tokens import Text, Tokens, check_texts, is_single, listed, tokens_of

# Tasks without a head for them: one or two logits over the vocabulary count, or pooled vectors are the scores.
LOGIT_SCORE, POOLED_SCORE = "logit_score", "pooled_score"
_TASKS = ("sequence_classification", "token_classification")
_TEXTS_AT_ONCE = 512  # whose tokens are kept with their offsets: 200 bytes each


@dataclass(frozen=True)
class ScoreSettings:
    """What a model's folder says about scores, as sentence-transformers' CrossEncoder reads it.

    activation: over the logits, None where nothing names one. text: prompts, and how texts become tokens.
    """

    activation: Activation | None
    text: TextSettings

    @classmethod
    def of(cls, folder: Path | None, config: Mapping[str, Any]) -> ScoreSettings:
        """config: the model's, as HuggingFace writes it. ValueError names the file that asks for something else."""
        if folder is None:
            return cls(_older_activation(config, "config.json"), TextSettings(prompts={}))
        text = TextSettings.for_scores(folder)
        head = folder / "config_sentence_transformers.json"
        values = read_json_object(head) if (folder / "modules.json").exists() and head.exists() else {}
        name = values.get("activation_fn") if values.get("model_type") == "CrossEncoder" else None
        if name is not None:
            return cls(activation(name, f"{head}: activation_fn"), text)
        return cls(_older_activation(config, str(folder / text.subfolder / "config.json")), text)


def scoring(
    model: PackedModel,
    *,
    activation_fn: Activation | None = None,
    apply_softmax: bool = False,
    prompt: str | None = None,
    prompt_name: str | None = None,
    max_length: int | None = None,
    max_tokens: int = 16384,
    batch_size: int | None = None,
    pairs: bool = True,
    chat_template: str | None = None,
) -> Work:
    """What `predict` computes; see `ftbert.Model.predict`. pairs: some texts may be pairs."""
    task, labels = task_of(model, chat_template)
    settings = ScoreSettings.of(model.folder, model.checkpoint.config.huggingface)
    tokenizer = tokenizer_of(model, scores=True)
    before = choose_prompt(prompt, prompt_name, tokenizer.settings.prompts, tokenizer.settings.default_prompt)
    length = None if max_length is None else positive("max_length", max_length)
    length = tokenizer.check_length(length or tokenizer.max_length, "max_length", pairs)
    chosen = activation_fn or settings.activation
    if chosen is None:
        one = labels == 1 and task != "token_classification"
        chosen = torch.nn.Sigmoid() if one else torch.nn.Identity()
    if not callable(chosen):
        raise TypeError(f"activation_fn must take and return a tensor; got {chosen!r}")
    read, logits = tokenise(model, tokenizer, before, length), _first_logits
    if task == POOLED_SCORE:
        logits = partial(_pooled_logits, pooling=settings.text.pooling)
    if task == LOGIT_SCORE:
        logits = partial(_next_logits, ids=score_ids(tokenizer))
    templated = task == LOGIT_SCORE or tokenizer.ranks
    if templated and (template := tokenizer.pair_template(before, chat_template)) is not None:
        config = model.config

        def read(texts: Sequence[Text]) -> Tokens:
            return tokenizer.template_tokens(texts, template, length).check(config.vocab, config.token_types)

    if chat_template is not None and task != LOGIT_SCORE:
        raise ValueError(f"chat_template is for models that score by what they would say next; this one's head: {task}")
    return Work(
        compute=partial(scores, logits=logits, activation=chosen, softmax=bool(apply_softmax) and labels > 1),
        tokenise=read,
        width=labels,
        parts=rows_of_texts if task == "token_classification" else None,
        max_tokens=positive("max_tokens", max_tokens),
        batch_size=None if batch_size is None else positive("batch_size", batch_size),
    )


Packed = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]  # arguments of Model.forward_packed


def _packed(batch: Batch, upload: Upload) -> Packed:
    types = None if batch.types is None else upload(batch.types)
    return upload(batch.ids), upload(batch.cu_seqlens), batch.longest, types


def _first_logits(model: PackedModel, batch: Batch, upload: Upload) -> torch.Tensor:
    """[texts or tokens, labels]: of the model's first head."""
    logits: torch.Tensor = model.logits_packed(*_packed(batch, upload))[0]
    return logits


def _pooled_logits(model: PackedModel, batch: Batch, upload: Upload, pooling: str) -> torch.Tensor:
    """[texts, labels]: what the folder's Dense modules make of pooled vectors."""
    ids, _, longest, types = _packed(batch, upload)
    return text_vectors(model, ids, batch.cu_seqlens, longest, upload, pooling=pooling, types=types, layers="scores")


def _next_logits(model: PackedModel, batch: Batch, upload: Upload, ids: Sequence[int]) -> torch.Tensor:
    some, shared = sharing(model, batch)
    return next_logits(model, _packed(some, upload), ids, shared)


def next_logits(model: PackedModel, packed: Packed, ids: Sequence[int], shared: int = 0) -> torch.Tensor:
    """float32 [texts, 1]: of the token behind each text's last the logit of the first id, minus that of the second.
    shared: tokens of the first sequence, which is no text, but what all begin with."""
    last = model.forward_packed(*packed, want="last", shared_prefix=shared)[1 if shared else 0 :]
    task = vocabulary_head(model)
    assert task is not None
    head = model.head(task)
    logits = head.some(last, model.encoder.weight("embeddings.word"), list(ids)).float()
    return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]


def vocabulary_head(model: PackedModel) -> str | None:
    """The task of the checkpoint's head over the vocabulary, read or not; None without one."""
    return next((head.task for head in model.checkpoint.config.heads if head.task in VOCABULARY), None)


def score_ids(tokenizer: Tokenizer) -> list[int]:
    """Of `next_logits`. ValueError where the tokenizer does not have the tokens."""
    score = tokenizer.settings.logit_score
    assert score is not None
    loaded = tokenizer.loaded
    given = [one for one in (score.true, score.false) if one is not None]
    found = [loaded.convert_tokens_to_ids(one) if isinstance(one, str) else one for one in given]
    if missing := [word for word, one in zip(given, found, strict=True) if one in (None, loaded.unk_token_id)]:
        raise ValueError(
            f"this model scores by the logits of {' and '.join(map(repr, given))}, and its tokenizer has no token "
            f"{missing[0]!r}; name the ids in a LogitScore module"
        )
    return found


def scores(
    model: PackedModel,
    batch: Batch,
    upload: Upload,
    logits: Callable[[Any, Batch, Upload], torch.Tensor],
    activation: Activation,
    softmax: bool,
) -> torch.Tensor:
    """float32 [texts or tokens, labels] on the model's device: the `Work.compute` of scores."""
    found = logits(model, batch, upload).float()
    made = activation(found)
    if not isinstance(made, torch.Tensor) or made.shape != found.shape:
        raise ValueError(f"activation_fn must keep the shape {list(found.shape)}; got {getattr(made, 'shape', made)}")
    return torch.softmax(made, dim=-1) if softmax else made.float()


def predict(model: PackedModel, texts: Any, work: Work, show_progress_bar: bool | None = None) -> Any:
    """float32 [n, labels], [n] for one label, or a list of float32 [tokens, labels]; of a single text or pair its own.
    See `ftbert.Model.predict`."""
    single = is_single(texts)
    listed: Sequence[Text] = [texts] if single else texts
    check_texts(listed, pairs=True)
    found = compute_all(model, listed, work, show_progress_bar)
    if work.parts is None and work.width == 1:
        found = found[:, 0]
    return found[0] if single else found


def token_classify(
    model: PackedModel,
    texts: Any,
    *,
    aggregation_strategy: str = "none",
    ignore_labels: Sequence[str] = IGNORED,
    max_length: int | None = None,
    show_progress_bar: bool | None = None,
    **sizes: Any,
) -> Any:
    """See `ftbert.Model.token_classify`. sizes: of a batch, for `scoring`."""
    one_of(STRATEGIES, "aggregation_strategy", aggregation_strategy)
    if isinstance(ignore_labels, str):
        raise TypeError(f"ignore_labels must be a list of labels; got the str {ignore_labels!r}")
    task, _ = task_of(model)
    if task != "token_classification":
        raise ValueError(f"token_classify needs a head for token classification, this one is for {task}: call predict")
    listed: Sequence[str] = [texts] if isinstance(texts, str) else texts
    check_texts(listed)
    tokenizer, config = tokenizer_of(model, scores=True), model.config
    reader = TokenLabels(tokenizer.backend, tokenizer.unknown_id, list(labels_of(model).values()))
    work = scoring(model, activation_fn=torch.nn.Identity(), prompt="", max_length=max_length, pairs=False, **sizes)

    def ids_of(encodings: Sequence[Any]) -> Tokens:
        return tokens_of([one.ids for one in encodings]).check(config.vocab, config.token_types)

    def windows() -> Iterator[tuple[Any, Sequence[Any]]]:
        for start in range(0, len(listed), _TEXTS_AT_ONCE):
            part = listed[start : start + _TEXTS_AT_ONCE]
            encodings = tokenizer.encodings(part, max_length)
            yield (part, encodings), encodings

    found: list[Any] = []
    progress = Progress(len(listed), show_progress_bar, label="token_classify")
    # Without threads: a GPU goes on with one window while the next is tokenised.
    work = replace(work, tokenise=ids_of)
    computed = compute_windows(model, windows(), work, on_batch=progress.add, threads=False)
    try:
        with contextlib.closing(computed):
            for done in computed:
                for text, encoding, logits in zip(*done.item, done.results, strict=True):
                    found.append(reader.entities(text, encoding, logits, aggregation_strategy, ignore_labels))
    finally:
        progress.close()
    return found[0] if isinstance(texts, str) else found


def to_rank(query: Any, texts: Iterable[str], top_k: Any) -> Sequence[str]:
    """The texts, listed; TypeError, ValueError for what cannot be ranked."""
    if not isinstance(query, str):
        raise TypeError(f"query must be a str; got {type(query).__name__}")
    given = listed(texts)
    check_texts([query])
    check_texts(given)
    if top_k is not None:
        positive("top_k", top_k)
    return given


def rank(
    scores: np.ndarray[Any, Any], texts: Sequence[str], top_k: int | None, return_documents: bool
) -> list[dict[str, Any]]:
    """Highest score first, equal ones in the order given; as CrossEncoder.rank."""
    found: list[dict[str, Any]] = []
    for place in np.argsort(-scores, kind="stable")[:top_k].tolist():
        found.append({"corpus_id": place, "score": float(scores[place])})
        if return_documents:
            found[-1]["text"] = texts[place]
    return found


def score_task(model: PackedModel, chat_template: str | None = None) -> tuple[str, int] | None:
    """What the model's scores are and how many labels they have: the task of its head, `LOGIT_SCORE` or `POOLED_SCORE`
    where its folder makes them of something else; None where it is for no scores.

    A language model is for scores where its folder has sentence-transformers' LogitScore, or a chat template for a
    query and a document, or the caller gives one, `chat_template`: a chat's model was not trained for them.
    """
    heads, speaks = model.heads, vocabulary_head(model) is not None
    if model.folder is not None and (speaks or not heads):
        text = TextSettings.for_scores(model.folder)
        score = text.logit_score if speaks else None
        if score is not None and (score.stated or chat_template is not None or _ranks(model)):
            return LOGIT_SCORE, 1
        if text.scored:
            return POOLED_SCORE, text.width(model.config.hidden)
    if heads and heads[0].task in _TASKS:
        return heads[0].task, len(heads[0].out_bias)
    return None


def gives_scores(model: PackedModel) -> bool:
    """Whether texts are read as its folder's scores ask for it: where it says nothing of vectors, and texts or pairs
    have scores."""
    if model.folder is None or tokenizer_of(model).settings.stated:
        return False
    found = score_task(model)
    return has_score_head(model) or (found is not None and found[0] != "token_classification")


def _ranks(model: PackedModel) -> bool:
    try:
        return tokenizer_of(model, scores=True).ranks
    except (ValueError, FileNotFoundError):  # whoever reads texts with it says so
        return False


def task_of(model: PackedModel, chat_template: str | None = None) -> tuple[str, int]:
    """`score_task`; ValueError where the model is for no scores."""
    if (found := score_task(model, chat_template)) is not None:
        return found
    named = ", ".join(head.task for head in model.heads) or "none"
    words = f"predict needs a head for {' or '.join(_TASKS)}; this model's heads: {named}"
    if vocabulary_head(model) == CAUSAL_LM:
        words += (
            ". A language model scores pairs where its folder has sentence-transformers' LogitScore, or a "
            "chat_template.jinja for the roles query and document; or pass chat_template, as examples/reranking.py does"
        )
    raise ValueError(words)


def labels_of(model: PackedModel) -> dict[int, str]:
    """id2label of the config where it fits the head, else transformers' default: LABEL_0, ..."""
    _, count = task_of(model)
    given = model.checkpoint.config.huggingface.get("id2label")
    if isinstance(given, dict):
        named = {int(key): str(name) for key, name in given.items() if str(key).isdecimal()}
        if sorted(named) == list(range(count)):
            return dict(sorted(named.items()))
    return {place: f"LABEL_{place}" for place in range(count)}


def _older_activation(config: Mapping[str, Any], where: str) -> Activation | None:
    """What config.json names, where config_sentence_transformers.json does not."""
    nested = config.get("sentence_transformers")
    if isinstance(nested, dict) and "activation_fn" in nested:
        name = nested["activation_fn"]
    else:
        name = config.get("sbert_ce_default_activation_function")
    return None if name is None else activation(name, f"{where}: activation_fn")
