"""What a checkpoint's config.json says: the encoder's numbers, and where they came from."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ftbert._library import load_library
from ftbert.input_file import named, shown

FORMAT = "ftbert"
VERSION = 1

# For who looks here because transformers' AutoModel found no model_type, which would keep AutoTokenizer from reading
# the folder.
_NOTE = "ftbert.load(folder) reads this; ftbert.load(folder).reference().save_pretrained(other) is for transformers"

# The deepest encoders that were ever trained have 1000. Shared layers cost a file nothing, each call pays for all.
_MOST_LAYERS = 4096
_KINDS = {"int": "a whole number", "float": "a finite number", "str": "a string", "bool": "true or false"}


@cache
def activations() -> dict[str, str]:
    """Every spelling of an activation that the core knows, transformers' among them, and the core's own name of it."""
    load_library()
    return dict(torch.ops.ftbert.activations())


@dataclass(frozen=True)
class EncoderConfig:
    """The entries of csrc/model/config.h, by the same names; the core checks their values.

    heads * head_size = hidden. embedding is the width of the embedding tables. positions: how a token gets its
    position id, "absolute", "from_padding" or "none". activation: as HuggingFace spells it. relative_span: attention
    has an additive bias by distance, the same from relative_span - 1 on (0: none). distinct_layers: so many layers
    have weights of their own, the others share them in runs (0: all).
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    head_size: int
    inter: int
    embedding: int
    max_positions: int
    token_types: int
    padding_id: int
    layer_norm_eps: float
    activation: str
    norm_place: str = "post"
    positions: str = "absolute"
    pooler: bool = False
    embedding_norm: bool = True
    embedding_projection: bool = False
    relative_span: int = 0
    distinct_layers: int = 0

    @property
    def max_seq(self) -> int:
        """Longest sequence in tokens."""
        return self.max_positions - (self.padding_id + 1 if self.positions == "from_padding" else 0)

    def entries(self) -> dict[str, str]:
        """As text by key: what torch.classes.ftbert.Encoder is built from."""
        return {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in asdict(self).items()
        }

    def weight_shapes(self) -> dict[str, list[int]]:
        """Every tensor of the encoder with its shape; ValueError lists what the core cannot run."""
        if self.layers > _MOST_LAYERS:
            raise ValueError(f"{self.layers} layers are more than ftbert runs ({_MOST_LAYERS})")
        if self.positions == "from_padding" and self.max_seq < 1:
            raise ValueError(
                f"no token has a position: they count from padding id {self.padding_id} + 1, and there are "
                f"{self.max_positions}"
            )
        load_library()
        try:
            return dict(torch.ops.ftbert.weight_shapes(self.entries()))
        except RuntimeError as error:
            raise ValueError(str(error)[:4000]) from None


@dataclass(frozen=True)
class HeadConfig:
    """A head: out(norm(activation(dense(x)))), what is absent left out. Its tensors are heads.<task>.<part>.<kind>.

    source: what x is, the "tokens", the "first" one of each sequence, or the "pooler" output. outputs, width: rows of
    `out` and of `dense` (0: no dense, no activation). norm_eps 0: no LayerNorm. tied: the weight of `out` is the
    encoder's embeddings.word.
    """

    task: str
    source: str
    outputs: int
    width: int
    activation: str
    norm_eps: float
    tied: bool

    def shapes(self, hidden: int) -> dict[str, list[int]]:
        """Every tensor's shape, by the last two parts of its name."""
        last = self.width or hidden
        dense = {"dense.weight": [self.width, hidden], "dense.bias": [self.width]} if self.width else {}
        norm = {"norm.weight": [last], "norm.bias": [last]} if self.norm_eps else {}
        out = {} if self.tied else {"out.weight": [self.outputs, last]}
        return dense | norm | out | {"out.bias": [self.outputs]}


