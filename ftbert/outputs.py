"""What Model returns: transformers' output class of the task, with the encoder's output beside the logits."""

from __future__ import annotations

from dataclasses import make_dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ftbert.checkpoint import POOLED, TEXT_EMBEDS

# task -> transformers' class, where there is one.
_CLASSES = {
    "sequence_classification": "SequenceClassifierOutput",
    "token_classification": "TokenClassifierOutput",
    "question_answering": "QuestionAnsweringModelOutput",
    "masked_lm": "MaskedLMOutput",
    "multiple_choice": "MultipleChoiceModelOutput",
    "next_sentence": "NextSentencePredictorOutput",
    POOLED: "BaseModelOutputWithPooling",
}
# What transformers' pretraining outputs call the second head's logits; the first are prediction_logits.
_SECOND = {"next_sentence": "seq_relationship_logits", "sentence_order": "sop_logits"}


@cache
def _output_class(task: str) -> type:
    """transformers' class plus last_hidden_state and pooler_output (and what else heads give), all optional."""
    from transformers import modeling_outputs
    from transformers.utils.generic import ModelOutput

    base = getattr(modeling_outputs, _CLASSES.get(task, "-"), ModelOutput)
    known = {field for one in base.__mro__ for field in getattr(one, "__dataclass_fields__", {})}
    more = ("logits", "last_hidden_state", "pooler_output", "hidden_states", "prediction_logits", *_SECOND.values())
    extra = (TEXT_EMBEDS, *more)
    return make_dataclass(
        base.__name__ if task in _CLASSES else "HeadOutput",
        [(name, "Any", None) for name in extra if name not in known],
        bases=(base,),
        namespace={"__reduce__": lambda self: (_restored, (task, dict(self)))},  # no module holds the class
    )


def _restored(task: str, fields: dict[str, Any]) -> Any:
    return _output_class(task)(**fields)


def output(
    tasks: list[str],
    hidden: Tensor | None,
    pooled: Tensor | None,
    logits: list[Tensor],
    states: tuple[Tensor, ...] | None = None,
) -> Any:
    """tasks and logits: of each head. states: of every layer."""
    made = dict(zip(tasks, logits, strict=True))
    if (read := made.get(POOLED)) is not None:
        kind, embeds = (TEXT_EMBEDS if TEXT_EMBEDS in made else POOLED), {TEXT_EMBEDS: made.get(TEXT_EMBEDS)}
        return _output_class(kind)(last_hidden_state=hidden, hidden_states=states, pooler_output=read, **embeds)
    first = logits[0]
    if tasks[0] == "replaced_token":
        first = first.squeeze(-1)
    found: dict[str, Any] = {"logits": first, "last_hidden_state": hidden, "pooler_output": pooled}
    found["hidden_states"] = states
    if tasks[0] == "question_answering":
        starts, ends = first[..., :2].unbind(-1)
        found |= {"start_logits": starts.contiguous(), "end_logits": ends.contiguous()}
    if len(tasks) > 1:
        found |= {"prediction_logits": first, _SECOND[tasks[1]]: logits[1]}
    return _output_class(tasks[0])(**found)
