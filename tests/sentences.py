"""Finds sentences that have to be read twice: `python tests/sentences.py` prints them, and exits with 1 if there are any.

In comments, docstrings and pages a sentence of more than 18 words has no three pronouns in the place of nouns. Nouns and
numbers, the subject first, make two sentences of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "ftbert", "converters", "tests", "benchmarks", "examples", "docs")
WORDS, PRONOUNS = 18, 3
PRONOUN = re.compile(r"\b(?:what|those|the others|of the latter|one|which)\b", re.IGNORECASE)
ITEM = r"\s*([-*#]\s|\d+\.\s|\w+ {2})"  # of a list; "name  what it is" too
END = r"(?<=[.!?])[)\"]?\s+(?=[A-Z0-9`(\"]|[\w, ]+:)"  # of a sentence
Line = tuple[int, str]


def comments(source: str, mark: str) -> Iterator[Line]:
    """The text behind the mark; "" where a comment stands behind code, so that it is not joined with the line above."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.match(rf"(.*?)(?:^|\s){mark}+ (.*)", line):
            if found[1].strip():
                yield number, ""
            yield number, found[2]


def docstrings(source: str) -> Iterator[Line]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            yield from enumerate([*text.splitlines(), ""], node.body[0].lineno) if text else ()


def prose(source: str) -> Iterator[Line]:
    """Of Markdown: no blocks of code, no tables."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        yield number, "" if code or line.startswith("|") else line


def sentences(lines: Iterable[Line]) -> Iterator[Line]:
    """With the line where the passage begins: lines that follow each other, up to an empty one, a heading or an item."""
    passages: list[tuple[int, list[str]]] = []
    last = 0
    for number, text in lines:
        if number not in (last, last + 1) or not text.strip() or re.match(ITEM, text):
            passages.append((number, []))
        if passages:
            passages[-1][1].append(text)
        last = number
    for first, texts in passages:
        for sentence in re.split(END, " ".join(" ".join(texts).split())):
            yield first, sentence


def wrong(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        lines = [*prose(source)]
    elif path.suffix == ".py":
        lines = [*comments(source, "#"), (-1, ""), *docstrings(source)]
    else:
        lines = [*comments(source, "//")]
    for line, text in sentences(lines):
        if len(text.split()) > WORDS and len(found := PRONOUN.findall(text)) >= PRONOUNS:
            yield f"{path}:{line}: {', '.join(found)}: {text}"


def main() -> int:
    files = [path for path in ROOT.glob("*.*") if path.suffix in (".md", ".py")]
    for folder in FOLDERS:
        files += [p for p in (ROOT / folder).rglob("*.*") if p.suffix in (".md", ".py", ".h", ".cpp", ".cu", ".cuh")]
    found = [words for path in sorted(files) for words in wrong(path)]
    print("\n".join(found) or f"sentences: {len(files)} files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
