"""PEFT's LoRA adapters, merged into the weights of their base as these are read: W + scale * B A, of DoRA with its rows
brought to their magnitudes; all in float32.

The formulas are those of peft's tuners/lora (layer.py, dora.py) for linear layers and embeddings, the names those of
its utils/save_and_load.py. What else an adapter_config.json asks for is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import (
    MODULES,
    Shape,
    TensorSource,
    complaint,
    exists,
    find_weights,
    list_folder,
    open_adapter,
    read_json_object,
    shown,
    transformer_folder,
)

ADAPTER = "adapter_config.json"
_PREFIX = "base_model.model."
# Entries that say nothing of the numbers, or that `Adapter` reads.
_READ = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
# Ways to begin that change the base itself: the adapter alone is not the difference.
_CHANGE_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
# LoRA's tensors of a module, by their endings.
_PARTS = {
    "lora_A.weight": "A", "lora_B.weight": "B", "lora_B.bias": "bias", "lora_embedding_A": "row_A",
    "lora_embedding_B": "row_B", "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_HEADS = {
    "SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
}  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """An adapter_config.json. base: what it is for, as it names it; revision: of that."""

    where: Path
    base: str
    revision: str | None
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    root: bool  # scale by the root of the rank
    targets: Sequence[str] | str
    whole: bool  # all modules that targets name have parts
    saved: tuple[str, ...]
    biases: bool
    task: str

    @classmethod
    def read(cls, folder: Path) -> Adapter:
        """ValueError for another type, or an entry that changes numbers in a way that is not computed."""
        where = folder / ADAPTER
        said = read_json_object(where)
        if (kind := said.get("peft_type")) != "LORA":
            raise ValueError(f"{where}: peft_type {shown(kind)} is not supported: only 'LORA'")
        if unknown := sorted(key for key, value in said.items() if value and key not in _READ):
            raise ValueError(f"{where}: {unknown[0]} {shown(said[unknown[0]])} is not supported")
        begun = said.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGE_THE_BASE):
            raise ValueError(
                f"{where}: init_lora_weights {begun!r} is not supported: it changes the base, too; save the adapter "
                "with peft's path_initial_model_for_weight_conversion"
            )
        bias = said.get("bias", "none")
        if bias not in ("none", "all", "lora_only"):
            raise ValueError(f"{where}: bias {shown(bias)} is not supported: none, all or lora_only")
        for key in ("rank_pattern", "alpha_pattern"):
            if not isinstance(said.get(key) or {}, dict):
                raise ValueError(f"{where}: {key} must be an object; got {shown(said[key])}")
        base, targets = said.get("base_model_name_or_path"), said.get("target_modules")
        if not isinstance(targets, str | list | None):
            raise ValueError(f"{where}: target_modules must be names or a pattern; got {shown(targets)}")
        saved = said.get("modules_to_save") or []
        chosen = said.get("layers_to_transform") is not None or bool(said.get("exclude_modules"))
        return cls(
            where, base if isinstance(base, str) else "", said.get("revision"), _count(where, said, "r"),
            _number(where, said.get("lora_alpha"), "lora_alpha"), said.get("rank_pattern") or {},
            said.get("alpha_pattern") or {}, bool(said.get("use_rslora")), targets or [],
            isinstance(targets, list) and not chosen, tuple(map(str, saved)), bias != "none",
            str(said.get("task_type") or ""),
        )  # fmt: skip

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale(self, module: str) -> float:
        alpha = _number(self.where, _by_pattern(self.alphas, module, self.alpha), "alpha_pattern")
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root else rank)

    def document(self, base: dict[str, Any]) -> dict[str, Any]:
        """The base's config with the class that the adapter was trained for, where that has a head of its own."""
        if self.task not in _HEADS:
            return base
        stem = str(base.get("model_type")).replace("-", "").replace("_", "").capitalize()
        return {key: value for key, value in base.items() if key != "auto_map"} | {
            "architectures": [stem + _HEADS[self.task]]
        }


@dataclass
class _Module:
    """What an adapter holds for one module: tensors by `_PARTS`. name: as the adapter has it."""

    name: str
    parts: dict[str, str] = field(default_factory=dict)


