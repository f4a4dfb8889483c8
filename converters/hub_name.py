"""What a name of the hub stands for: a repository, or a .gguf file in one.

org/repo:Q8_0 is the file of that type, as llama.cpp and Ollama write it, org/repo/file.gguf the file of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

_SITES = ("https://huggingface.co/", "huggingface.co/", "hf.co/")
_PAGE = re.compile(r"(blob|resolve)/main/")  # in the address of a file
_WEIGHTS = ("*.safetensors", "*.bin")
_NO_MODEL = re.compile("mmproj|imatrix", re.IGNORECASE)  # what reads images, and what quantised a model
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_MOST_PARTS = 10_000
_MOST = 20  # names shown


def is_gguf(name: str | Path) -> bool:
    return str(name).lower().endswith(".gguf")


@dataclass(frozen=True)
class Part:
    """One of the files of a model that is split, by its name: NAME-00001-of-00003.gguf."""

    stem: str
    number: int
    count: int
    ending: str

    @classmethod
    def of(cls, name: str) -> Part | None:
        """None for a name that is no part's, whatever its file says."""
        match = _PART.fullmatch(name)
        if match is None or not 1 <= int(match[2]) <= int(match[3]) <= _MOST_PARTS:
            return None
        return cls(match[1], int(match[2]), int(match[3]), match[4])

    def names(self) -> list[str]:
        """Of all parts, the first one first."""
        return [f"{self.stem}-{i + 1:05d}-of-{self.count:05d}{self.ending}" for i in range(self.count)]


def parts_of(name: str) -> list[str]:
    """The names of all files of the model that a .gguf file is or belongs to."""
    part = Part.of(name)
    return [name] if part is None else part.names()


def one_of_each(names: Iterable[str]) -> list[str]:
    """Of .gguf files those that are whole, and of each model in parts the first that is there."""
    found: dict[str, str] = {}
    for name in sorted(names):
        found.setdefault(parts_of(name)[0], name)
    return list(found.values())


@dataclass(frozen=True)
class HubName:
    """file: its path in the repository, or a pattern of that or of its name. type: of its weights, "Q8_0"."""

    repository: str
    file: str = ""
    type: str = ""

    @classmethod
    def of(cls, source: str, filename: str | None = None) -> HubName | None:
        """None for what can be no name of the hub. filename: as `file`, beside a repository alone; else ValueError."""
        name = next((source[len(site) :] for site in _SITES if source.startswith(site)), source)
        parts = name.split("/")
        if name.startswith((".", "~")) or not all(parts):
            return None
        if is_gguf(name):
            file = "/".join(parts[2:])
            file = file if name == source else _PAGE.sub("", file, count=1)
            found = cls("/".join(parts[:2]), file) if file else None
        else:
            repository, _, kind = name.partition(":")
            found = cls(repository, type=kind) if len(parts) < 3 else None
        if filename is None or found is None:
            return found
        if found.file or found.type:
            raise ValueError(f"filename {filename!r}: {source} names a file by itself")
        return replace(found, file=filename)

    def choose(self, files: Iterable[str]) -> str | None:
        """Of the repository's files the one that is meant, None for a model in HuggingFace's files. FileNotFoundError
        lists the .gguf files where none is, ValueError where several are."""
        names = sorted(files)
        held = [name for name in names if is_gguf(name) and not _NO_MODEL.search(name)]
        if self.file:
            found, wanted = [name for name in held if self._matches(name)], f"file {self.file!r}"
        elif self.type:
            found, wanted = [name for name in held if self._is_of_type(name)], f"file of type {self.type!r}"
        elif not held or any(fnmatchcase(PurePosixPath(name).name, one) for name in names for one in _WEIGHTS):
            return None
        else:
            found, wanted = held, "single .gguf file"
        if self.file in found:
            return self.file
        found = one_of_each(found)
        if len(found) == 1:
            return found[0]
        listed = ", ".join((found or held or names)[:_MOST]) or "nothing"
        if found:
            one = f"{self.repository}/{found[0]}"
            raise ValueError(f"{self.repository}: several GGUF files ({listed}); name one of them: {one}")
        has = "its .gguf files are" if held else "it holds no .gguf file of a model but"
        raise FileNotFoundError(f"{self.repository}: no {wanted} there; {has} {listed}")

    def _matches(self, name: str) -> bool:
        wanted, path = self.file.lower(), name.lower()
        return fnmatchcase(path, wanted) or fnmatchcase(PurePosixPath(path).name, wanted)

    def _is_of_type(self, name: str) -> bool:
        """model-Q8_0.gguf, model.q8_0.gguf, Q8_0/model-Q8_0-00001-of-00002.gguf"""
        kind = re.escape(self.type)
        return re.search(rf"(^|[-._/]){kind}([-./]|$)", name[: -len(".gguf")], re.IGNORECASE) is not None
