"""Reads a Dockerfile as far as ours goes: stages with their instructions, and what a target inherits."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    line: int
    word: str  # "RUN", in upper case
    text: str  # what stands behind it, lines joined

    def command(self) -> list[str]:
        """Of ENTRYPOINT, CMD and VOLUME in the form of a list."""
        found: list[str] = json.loads(self.text)
        return found


@dataclass
class Stage:
    name: str
    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, word: str) -> Instruction:
        return [one for one in self.instructions if one.word == word][-1]


def instructions(text: str) -> Iterator[Instruction]:
    start, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if not joined and (not line.strip() or line.lstrip().startswith("#")):
            continue
        start = start or number
        joined += line.rstrip("\\").rstrip() + " " if line.endswith("\\") else line
        if not line.endswith("\\"):
            word, _, rest = joined.strip().partition(" ")
            yield Instruction(start, word.upper(), rest.strip())
            start, joined = 0, ""


def substituted(text: str, values: dict[str, str]) -> str:
    """${NAME} and $NAME, by the values that are known; others stay for the shell."""
    return re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], match[0]), text)


def stages(path: Path) -> dict[str, Stage]:
    """By name, in order. ValueError for an instruction ahead of FROM that is no ARG, or a stage without a name."""
    found: dict[str, Stage] = {}
    values: dict[str, str] = {}
    for one in instructions(path.read_text(encoding="utf-8")):
        if one.word == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", one.text)
            if match is None:
                raise ValueError(f"{path.name}:{one.line}: a stage without a name: {one.text}")
            found[match[2]] = Stage(match[2], substituted(match[1], values))
        elif found:
            next(reversed(found.values())).instructions.append(one)
        elif one.word == "ARG":
            name, _, value = one.text.partition("=")
            values[name] = value
        else:
            raise ValueError(f"{path.name}:{one.line}: {one.word} ahead of FROM")
    return found


def lineage(found: dict[str, Stage], target: str) -> list[Stage]:
    """The stages that a target is made on, the first one first; none for an image."""
    if target not in found:
        return []
    stage = found[target]
    return [*lineage(found, stage.base), stage]


def needed(found: dict[str, Stage], target: str) -> list[str]:
    """All stages for a target, each behind what it is made on or copies from."""
    order: list[str] = []
    for stage in lineage(found, target):
        for one in stage.instructions:
            if one.word == "COPY" and (source := re.match(r"--from=(\S+)", one.text)):
                order += [name for name in needed(found, source[1]) if name not in order]
        order += [stage.name] * (stage.name not in order)
    return order


def environment(found: dict[str, Stage], target: str) -> dict[str, str]:
    """What ENV has set when a target starts; $NAME is what was set before. PATH: an engine's own, if no ENV says it."""
    values = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    for stage in lineage(found, target):
        for one in stage.instructions:
            if one.word == "ENV":
                values |= {name: substituted(value, values) for name, _, value in (pair.partition("=") for pair in one.text.split())}
    return values


def ignored(path: str, patterns: str) -> bool:
    """Whether a .dockerignore leaves out a file: the last pattern that fits it, or a folder above it, counts."""
    out = False
    parts = [path, *(str(folder) for folder in Path(path).parents)]
    for line in patterns.splitlines():
        pattern = line.strip().removeprefix("!").removeprefix("**/")
        names = [part.rpartition("/")[2] for part in parts] if "**/" in line else parts
        if pattern and not pattern.startswith("#") and any(fnmatch.fnmatchcase(name, pattern) for name in names):
            out = not line.startswith("!")
    return out
