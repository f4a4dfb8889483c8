"""A GGUF file of llama.cpp as a source of tensors under transformers' names, with the config.json that fits them."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import TensorSource, exists, list_folder, shown
from ftbert.converters.gguf_file import GgufFile, GgufTensor
from ftbert.converters.gguf_metadata import Metadata, expect_no_more
from ftbert.converters.gguf_parts import open_parts
from ftbert.converters.gguf_tables import RANK, Architecture, behind_pooling, find_architecture, names_of, ranked
from ftbert.converters.gguf_text import POOLINGS, TextFolder, write_text_folder
from ftbert.converters.hub_name import is_gguf, one_of_each

_WORDS = ["yes", "no"]  # of rerankers that are language models, in the order of their rows
_NO_POOLING = 0  # of llama.cpp's pooling types
_MATRICES = ("_embeddings.weight", "classifier.weight")  # that may have one row
_OTHERS = ("*.safetensors", "*.safetensors.index*.json", "pytorch_model*.bin", "pytorch_model.bin.index*.json")


class GgufSource(TensorSource):
    """Tensors as transformers has them. text: the folder of the tokenizer's files, which lives as long as this."""

    def __init__(
        self, file: GgufFile, kind: Architecture, names: dict[str, str], config: dict[str, Any], text: TextFolder
    ) -> None:
        self.where, self.files = str(file.path), file.paths
        self.file, self.text = file, text
        self._kind, self._names = kind, names
        self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads", 0)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in self._names}

    def read(self, name: str) -> torch.Tensor:
        if self._is_difference(name):
            found = self.file.read(self._names[name]).float()
            return found[:1] - found[1:]
        found = self.file.read(self._names[name]).view(self._shape(name))
        if self._kind.is_norm(name):
            return found.float() - self._kind.shift
        rows = self._rows(name)
        return found if rows is None else found[rows]

    def is_quantised(self, name: str) -> bool:
        return not self._tensor(name).type.is_float

    def sample(self, name: str) -> str:
        return self.file.sample(self._names[name])

    def in_blocks(self, name: str) -> bool:
        return self._tensor(name).type.name == "Q8_0" and not self._is_difference(name)

    def read_blocks(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        found, rows = self.file.read_blocks(self._names[name]), self._rows(name)
        return found if rows is None else (found[0][rows], found[1][rows])

    def told(self) -> dict[str, str]:
        types = Counter(self._tensor(name).type for name in self._names)
        parts = [f"{count} of {kind.name}" for kind, count in types.most_common() if not kind.is_float]
        return {"dequantised": f"to fp32: {', '.join(parts)} (of {len(self._names)} tensors)"} if parts else {}

    def _shape(self, name: str) -> tuple[int, ...]:
        """A matrix of one row is a vector in the file (Metadata.rows)."""
        shape = self._tensor(name).shape
        if self._is_difference(name):
            return (1, *shape[1:])
        return (1, *shape) if len(shape) == 1 and name.endswith(_MATRICES) else shape

    def _is_difference(self, name: str) -> bool:
        """Whether a score is the row of one word minus that of another."""
        ranker = self._kind.ranker
        return ranker is not None and ranker.two_words and name == f"{ranker.names['cls.output']}.weight"

    def _tensor(self, name: str) -> GgufTensor:
        return self.file.tensors[self._names[name]]

    def _rows(self, name: str) -> torch.Tensor | None:
        """Where transformers' rows of a matrix or bias are in the file; None where in the same places.

        llama.cpp turns neighbours, transformers a row of a head's first half with one of its second: its converter has
        put rows (half, pair) of each head as (pair, half)."""
        if not self._kind.pairs(name):
            return None
        rows, heads = self._tensor(name).shape[0], self._heads[name.split(".")[-2]]
        if heads < 1 or rows % (2 * heads):
            raise ValueError(f"{self.where}: {self._names[name]}: {rows} rows for {heads} heads")
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def gguf_of(source: str | Path) -> Path | None:
    """The .gguf file; of a folder without weights that are read directly the only one, or one part of the only model.
    Else None."""
    path = Path(source)
    if not exists(path):
        return None
    if path.is_file():
        return path if is_gguf(path) else None
    names = list_folder(path)
    if any(fnmatch(name, pattern) for name in names for pattern in _OTHERS):
        return None
    found = one_of_each(name for name in names if is_gguf(name))
    if len(found) > 1:
        raise ValueError(f"{path}: several GGUF files ({', '.join(found[:20])}); name one of them")
    return path / found[0] if found else None


def open_gguf(path: Path) -> tuple[dict[str, Any], GgufSource]:
    """(transformers' config, tensors). ValueError names the file and says what was found."""
    file = open_parts(path)
    try:
        if file.metadata.get("general.type", "model") != "model":
            raise ValueError(f"it is of type {file.metadata['general.type']!r}, no model")
        said = Metadata(file)
        architecture = ranked(find_architecture(file.metadata.get("general.architecture")), said)
        dense = behind_pooling(said)
        names = names_of(architecture, file.tensors, dense)
        layers = {match[1] for name in file.tensors if (match := re.match(r"blk\.(\d+)\.", name))}
        if (count := said.count("block_count")) != len(layers):
            raise ValueError(f"{said.arch}.block_count {count}, and tensors of {len(layers)} layers")
        _expect_vectors(said)
        config = architecture.config(said) | _head(architecture, said)
        expect_no_more(said)
    except ValueError as error:
        raise error if str(error).startswith(str(path)) else ValueError(f"{path}: {error}") from error
    return config, GgufSource(file, architecture, names, config, write_text_folder(file, said, config, dense))


def _expect_vectors(said: Metadata) -> None:
    kind = said.count("pooling_type", 0)
    if kind not in (_NO_POOLING, RANK, *POOLINGS):
        known = ", ".join(map(str, (*POOLINGS, RANK)))
        raise ValueError(f"{said.arch}.pooling_type {kind} is not known; known: {known}")


def _head(architecture: Architecture, said: Metadata) -> dict[str, Any]:
    """What config.json says of a reranker's head."""
    ranker = architecture.ranker
    if ranker is None:
        return {}
    labels, rows = said.raw("classifier.output_labels"), said.rows("cls.output")
    if ranker.two_words:
        if rows != len(_WORDS) or labels != _WORDS:
            raise ValueError(
                f"a reranker by words whose cls.output has {rows} rows, {said.arch}.classifier.output_labels "
                f"{shown(labels)}: expected {' and '.join(_WORDS)}"
            )
        return ranker.config | {"num_labels": 1}
    named = labels if isinstance(labels, list) and len(labels) == rows else [f"LABEL_{i}" for i in range(rows)]
    return ranker.config | {"num_labels": rows, "id2label": {str(i): str(name) for i, name in enumerate(named)}}
