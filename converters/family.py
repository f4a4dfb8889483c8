"""A family's table: the names of its tensors by ours, and how its config reads."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ftbert.checkpoint import Make, ModelConfig, shared_layers, shown, typed

Config = dict[str, Any]


@dataclass(frozen=True)
class Derived:
    """One of our tensors that is computed from theirs, and back.

    sources: as the names of a table, whole or the stems of .weight and .bias. shapes: of `sources`, from our and their
    config and the shape of ours. undo gives tensors that mean the same to transformers.
    """

    sources: tuple[str, ...]
    shapes: Callable[[ModelConfig, Config, list[int]], list[list[int]]]
    make: Make
    undo: Callable[[ModelConfig, Config, torch.Tensor], list[torch.Tensor]]


# A tensor's name, or the stem of .weight and .bias; a tuple is stacked along the rows.
Names = dict[str, "str | tuple[str, ...] | Derived"]


def sources_of(row: str | tuple[str, ...] | Derived) -> tuple[str, ...]:
    """The names in a row of a table."""
    return row.sources if isinstance(row, Derived) else (row,) if isinstance(row, str) else row


# Entry of `encoder` in our config.json (docs/checkpoint.md), by its path -> key in theirs and, where older files lack
# it, transformers' default (None: must be there). "layers" is their number. A norm is there where its eps is.
Keys = dict[str, tuple[str, Any]]


def norm_keys(*norms: str, key: str = "layer_norm_eps", default: float = 1e-12) -> Keys:
    return {f"{norm}.eps": (key, default) for norm in norms}


LAYER_NORMS = ("layer.attention_norm", "layer.ffn_norm")
KEYS: Keys = {
    "vocab": ("vocab_size", None),
    "hidden": ("hidden_size", None),
    "layers": ("num_hidden_layers", None),
    "layer.attention.heads": ("num_attention_heads", None),
    "layer.ffn.inter": ("intermediate_size", None),
    "positions.rows": ("max_position_embeddings", None),
    "token_types": ("type_vocab_size", 2),
    "padding_id": ("pad_token_id", 0),
    "layer.ffn.activation": ("hidden_act", "gelu"),
    **norm_keys("embedding_norm", *LAYER_NORMS),
}
_KINDS = {
    "eps": "float", "scale": "float", "activation": "str", "bias": "bool", "qkv_bias": "bool", "out_bias": "bool",
    "up_bias": "bool", "down_bias": "bool",
}  # fmt: skip


def put(description: dict[str, Any], path: str, value: Any) -> None:
    """Sets the entry at that path of nested objects."""
    *around, last = path.split(".")
    for key in around:
        description = description.setdefault(key, {})
    description[last] = value


def entry(document: Config, key: str, kind: str, default: Any) -> Any:
    """An entry of config.json of that kind ("int", "float", "str", "bool"), `default` where it is null or missing."""
    value = document.get(key)
    return typed(kind, key, default if value is None else value)


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    name: transformers' model_type. base: what stands before the encoder's names in a model with a head. keys: see KEYS.
    fixed: entries that no config changes, by their path. adjust: what a table cannot say, over the description read so
    far. buffers: endings of tensors that are no weights. lacks: tasks of head_tables.py for which transformers has no
    class. also: other bases, of some heads. spellings: other tables of names that published files have. names_by: the
    table of names and the spellings, of a config. encoder: how the name of transformers' class without a head ends.
    positions: what position_embedding_type may say. frequencies: patterns of tensors in which files may hold the rotary
    ones, which then count, as in transformers; the first is the name of its own. decoder: each token sees those before
    it alone, unless is_causal is false. made: tensors of the encoder that its code makes from the config, by name; a
    file that holds other numbers is refused. beside: beginnings of names, behind the base, that are none of the
    encoder's.
    """

    name: str
    base: str
    names: Names
    keys: Keys = field(default_factory=lambda: KEYS)
    fixed: dict[str, Any] = field(default_factory=dict)
    adjust: Callable[[Config, dict[str, Any]], None] | None = None
    buffers: tuple[str, ...] = ("position_ids", "token_type_ids")
    lacks: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    spellings: tuple[Names, ...] = ()
    names_by: Callable[[Config], tuple[Names, ...]] | None = None
    encoder: str = "Model"
    positions: tuple[str, ...] = ("absolute",)
    frequencies: tuple[str, ...] = ()
    decoder: bool = False
    made: dict[str, Callable[[ModelConfig], torch.Tensor]] = field(default_factory=dict)
    beside: tuple[str, ...] = ()

    @property
    def bases(self) -> tuple[str, ...]:
        return (self.base + ".", *(f"{name}." for name in self.also))

    @property
    def prefixes(self) -> tuple[str, ...]:
        return ("", *self.bases)

    def of(self, document: Config) -> Family:
        """With the names that go with a config."""
        if self.names_by is None:
            return self
        names, *spellings = self.names_by(document)
        return replace(self, names=names, spellings=tuple(spellings))

    def spelled(self, found: Container[str]) -> Family:
        """With the names that a file has, by those of its word table and its first layer."""
        if not self.spellings:
            return self

        def fitting(names: Names) -> int:
            other = replace(self, names=names)
            probes = [other.source_names(ours)[0] for ours in ("embeddings.word", "layers.0.attention.qkv.weight")]
            return sum(any(prefix + probe in found for prefix in self.prefixes) for probe in probes)

        return replace(self, names=max((self.names, *self.spellings), key=fitting))

    def config(self, document: Config) -> ModelConfig:
        """The encoder that a config.json describes; ValueError says what is missing or cannot be run."""
        wanted = {ours: key for ours, key in self.keys.items() if ours not in self.fixed}
        missing = [key for key, default in wanted.values() if default is None and document.get(key) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if (positions := document.get("position_embedding_type")) not in (None, *self.positions):
            known = " or ".join(map(repr, self.positions))
            raise ValueError(f"position_embedding_type {shown(positions)} is not supported: only {known}")
        if self.decoder and document.get("add_cross_attention"):
            raise ValueError("add_cross_attention: this checkpoint is half of an encoder with a decoder")
        if not self.decoder and any(document.get(key) for key in ("is_decoder", "is_causal", "add_cross_attention")):
            raise ValueError(
                "this checkpoint is a decoder (is_decoder, is_causal or add_cross_attention); ftbert runs encoders"
            )
        description: dict[str, Any] = {"positions": {"kind": "absolute"}}
        for path in (*self.fixed, *wanted):
            put(description, path, self.value(document, path))
        attention = description["layer"]["attention"]
        if description["hidden"] < 1:
            raise ValueError(f"hidden size {description['hidden']}: expected at least 1")
        if not attention.get("head_size"):
            hidden, heads = description["hidden"], attention["heads"]
            if heads <= 0 or hidden % heads:
                raise ValueError(f"hidden size {hidden} is not a multiple of the number of attention heads {heads}")
            attention["head_size"] = hidden // heads
        if self.decoder and entry(document, "is_causal", "bool", True):
            attention["causal"] = True
        description.setdefault("embedding", description["hidden"])
        description["layers"] = shared_layers(description["layers"], 0)
        if self.adjust is not None:
            self.adjust(document, description)
        return ModelConfig.from_json(description)

    def value(self, document: Config, path: str) -> Any:
        """The entry at that path, of one that the table names."""
        if path in self.fixed:
            return self.fixed[path]
        key, default = self.keys[path]
        return entry(document, key, _KINDS.get(path.rpartition(".")[2], "int"), default)

    def row(self, ours: str) -> tuple[str, ...] | Derived:
        """Their names of one of our tensors, without prefix, or how it is made of theirs."""
        parts = ours.split(".")
        layer = parts[1] if parts[0] == "layers" else ""
        generic = ".".join(["layers", "{i}", *parts[2:]]) if layer else ours
        row, ending = self.names.get(generic), ""
        if row is None:
            stem, _, kind = generic.rpartition(".")
            row, ending = self.names[stem], "." + kind
        theirs = tuple(name.replace("{i}", layer) + ending for name in sources_of(row))
        return replace(row, sources=theirs) if isinstance(row, Derived) else theirs

    def source_names(self, ours: str) -> tuple[str, ...]:
        """Their names of one of our tensors, without prefix."""
        return sources_of(self.row(ours))
