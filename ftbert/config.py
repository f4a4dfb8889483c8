"""What a checkpoint's config.json says: the encoder's numbers, and where they came from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

# The core's words for element types.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FORMAT = "ftbert"
VERSION = 1


@dataclass(frozen=True)
class EncoderConfig:
    """The entries of csrc/config.h, by the same names; the core checks their values.

    heads * head_size = hidden. embedding is the width of the embedding tables. positions: how a token gets its
    position id, "absolute", "from_padding" or "none". activation: as HuggingFace spells it.
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

    @property
    def max_seq(self) -> int:
        """Longest sequence in tokens."""
        return self.max_positions - (self.padding_id + 1 if self.positions == "from_padding" else 0)

    def entries(self) -> dict[str, str]:
        """As text by key: what torch.classes.ftbert.Encoder is built from."""
        return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class CheckpointConfig:
    """config.json of a checkpoint folder.

    architecture: the family's name in converters/weights.py. huggingface: the config.json it was converted from,
    kept so that the equivalent transformers model can be built again.
    """

    architecture: str
    encoder: EncoderConfig
    huggingface: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def parse(cls, document: dict[str, Any], where: str) -> CheckpointConfig:
        """ValueError names every missing or unknown entry; `where` says which file is wrong."""
        if document.get("version") != VERSION:
            raise ValueError(
                f"{where}: checkpoint version {document.get('version')!r}, this ftbert reads {VERSION}; convert it again"
            )
        encoder = document.get("encoder")
        if not isinstance(encoder, dict) or not isinstance(document.get("architecture"), str):
            raise ValueError(f"{where}: expected 'architecture' and 'encoder'; convert it again")
        known = {f.name for f in fields(EncoderConfig)}
        wrong = [f"missing {key}" for key in sorted(known - encoder.keys())]
        wrong += [f"unknown {key}" for key in sorted(encoder.keys() - known)]
        if wrong:
            raise ValueError(f"{where}: {', '.join(wrong)}; convert it again")
        return cls(document["architecture"], EncoderConfig(**encoder), dict(document.get("huggingface") or {}))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError or FileNotFoundError name the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(document).__name__}")
    return document