class AdaptedSource(TensorSource):
    """The tensors of `base` with an adapter's folded in."""

    def __init__(self, base: TensorSource, adapter: Adapter, prefixes: Sequence[str], verify: bool = True) -> None:
        """prefixes: before the encoder's names, in the base's or the adapter's. ValueError lists the tensors that do
        not fit: of modules that the base lacks, of other sizes, halves of pairs, modules without any, and what is no
        part of an adapter."""
        self._base, self._adapter, self._own = base, adapter, open_adapter(adapter.where.parent, verify)
        self.where, self.files = self._own.where, (*base.files, *self._own.files)
        self._prefixes = prefixes
        self._base_shapes, self._shapes = base.shapes(), self._own.shapes()
        self._modules: dict[str, _Module] = {}  # by the name of the weight in the base
        self._replaced: dict[str, str] = {}  # the base's name, or a new one -> the adapter's
        problems: list[str] = []
        for name in self._shapes:
            if problem := self._take(name):
                problems.append(f"{name}: {problem}")
        for weight, module in self._modules.items():
            problems += self._check(weight, module)
        problems += self._missing()
        if problems:
            raise ValueError(complaint(f"{self.where}: the adapter does not fit its base, {base.where}", problems))

    def shapes(self) -> dict[str, Shape]:
        return self._base_shapes | {name: self._shapes[own] for name, own in self._replaced.items()}

    def read(self, name: str) -> torch.Tensor:
        found = self._own.read(self._replaced[name]) if name in self._replaced else self._base.read(name)
        module = self._modules.get(name)
        if module is not None and not {"A", "row_A"}.isdisjoint(module.parts):
            return self._merged(found.float(), module)
        owner = self._modules.get(name.removesuffix(".bias") + ".weight") if name.endswith(".bias") else None
        if owner is not None and "bias" in owner.parts:
            return found.float() + self._part(owner, "bias") * self._adapter.scale(owner.name)
        return found

    def told(self) -> dict[str, str]:
        return {**self._base.told(), "adapter": str(self._adapter.where.parent)}

    def is_quantised(self, name: str) -> bool:
        return self._base.is_quantised(name)

    def _part(self, module: _Module, kind: str) -> torch.Tensor:
        return self._own.read(module.parts[kind]).float()

    def _merged(self, weight: torch.Tensor, module: _Module) -> torch.Tensor:
        of_rows = "row_A" in module.parts
        a, b = self._part(module, "row_A" if of_rows else "A"), self._part(module, "row_B" if of_rows else "B")
        delta = ((b @ a).T if of_rows else b @ a) * self._adapter.scale(module.name)
        made = weight + delta
        if "magnitude" not in module.parts:
            return made
        magnitude = self._part(module, "magnitude").flatten()
        if of_rows:  # of a table's columns
            return made * (magnitude / torch.linalg.norm(made, dim=0))
        return made * (magnitude / torch.linalg.norm(made, dim=1))[:, None]

    def _take(self, name: str) -> str:
        """Where a tensor of the adapter belongs; a problem in words, or ""."""
        module, kind = _split(name.removeprefix(_PREFIX))
        if kind:
            weight = self._in_base(module + ".weight")
            if weight is None:
                return "the base has no such module"
            self._modules.setdefault(weight, _Module(module)).parts[kind] = name
            return ""
        whole = module.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
        stem = whole.rpartition(".")[0]
        at = self._in_base(whole)
        saved = any(re.search(rf"(^|\.){re.escape(one)}(\.|$)", stem) for one in self._adapter.saved)
        # A bias that the base lacks is another name of a tied one; whoever reads the encoder refuses others.
        if not saved and not (self._adapter.biases and whole.endswith(".bias")):
            table = at is not None and self._base_shapes[at] == self._shapes[name] and len(self._shapes[name]) == 2
            if not (table and re.search(r"(embed|lm_head|wte|decoder)", whole)):  # which peft saves beside targets
                return "neither LoRA's, nor in modules_to_save, nor a bias that `bias` says is trained"
        if at is not None and self._base_shapes[at] != self._shapes[name] and not saved:
            return f"the base has {list(self._base_shapes[at])}, the adapter {list(self._shapes[name])}"
        self._replaced[at or whole] = name
        return ""

    def _in_base(self, name: str) -> str | None:
        """The base's name of a tensor: the two may be of classes with a head and without."""
        candidates = [name, *(prefix + name for prefix in self._prefixes)]
        candidates += [name.removeprefix(prefix) for prefix in self._prefixes if prefix and name.startswith(prefix)]
        return next((one for one in candidates if one in self._base_shapes), None)

    def _check(self, weight: str, module: _Module) -> list[str]:
        """The problems of one module's tensors."""
        found, shape = module.parts.keys(), self._base_shapes[weight]
        for a, b in (("A", "B"), ("row_A", "row_B")):
            if (a in found) != (b in found):
                return [f"{module.name}: one of lora_A and lora_B is missing"]
        if {"A", "row_A"}.isdisjoint(found):
            return [f"{module.name}: lora_A and lora_B are missing"]
        of_rows, rank = "row_A" in found, self._adapter.rank_of(module.name)
        outputs, inputs = (shape[1], shape[0]) if of_rows else (shape[0], math.prod(shape[1:]))
        a, b = ("row_A", "row_B") if of_rows else ("A", "B")
        wanted: dict[str, Shape] = {a: (rank, inputs), b: (outputs, rank), "bias": (outputs,)}
        if len(shape) != 2:
            return [f"{module.name}: the base's weight is {list(shape)}; only linear layers and tables are merged"]
        problems = [
            f"{module.parts[kind]}: the base and r {rank} ask for {list(want)}, the adapter has "
            f"{list(self._shapes[module.parts[kind]])}"
            for kind, want in wanted.items()
            if kind in found and self._shapes[module.parts[kind]] != want
        ]
        if "bias" in found and weight.removesuffix("weight") + "bias" not in self._base_shapes:
            problems.append(f"{module.parts['bias']}: the base's layer has no bias to add it to")
        if "magnitude" in found and math.prod(self._shapes[module.parts["magnitude"]]) != outputs:
            problems.append(f"{module.parts['magnitude']}: expected {outputs} numbers")
        return problems

    def _missing(self) -> list[str]:
        """Modules that target_modules names and that have no part, while the same module of another layer has."""
        if not self._adapter.whole:
            return []
        patterns = {re.sub(r"\d+", "#", weight) for weight in self._modules}
        named = [f".{one}.weight" for one in self._adapter.targets]
        return [
            f"{name.removesuffix('.weight')}: in target_modules, and without lora_A and lora_B"
            for name in self._base_shapes
            if name not in self._modules and re.sub(r"\d+", "#", name) in patterns and f".{name}".endswith(tuple(named))
        ]


