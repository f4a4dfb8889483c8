"""The pages of the repository, and what stands in them: snippets, links, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Snippet:
    """A block of code. not_run: the reason that the line above it gives, or ""."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(path: Path) -> Iterator[Snippet]:
    start, language, reason, above, lines = 0, "", "", "", list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif start:
            yield Snippet(path.name, start, language, "\n".join(lines) + "\n", reason)
            start = 0
        else:
            found = NOT_RUN.fullmatch(above)
            start, language, reason, lines = number, line.strip("`").strip(), found[1] if found else "", []
        above = line
    assert not start, f"{path.name}:{start}: a block of code without an end"


def prose(path: Path) -> str:
    """Without blocks of code and what stands in backticks."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "``", text)


def links(path: Path) -> list[str]:
    return [match[1] for match in re.finditer(r"\]\(([^)\s]+)\)", prose(path))]


def anchors(path: Path) -> set[str]:
    """Of headings, as GitHub and Python-Markdown make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