@dataclass(frozen=True)
class CheckpointConfig:
    """config.json of a checkpoint folder.

    architecture: the family's name in converters/families.py. huggingface: the config.json it was converted from,
    kept so that the equivalent transformers model can be built again. left_out: a sentence on tensors of the source
    that nothing ftbert computes reads, or "".
    """

    architecture: str
    encoder: EncoderConfig
    huggingface: dict[str, Any] = field(default_factory=dict)
    heads: tuple[HeadConfig, ...] = ()
    left_out: str = ""

    def shapes(self) -> dict[str, list[int]]:
        """Every tensor of the checkpoint with its shape."""
        shapes = self.encoder.weight_shapes()
        for head in self.heads:
            shapes |= {f"heads.{head.task}.{name}": shape for name, shape in head.shapes(self.encoder.hidden).items()}
        return shapes

    def write(self, path: Path, tokenizer_class: str = "") -> None:
        """tokenizer_class: of transformers, for its AutoTokenizer: the model type would say it, and is not there."""
        named_class = {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
        document = {"format": FORMAT, "version": VERSION, "note": _NOTE, **named_class, **asdict(self)}
        with named(path):
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def parse(cls, document: dict[str, Any], where: str) -> CheckpointConfig:
        """ValueError names every missing, unknown or wrong entry; `where` says which file is wrong."""
        if document.get("version") != VERSION:
            raise ValueError(
                f"{where}: checkpoint version {shown(document.get('version'))}, "
                f"this ftbert reads {VERSION}; convert it again"
            )
        encoder = document.get("encoder")
        if not isinstance(encoder, dict) or not isinstance(document.get("architecture"), str):
            raise ValueError(f"{where}: expected 'architecture' and 'encoder'; convert it again")
        wrong = _complaints(EncoderConfig, encoder)
        heads, huggingface = document.get("heads") or [], document.get("huggingface") or {}
        if not isinstance(heads, list) or not isinstance(huggingface, dict):
            raise ValueError(f"{where}: expected a list 'heads' and an object 'huggingface'; convert it again")
        for head in heads:
            wrong += _complaints(HeadConfig, head) if isinstance(head, dict) else [f"head {shown(head)}"]
            wrong += [] if wrong else _head_complaints(head, bool(encoder.get("pooler")))
        if len({head["task"] for head in heads} if not wrong else heads) != len(heads):
            wrong.append("two heads for one task")
        if wrong:
            raise ValueError(f"{where}: {', '.join(wrong[:20])}; convert it again")
        return cls(
            document["architecture"], EncoderConfig(**encoder), huggingface,
            tuple(HeadConfig(**head) for head in heads),
            typed("str", f"{where}: left_out", document.get("left_out", "")),
        )  # fmt: skip


def typed(kind: str, name: str, value: Any) -> Any:
    """`value` if it is of that kind ("int", "float", "str", "bool"), nothing rounded or parsed; else ValueError."""
    good = {
        "int": type(value) is int,
        "float": type(value) in (int, float) and abs(value) < 1e300,  # no NaN, nor an int past every float
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }[kind]
    if not good:
        raise ValueError(f"{name}: expected {_KINDS[kind]}, got {shown(value)}")
    return value


def _complaints(kind: Any, entries: dict[str, Any]) -> list[str]:
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    wrong = [f"missing {key}" for key in sorted(needed - entries.keys())]
    wrong += [f"unknown {shown(key)}" for key in sorted(entries.keys() - {f.name for f in fields(kind)})]
    for f in fields(kind):
        try:
            typed(str(f.type), f.name, entries.get(f.name, f.default if f.default is not MISSING else None))
        except ValueError as error:
            wrong += [str(error)] if f.name in entries else []
    return wrong


def _head_complaints(head: dict[str, Any], pooler: bool) -> list[str]:
    wrong = []
    if head["source"] not in ("tokens", "first", "pooler") or (head["source"] == "pooler" and not pooler):
        wrong.append(f"head source {shown(head['source'])}")
    if head["width"] and head["activation"] not in activations():
        wrong.append(f"head activation {shown(head['activation'])}")
    if head["outputs"] < 0 or head["width"] < 0 or not 0 <= head["norm_eps"] <= 1:
        wrong.append("head sizes below 0 or norm_eps not in [0, 1]")
    return wrong
