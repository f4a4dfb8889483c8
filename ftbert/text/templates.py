"""Pairs of texts through a chat template, for models that score a pair by what they would say next (rerankers made of
language models). Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ftbert.text.cutting import Cutter
from ftbert.text.pairs import first_ids
from ftbert.text.tokens import Tokens, tokens_of

# What a template that only places its texts leaves as it is.
_PROBES = (("  spaced  out ", "\n\nlines\n"), ("{{ x }}<b>&amp;'\"", "# é\u3000漢字\t|"))
_QUERY, _DOCUMENT = "a question of ftbert", "a document of ftbert"
INSTRUCTION = "an instruction of ftbert"  # stands where a template puts the system's message
_ROLES, _OTHER_ROLES = ("query", "document"), ("firsthalf", "secondhalf")

# The roles of two messages and their contents to a text.
Render = Callable[[tuple[str, str], str, str], str]
# Texts that are tokenised differently: what both renderings end in is the template's.
_FILLERS = (("0", "0"), ("1 2 3 4", "1 2 3 4"))


@dataclass(frozen=True)
class PairTemplate:
    """before + query + between + document + behind; with `swapped` the document comes first."""

    before: str
    between: str
    behind: str
    swapped: bool = False

    @classmethod
    def of(cls, render: Render, where: str) -> PairTemplate:
        """ValueError where the text does not hold query and document, once and as they are."""
        whole = render(_ROLES, _QUERY, _DOCUMENT)
        if whole.count(_QUERY) != 1 or whole.count(_DOCUMENT) != 1:
            raise ValueError(
                f"{where}: the chat template cannot carry a pair: it must write the content of a message of role "
                "'query' and of one of role 'document', each once. Put one that does into the folder as "
                "chat_template.jinja, or pass chat_template"
            )
        swapped = whole.index(_QUERY) > whole.index(_DOCUMENT)
        first, second = (_DOCUMENT, _QUERY) if swapped else (_QUERY, _DOCUMENT)
        before, rest = whole.split(first)
        between, behind = rest.split(second)
        found = cls(before, between, behind, swapped)
        if any(found.text(*pair) != render(_ROLES, *pair) for pair in _PROBES):
            raise ValueError(f"{where}: the chat template changes the texts that it places, which is not supported")
        return found

    def instructed(self, instruction: str) -> PairTemplate | None:
        """With that in the place of `INSTRUCTION`, where it stands once; None where it does not."""
        parts = (self.before, self.between, self.behind)
        if sum(part.count(INSTRUCTION) for part in parts) != 1:
            return None
        before, between, behind = (part.replace(INSTRUCTION, instruction) for part in parts)
        return PairTemplate(before, between, behind, self.swapped)

    def text(self, query: str, document: str) -> str:
        first, second = (document, query) if self.swapped else (query, document)
        return f"{self.before}{first}{self.between}{second}{self.behind}"


def takes_any_roles(render: Render) -> bool:
    """Whether the template renders any two roles as it does query and document, but for their names. Templates of chats
    do; they say nothing of pairs. Raises what `render` does for a query and a document."""
    pair = render(_ROLES, _QUERY, _DOCUMENT).lower()
    try:
        others = render(_OTHER_ROLES, _QUERY, _DOCUMENT).lower()
    except Exception:  # noqa: BLE001 - of Jinja, or of the template itself
        return False
    for other, role in zip(_OTHER_ROLES, _ROLES, strict=True):
        others = others.replace(other, role)
    return pair == others


class TemplateEncoder:
    """Thread-safe."""

    def __init__(self, fast: Any, cutter: Cutter | None) -> None:
        """fast: a `tokenizers.Tokenizer` that does not truncate."""
        self._fast, self._cutter = fast, cutter
        self._ends: dict[PairTemplate, list[int]] = {}

    def tokens(self, pairs: Sequence[Any], length: int, side: str, *, template: PairTemplate) -> Tokens:
        """Without special tokens but the template's own. Of what is longer than `length` the tokens on `side` are
        dropped, and the last ones are the template's end. Raises what `tokenizers` does."""
        texts = [template.text(*pair) for pair in pairs]
        found = first_ids(self._fast, self._cutter, set(texts), length, side)
        rows = []
        for row in (found[text] for text in texts):
            if len(row) == length and (end := self._end(template)):
                row = [*row[: -len(end)], *end][-length:]
            rows.append(row)
        return tokens_of(rows)

    def _end(self, template: PairTemplate) -> list[int]:
        """Ids that every text of the template ends in."""
        if template not in self._ends:
            encoded = self._fast.encode_batch_fast([template.text(*one) for one in _FILLERS], add_special_tokens=False)
            first, second = (one.ids for one in encoded)
            same = 0
            while same < min(len(first), len(second)) and first[-1 - same] == second[-1 - same]:
                same += 1
            self._ends[template] = first[len(first) - same :] if same < min(len(first), len(second)) else []
        return self._ends[template]
