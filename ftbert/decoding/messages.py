"""Conversations: messages as dicts with role and content, and the text that a chat template makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ftbert.input_file import is_unicode
from ftbert.text import ChatTemplate

Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
Prompt: TypeAlias = "str | Messages"


def listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """One prompt or several as a list of them: a list of messages is one. TypeError for a message alone."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise TypeError(f"prompts: a message alone is no prompt; pass a list of messages; got {prompts!r:.60}")
    given = list(prompts)
    return [given] if is_messages(given) else given


def is_messages(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


def check_messages(messages: Messages, name: str) -> None:
    """TypeError and ValueError say what a message has to be; other entries are the template's."""
    for at, message in enumerate(messages):
        where = f"{name}, message {at}"
        for key in ("role", "content"):
            if not isinstance(value := message.get(key), str):
                raise TypeError(f"{where}: expected {key!r}, a str; got {value!r}")
            if not is_unicode(value):
                raise ValueError(f"{where}: {key} is not valid Unicode: it holds a lone surrogate")


def rendered(tokenizer: Any, where: Any, messages: Messages, template: str | None) -> str:
    """As of ChatTemplate.render. template: Jinja, or the name of one of the tokenizer's; None: the tokenizer's.
    ValueError without one, or for messages that it does not take."""
    if template is None and not tokenizer.chat_template:
        raise ValueError(
            f"{where}: its tokenizer has no chat template; pass one as chat_template, or a text without chat"
        )
    try:
        return ChatTemplate(tokenizer.get_chat_template(template), tokenizer.special_tokens_map).render(messages)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
