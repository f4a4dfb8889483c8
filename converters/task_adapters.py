"""Models with an adapter for each task, by the task's name: it is merged into the base's weights as these are read.

jina-embeddings-v3 has LoRA parametrisations of all tasks among its tensors. The formula is that of LoRAParametrization
in modeling_lora.py of jinaai/xlm-roberta-flash-implementation. jina-embeddings-v5 has a folder of PEFT's for each task
beside the weights, and so has what PEFT saves of several adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import Checkpoint, Shape, TensorSource, complaint, exists, list_folder, shown
from ftbert.converters.adapters import ADAPTER, AdaptedSource, Adapter
from ftbert.converters.families import find_family
from ftbert.converters.family import Config, entry

FOLDER = "adapters"  # of jina-embeddings-v5
_PART = re.compile(r"(.+)\.parametrizations\.weight\.(original|0\.lora_A|0\.lora_B)")
_TABLE = re.compile(r"(^|\.)\w+_embeddings$")

Recognise = Callable[[TensorSource], Checkpoint]


class Parametrised(TensorSource):
    """The tensors of `base` by their plain names, with the LoRA of one task folded in, or of none: W + B A * alpha /
    rank, of a table W + A B * alpha / rank, in float32."""

    def __init__(self, base: TensorSource, tasks: Sequence[str], scale: float, task: str = "") -> None:
        """ValueError lists modules without all three parts, and parts that do not fit."""
        self._base, self._scale, self._task = base, scale, task
        self._index = tasks.index(task) if task else -1
        self.where, self.files = base.where, base.files
        self._shapes = base.shapes()
        self._parts: dict[str, dict[str, str]] = {}  # by the plain name of the weight
        for name in self._shapes:
            if found := _PART.fullmatch(name):
                self._parts.setdefault(f"{found[1]}.weight", {})[found[2].removeprefix("0.")] = name
        problems = [problem for weight in self._parts if (problem := self._check(weight, len(tasks)))]
        if problems:
            raise ValueError(complaint(f"{self.where}: the adapters of {len(tasks)} tasks do not fit", problems))

    def _check(self, weight: str, tasks: int) -> str:
        parts = self._parts[weight]
        if missing := sorted({"original", "lora_A", "lora_B"} - parts.keys()):
            return f"{weight}: {missing[0]} is missing"
        a, b, whole = (self._shapes[parts[kind]] for kind in ("lora_A", "lora_B", "original"))
        if len(a) != 3 or len(b) != 3 or a[0] != tasks or b[0] != tasks:
            return f"{weight}: lora_A {list(a)} and lora_B {list(b)}: expected [{tasks}, ...] with two more sizes each"
        (left, right) = (a, b) if _TABLE.search(weight.removesuffix(".weight")) else (b, a)
        if (left[1], right[2]) != tuple(whole) or left[2] != right[1]:
            return f"{weight}: lora_A {list(a)} and lora_B {list(b)} do not make {list(whole)}"
        return ""

    def shapes(self) -> dict[str, Shape]:
        plain = {name: shape for name, shape in self._shapes.items() if not _PART.fullmatch(name)}
        return plain | {weight: self._shapes[parts["original"]] for weight, parts in self._parts.items()}

    def read(self, name: str) -> torch.Tensor:
        if (parts := self._parts.get(name)) is None:
            return self._base.read(name)
        whole = self._base.read(parts["original"])
        if self._index < 0:
            return whole
        a, b = (self._base.read(parts[kind])[self._index].float() for kind in ("lora_A", "lora_B"))
        product = a @ b if _TABLE.search(name.removesuffix(".weight")) else b @ a
        return whole.float() + product * self._scale

    def told(self) -> dict[str, str]:
        return {**self._base.told(), **({"task": self._task} if self._task else {})}


@dataclass(frozen=True, eq=False)
class Tasks(Mapping[str, Callable[[], Checkpoint]]):
    """What opens the model at each task, by name. tensors: of the base; scale: of products of parametrisations;
    folders: of PEFT's adapters, {} where the tensors hold all tasks. bare: the model is one without a task, too."""

    names: tuple[str, ...]
    recognise: Recognise
    tensors: TensorSource
    scale: float = 1.0
    folders: Mapping[str, Path] = field(default_factory=dict)
    prefixes: Sequence[str] = ()
    verify: bool = True
    bare: bool = True

    def __getitem__(self, name: str) -> Callable[[], Checkpoint]:
        if name not in self.names:
            raise KeyError(name)
        return partial(self.opened, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def opened(self, task: str = "") -> Checkpoint:
        """At a task, "" for the base's own weights. ValueError for an adapter that is not of this base."""
        if not self.folders:
            source: TensorSource = Parametrised(self.tensors, self.names, self.scale, task)
        elif task:
            source = AdaptedSource(self.tensors, Adapter.read(self.folders[task]), self.prefixes, self.verify)
        else:
            source = self.tensors
        return replace(self.recognise(source), tasks=self, task=task, bare=self.bare)


def with_tasks(document: Config, tensors: TensorSource, home: Path, recognise: Recognise, verify: bool) -> Checkpoint:
    """The checkpoint of these tensors, with its tasks where the files hold adapters for some. home: of the weights.
    document: as `read_config` gives it. ValueError for adapters that are none of the base's."""
    try:
        in_one = any(_PART.fullmatch(name) for name in tensors.shapes())
        names, scale = _adaptations(document) if in_one else ([], 1.0)
        folders = {} if in_one else _folders(document, home)
    except ValueError as error:
        raise ValueError(f"{home / 'config.json'}: {error}") from error
    if in_one:
        return Tasks(tuple(names), recognise, tensors, scale).opened()
    if not folders:
        return recognise(tensors)
    bare = not isinstance(document.get("task_names"), list)  # whose own code asks for a task
    prefixes = find_family(document).prefixes
    return Tasks(tuple(folders), recognise, tensors, 1.0, folders, prefixes, verify, bare).opened()


def _adaptations(document: Config) -> tuple[list[str], float]:
    """Names of tasks, and what their products are multiplied with."""
    tasks = document.get("lora_adaptations")
    if not isinstance(tasks, list) or not tasks or len(set(map(str, tasks))) != len(tasks):
        raise ValueError(f"lora_adaptations {shown(tasks)}: expected names of tasks, as the tensors have adapters for")
    if (rank := entry(document, "lora_rank", "int", 4)) < 1:
        raise ValueError(f"lora_rank {rank}: expected at least 1")
    return [str(task) for task in tasks], entry(document, "lora_alpha", "float", 1.0) / rank


def _folders(document: Config, home: Path) -> dict[str, Path]:
    """Of adapters beside the weights, by the names of their tasks: those that the config names, in its order, and all
    others but those of a training's steps."""
    files = [f"{around}{name}/{ADAPTER}" for around in (f"{FOLDER}/", "") if exists(home / around)
             for name in sorted(list_folder(home / around))]  # fmt: skip
    found: dict[str, Path] = {}
    for place in adapter_places([name for name in files if exists(home / name)]):
        found.setdefault(Path(place).name, home / place)
    listed: Any = document.get("task_names")
    named = [str(name) for name in listed] if isinstance(listed, list) else []
    if missing := [name for name in named if name not in found]:
        raise ValueError(f"task_names has {missing[0]!r}, and there is no {FOLDER}/{missing[0]}/{ADAPTER}")
    return {name: found[name] for name in dict.fromkeys((*named, *found))}


def adapter_places(files: Sequence[str], home: str = ".") -> list[str]:
    """Of a repository's or folder's files the folders with an adapter for a task, of a model in `home`: those in
    "adapters", then others; none of a training's steps."""
    around = "" if home == "." else re.escape(f"{home}/")
    pattern = re.compile(rf"({around}({FOLDER}/)?(?!checkpoint-)[^/]+)/{re.escape(ADAPTER)}")
    found = (match[1] for name in files if (match := pattern.fullmatch(name)))
    return sorted(found, key=lambda place: f"{FOLDER}/" not in place)