def adapter_of(folder: Path) -> Adapter | None:
    """The adapter in a folder; None without one."""
    return Adapter.read(folder) if exists(folder / ADAPTER) else None


def has_weights(folder: Path) -> bool:
    return has_weights_among(list_folder(folder))


def has_weights_among(names: Collection[str]) -> bool:
    """Whether a folder with these files holds a whole model's, beside an adapter's."""
    try:
        return bool(find_weights(names, ""))
    except ValueError:
        return False


def text_folder(folder: Path, home: Path, base: Path) -> Path:
    """Whose files say how texts are read: the adapter's where it has sentence-transformers' or a whole model's, else
    the base's. ValueError where the adapter has a tokenizer with other tokens than that."""
    if exists(folder / MODULES) or base == home:
        return folder
    mine, theirs = home / "tokenizer.json", transformer_folder(base) / "tokenizer.json"
    if exists(mine) and exists(theirs) and _tokens_of(mine) != _tokens_of(theirs):
        raise ValueError(
            f"{mine}: has other tokens than the base's, {theirs}, which is read: put the adapter's tokenizer into the "
            "folder of the base"
        )
    return base if exists(theirs) else folder


def _tokens_of(path: Path) -> Any:
    found = read_json_object(path)
    model = found.get("model")
    added = [one.get("content") if isinstance(one, dict) else one for one in found.get("added_tokens") or []]
    return model.get("vocab") if isinstance(model, dict) else None, added


def _split(name: str) -> tuple[str, str]:
    """A module's name and which part of LoRA a tensor is; the whole name and "" of other tensors."""
    for ending, kind in _PARTS.items():
        if name.endswith(f".{ending}"):
            return name.removesuffix(f".{ending}").removesuffix(".base_layer"), kind
    return name, ""


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """As peft's get_pattern_key: the first pattern that the end of a module's name matches."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _count(where: Path, said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {key} must be a positive integer; got {shown(value)}")
    return value


def _number(where: Path, value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {key} must be a number; got {shown(value)}")
    return float(value)
