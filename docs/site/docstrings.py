"""An extension of griffe: a docstring's "name: meaning" becomes an item of a list where the function has that name, and
"docs/x.md" a link to that page."""

from __future__ import annotations

import re
from typing import Any

import griffe


def listed(text: str, names: set[str]) -> str:
    """A paragraph of a docstring with an item for each argument that it explains: "device: the place. dtype: ..."."""
    text = " ".join(text.split())
    starts = [
        match
        for match in re.finditer(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ", text)
        if names.issuperset(match[1].split(", "))
    ]
    if not starts:
        return text
    ends = [match.start() for match in starts[1:]] + [len(text)]
    items = [
        f"- {', '.join(f'`{name}`' for name in match[1].split(', '))}: {text[match.end() : end].strip()}"
        for match, end in zip(starts, ends, strict=True)
    ]
    return "\n".join([*([text[: starts[0].start()].strip(), ""] if starts[0].start() else []), *items])


class Arguments(griffe.Extension):  # type: ignore[misc]
    def on_function(self, *, func: Any, **_: Any) -> None:
        self._list(func, {parameter.name.lstrip("*") for parameter in func.parameters})

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        self._list(cls, {name for name, member in cls.members.items() if member.kind is griffe.Kind.ATTRIBUTE})

    def _list(self, described: Any, names: set[str]) -> None:
        if described.docstring is None:
            return
        paragraphs = re.split(r"\n\s*\n", described.docstring.value)
        if any(line.startswith((" ", "-", "|")) for part in paragraphs for line in part.split("\n")[1:]):
            return  # a list or an example already
        text = "\n\n".join(listed(paragraph, names) for paragraph in paragraphs)
        described.docstring.value = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.html)", text)
