"""A request's own instruction, `instruct` or `instruction`: what is searched for, for the folder's words."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from ftbert.server.description import Description
from ftbert.server.errors import ApiError, validation

# It stands before each text of a request: 2048 texts of it are 16 MB.
_LONGEST = 8192
# Where prompts describe a task: Qwen3-Embedding, e5-instruct and their kin; Qwen3-Reranker; bge-en-icl; EmbeddingGemma.
_PLACES = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"Instruct: ?(.*?)\n ?Query:", r"<Instruct>: ?(.*?)\n ?<Query>:", r"<instruct>(.*?)\n ?<query>",
        r"\btask: (.*?) \| query:",
    )
]  # fmt: skip


class Instructed(Protocol):
    """A body."""

    instruct: str | None
    instruction: str | None


class Instruction(NamedTuple):
    """name: of the field that has it."""

    name: str
    text: str

    def refused(self, why: str) -> ApiError:
        return validation(f"`{self.name}` is not supported: {why}", param=self.name)


def instruction_of(asked: Instructed) -> Instruction | None:
    """None without one, or for an empty one. ApiError 422 for two, and for a long one."""
    more = getattr(asked, "chat_template_kwargs", None) or {}
    for name in more.keys() - {"instruction"}:
        words = f"`chat_template_kwargs` may have `instruction` alone; got {name[:40]!r}"
        raise validation(words, param="chat_template_kwargs")
    named = (("instruct", asked.instruct), ("instruction", asked.instruction),
             ("chat_template_kwargs", more.get("instruction")))  # fmt: skip
    given = [Instruction(name, text) for name, text in named if text]
    if len({one.text for one in given}) > 1:
        names = " and ".join(f"`{one.name}`" for one in given)
        raise validation(f"{names} differ; give one of them", param=given[-1].name)
    for name, text in given:
        if len(text) > _LONGEST:
            words = f"`{name}` must have at most {_LONGEST} characters; got {len(text)}"
            raise validation(words, param=name)
    return given[0] if given else None


def instructed_prompt(about: Description, instruction: Instruction, chosen: str | None = None) -> str:
    """`chosen`, the prompt for these texts, with this description of the task; None: the first of the folder's that
    has one, those for queries ahead. ApiError 422 where none has."""
    text = about.text
    known = [text.default_prompt, text.prompts.get("query", ""), *text.prompts.values()] if chosen is None else [chosen]
    for prompt in known:
        for place in _PLACES:
            if (found := place.search(prompt)) is not None:
                start, end = found.span(1)
                return prompt[:start] + instruction.text + prompt[end:]
    which = "no template or prompt of this model has a" if chosen is None else "the prompt for these texts has no"
    raise instruction.refused(f"{which} place for one, as 'Instruct: ...\\nQuery: ' has")
