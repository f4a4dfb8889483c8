"""What a model's tokenizer says about prompts: their ids, its chat template, and which tokens end a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftbert.decoding.messages import Prompt, check_messages, is_messages, rendered
from ftbert.input_file import is_unicode, origin
from ftbert.packed_model import PackedModel, kept
from ftbert.text import loaded_tokenizer


def tokenizer_for(model: PackedModel) -> Any:
    """transformers' tokenizer of the model's folder, built once. ValueError for a live model, which has none."""
    if model.folder is None:
        raise ValueError(
            "this model has no folder with a tokenizer, so it cannot take text; load it from a folder, or pass "
            "token ids to generate_ids"
        )
    return loaded_tokenizer(model, model.folder)


def encoded(model: PackedModel, prompts: Sequence[Prompt], chat: bool, template: str | None = None) -> list[list[int]]:
    """Texts, or messages in the chat template, to ids. chat: a text is a user's message. template: see `rendered`; with
    one chat is meant. ValueError for a prompt that is empty or not valid Unicode, or as of `rendered`; TypeError for
    what is neither."""
    tokenizer = tokenizer_for(model)
    assert model.folder is not None
    where, found = origin(model.folder), []
    for place, prompt in enumerate(prompts):
        name = f"prompt {place}"
        if not isinstance(prompt, str) and not is_messages(prompt):
            wanted = "a str, or a list of messages (dicts of role and content)"
            raise TypeError(f"{name}: expected {wanted}; got {prompt!r:.60}")
        if not prompt:
            raise ValueError(f"{name} is empty")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if isinstance(prompt, str) and not is_unicode(prompt):
            raise ValueError(f"{name} is not valid Unicode: it holds a lone surrogate")
        if isinstance(prompt, str) and not chat and template is None:
            found.append(list(tokenizer(prompt)["input_ids"]))
            continue
        check_messages(messages, name)
        text = rendered(tokenizer, where, messages, template)
        found.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))  # the template has them
    return found


def dropped(tokenizer: Any) -> Mapping[int, str]:
    """The special tokens, which `decode` leaves out, and how they are spelled."""

    def read() -> dict[int, str]:
        named = {place: token.content for place, token in tokenizer.added_tokens_decoder.items() if token.special}
        named |= {place: tokenizer.convert_ids_to_tokens(place) for place in tokenizer.all_special_ids}
        return {place: text for place, text in named.items() if not tokenizer.decode([place], skip_special_tokens=True)}

    return kept(tokenizer, "dropped tokens", read)


# How tokens that end a turn or a text are spelled in the vocabularies of common models. Files and configs often name
# one of them alone, as that of texts where a chat's turns end with another.
_ENDS = frozenset(
    {
        "</s>", "<eos>", "<EOT>", "<|EOT|>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>",
        "<|eom_id|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|end_of_turn|>",
    }
)  # fmt: skip


def spelled_ends(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's special tokens that are spelled as ends of turns and texts are."""
    return frozenset(
        place for place, token in tokenizer.added_tokens_decoder.items() if token.special and token.content in _ENDS
    )
