"""What a checkpoint's config.json says: the encoder's numbers, and where they came from."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

# The core's words for element types.
# transformers' names -> what they compute
ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh", "none": "none",
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FORMAT = "ftbert"
VERSION = 1


@dataclass(frozen=True)
class EncoderConfig:
    """The entries of csrc/config.h, by the same names; the core checks their values.

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
    that belong to a head ftbert does not compute, or "".
    """

    architecture: str
    encoder: EncoderConfig
    huggingface: dict[str, Any] = field(default_factory=dict)
    heads: tuple[HeadConfig, ...] = ()
    left_out: str = ""

    def shapes(self) -> dict[str, list[int]]:
        """Every tensor of the checkpoint with its shape."""
        shapes = dict(torch.ops.ftbert.weight_shapes(self.encoder.entries()))
        for head in self.heads:
            shapes |= {f"heads.{head.task}.{name}": shape for name, shape in head.shapes(self.encoder.hidden).items()}
        return shapes

    def write(self, path: Path) -> None:
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def parse(cls, document: dict[str, Any], where: str) -> CheckpointConfig:
        """ValueError names every missing or unknown entry; `where` says which file is wrong."""
        if document.get("version") != VERSION:
            raise ValueError(
                f"{where}: checkpoint version {document.get('version')!r}, "
                f"this ftbert reads {VERSION}; convert it again"
            )
        encoder = document.get("encoder")
        if not isinstance(encoder, dict) or not isinstance(document.get("architecture"), str):
            raise ValueError(f"{where}: expected 'architecture' and 'encoder'; convert it again")
        wrong = _complaints(EncoderConfig, encoder)
        heads = document.get("heads") or []
        for head in heads:
            wrong += _complaints(HeadConfig, head)
        if wrong:
            raise ValueError(f"{where}: {', '.join(wrong)}; convert it again")
        return cls(
            document["architecture"], EncoderConfig(**encoder), dict(document.get("huggingface") or {}),
            tuple(HeadConfig(**head) for head in heads), str(document.get("left_out") or ""),
        )  # fmt: skip


def _complaints(kind: Any, entries: dict[str, Any]) -> list[str]:
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    wrong = [f"missing {key}" for key in sorted(needed - entries.keys())]
    return wrong + [f"unknown {key}" for key in sorted(entries.keys() - {f.name for f in fields(kind)})]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError or FileNotFoundError name the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document
