"""What a folder says about the texts that its model writes, for processes that render prompts and decode tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ftbert.decoding.prompts import dropped, tokenizer_for
from ftbert.decoding.stated import stated
from ftbert.packed_model import PackedModel


@dataclass(frozen=True)
class FolderFacts:
    """template, names: of ChatTemplate; None without one. special, stop: of TextStream. bounded: the folder says how
    long a text is where its caller does not."""

    template: str | None
    names: Mapping[str, str]
    special: Mapping[int, str]
    stop: tuple[str, ...]
    bounded: bool


def facts_of_folder(model: PackedModel) -> FolderFacts:
    """ValueError for a model without a tokenizer."""
    tokenizer, said = tokenizer_for(model), stated(model)
    return FolderFacts(
        template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
        names={name: str(value) for name, value in tokenizer.special_tokens_map.items()},
        special=dropped(tokenizer),
        stop=said.stop,
        bounded=said.max_new_tokens is not None or said.max_length is not None,
    )
