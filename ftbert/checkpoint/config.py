"""What a checkpoint's config.json says: the encoder's numbers, and where they came from."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ftbert._library import load_library
from ftbert.checkpoint.model_config import ModelConfig
from ftbert.checkpoint.version_1 import upgraded
from ftbert.dtypes import DTYPES
from ftbert.input_file import complaints, named, shown, typed
from ftbert.own_classes import PROJECTION

FORMAT = "ftbert"
VERSION = 2
# Tasks of heads over the vocabulary, whose matrix may be the word embeddings: a decoder's, and what else speaks.
CAUSAL_LM = "causal_lm"
VOCABULARY = (CAUSAL_LM, "masked_lm")
HEAD_SOURCES = ("tokens", "first", "last", "mean", "late", "pooler", "end")
# Tasks of heads that make what transformers calls a text's pooled output, and what it becomes beside images' vectors.
POOLED, TEXT_EMBEDS = "pooled", "text_embeds"

# For who looks here because transformers' AutoModel found no model_type, which would keep AutoTokenizer from reading
# the folder.
_NOTE = "ftbert.load(folder) reads this; ftbert.load(folder).reference().save_pretrained(other) is for transformers"


@cache
def activations() -> dict[str, str]:
    """Every spelling of an activation that the core knows, transformers' among them, and the core's own name of it."""
    load_library()
    return dict(torch.ops.ftbert.table("activations"))


@dataclass(frozen=True)
class HeadConfig:
    """A head: out(norm(activation(dense(x)))), what is absent left out. Its tensors are heads.<task>.<part>.<kind>.

    source: what x is, the "tokens", the "first" one of each sequence, the "last" whose id is not padding_id, their
    "mean", or the "pooler" output; "late": the tokens, of whose results the mean is taken. "end": the first token
    with the id end_id, or for -1 with the largest id; where there is none the sequence's first. outputs, width: rows
    of `out` and of `dense` (0: there is none, nor an activation of dense). norm_eps 0: no LayerNorm. tied: the weight
    of `out` is the encoder's embeddings.word.
    """

    task: str
    source: str
    outputs: int
    width: int
    activation: str
    norm_eps: float
    tied: bool
    dense_bias: bool = True
    norm_bias: bool = True
    out_bias: bool = True
    padding_id: int = -1
    end_id: int = -1

    @property
    def on_demand(self) -> bool:
        """Whether no call of the model computes it: it is read when it is asked for."""
        return self.task in (CAUSAL_LM, PROJECTION)

    def shapes(self, hidden: int) -> dict[str, list[int]]:
        """Every tensor's shape, by the last two parts of its name."""
        last = self.width or hidden
        shapes = {
            "dense.weight": [self.width, hidden] if self.width else None,
            "dense.bias": [self.width] if self.width and self.dense_bias else None,
            "norm.weight": [last] if self.norm_eps else None,
            "norm.bias": [last] if self.norm_eps and self.norm_bias else None,
            "out.weight": None if self.tied or not self.outputs else [self.outputs, last],
            "out.bias": [self.outputs] if self.out_bias and self.outputs else None,
        }
        return {name: shape for name, shape in shapes.items() if shape is not None}


@dataclass(frozen=True)
class CheckpointConfig:
    """config.json of a checkpoint folder.

    architecture: the family's name in converters/families.py. huggingface: the config.json it was converted from,
    kept so that the equivalent transformers model can be built again. left_out: a sentence on tensors of the source
    that nothing ftbert computes reads, or "". quantized: what calibration found, of a folder that `quantize` wrote.
    dtype: of the weights, "fp16", where `convert` was asked for one, else "".
    """

    architecture: str
    encoder: ModelConfig
    huggingface: dict[str, Any] = field(default_factory=dict)
    heads: tuple[HeadConfig, ...] = ()
    left_out: str = ""
    quantized: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""

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
        document["encoder"] = self.encoder.to_json()
        for name in ("quantized", "dtype"):
            if not document[name]:
                del document[name]
        with named(path):
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def parse(cls, document: dict[str, Any], where: str) -> CheckpointConfig:
        """ValueError names every missing, unknown or wrong entry; `where` says which file is wrong."""
        version, encoder = document.get("version"), document.get("encoder")
        if version not in (1, VERSION):
            newer = isinstance(version, int) and version > VERSION
            raise ValueError(
                f"{where}: checkpoint version {shown(version)}, this ftbert reads 1 and {VERSION}; "
                + ("a newer ftbert wrote it" if newer else "convert it again")
            )
        if not isinstance(encoder, dict) or not isinstance(document.get("architecture"), str):
            raise ValueError(f"{where}: expected 'architecture' and 'encoder'; convert it again")
        heads, huggingface = document.get("heads") or [], document.get("huggingface") or {}
        quantized = document.get("quantized") or {}
        if not isinstance(heads, list) or not isinstance(huggingface, dict) or not isinstance(quantized, dict):
            raise ValueError(
                f"{where}: expected a list 'heads' and objects 'huggingface' and 'quantized'; convert it again"
            )
        if (dtype := document.get("dtype", "")) not in ("", *DTYPES):
            raise ValueError(f"{where}: dtype: expected one of {', '.join(DTYPES)}, got {shown(dtype)}")
        try:
            read = ModelConfig.from_json(upgraded(encoder) if version == 1 else encoder)
        except ValueError as error:
            raise ValueError(f"{where}: encoder: {error}") from None
        wrong: list[str] = []
        known = {f.name: str(f.type) for f in fields(HeadConfig)}
        needed = {f.name for f in fields(HeadConfig) if f.default is MISSING}
        for head in heads:
            wrong += complaints(head, known, needed) if isinstance(head, dict) else [f"head {shown(head)}"]
            wrong += [] if wrong else _head_complaints(head, read.pooler)
        if len({head["task"] for head in heads} if not wrong else heads) != len(heads):
            wrong.append("two heads for one task")
        if wrong:
            raise ValueError(f"{where}: {', '.join(wrong[:20])}; convert it again")
        return cls(
            document["architecture"], read, huggingface, tuple(HeadConfig(**head) for head in heads),
            typed("str", f"{where}: left_out", document.get("left_out", "")), quantized, dtype,
        )  # fmt: skip


def _head_complaints(head: dict[str, Any], pooler: bool) -> list[str]:
    wrong = []
    if head["source"] not in HEAD_SOURCES or (head["source"] == "pooler" and not pooler):
        wrong.append(f"head source {shown(head['source'])}")
    if head["width"] and head["activation"] not in activations():
        wrong.append(f"head activation {shown(head['activation'])}")
    if head["outputs"] < 0 or head["width"] < 0 or not 0 <= head["norm_eps"] <= 1:
        wrong.append("head sizes below 0 or norm_eps not in [0, 1]")
    return wrong
