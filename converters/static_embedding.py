"""A table of token vectors in a network's place: model2vec, and sentence-transformers' StaticEmbedding.

It is an encoder without layers: a token's state is its row of the word table. Their tensors make that one table; the
config is `static_embedding`, ftbert's own word, with what their code does to texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import (
    FORMAT,
    STATIC,
    TensorSource,
    exists,
    read_json_object,
    read_modules,
    shown,
    transformer_folder,
)
from ftbert.converters.family import Config, Family

MODEL2VEC = "model2vec"  # the model type in its config.json
_TABLE = "embedding.weight"  # StaticEmbedding's, which ours is read as
_MODEL2VEC_TABLE, _MAPPING, _WEIGHTS = "embeddings", "mapping", "weights"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MOST_TOKENS = 1 << 30  # of a text: there are no positions

STATIC_EMBEDDING = Family(
    name="static_embedding",
    base="",
    names={"embeddings.word": _TABLE},
    keys={"vocab": ("vocab_size", None), "hidden": ("hidden_size", None)},
    fixed={
        "layers": 0, "positions.kind": "none", "positions.rows": _MOST_TOKENS, "padding_id": 0, "token_types": 0,
        "layer.attention.heads": 1, "layer.ffn.inter": 1,
    },
    lacks=(
        "masked_lm", "sequence_classification", "token_classification", "question_answering", "multiple_choice",
    ),
)  # fmt: skip


def static_config(folder: Path) -> Config | None:
    """What a folder says of its table, without its sizes; None where it holds another kind of model, or a converted
    one. ValueError where config.json and modules.json name different kinds."""
    home, modules = transformer_folder(folder), read_modules(folder)
    path = home / "config.json"
    document = read_json_object(path) if exists(path) else {}
    kind = document.get("model_type")
    static = bool(modules) and modules[0].kind == STATIC
    if document.get("format") == FORMAT or not (static or kind == MODEL2VEC):
        return None
    if kind not in (None, MODEL2VEC):
        raise ValueError(
            f"{path}: model_type {shown(kind)}, where modules.json names {modules[0].full}, a table without a network: "
            "the folder holds parts of two models"
        )
    if modules and not static:
        raise ValueError(f"{path}: model_type {kind}, where modules.json names {modules[0].full}: expected {STATIC}")
    said = {key: value for key, value in document.items() if key != "architectures"}
    return {**said, "model_type": STATIC_EMBEDDING.name, **({"of": MODEL2VEC} if kind == MODEL2VEC else {})}


class StaticTable(TensorSource):
    """The one table of `source`: row i is that of token i, of model2vec embeddings[mapping[i]] * weights[i]."""

    def __init__(self, source: TensorSource) -> None:
        """ValueError for tensors that are no such table, or of other sizes than each other."""
        self._source, self.where, self.files = source, source.where, source.files
        found = source.shapes()
        known = {_TABLE} if _TABLE in found else {_MODEL2VEC_TABLE, _MAPPING, _WEIGHTS}
        self._name = _TABLE if _TABLE in found else _MODEL2VEC_TABLE
        if self._name not in found or (others := found.keys() - known):
            listed = ", ".join(sorted(found)[:8]) if self._name not in found else ", ".join(sorted(others)[:8])
            raise ValueError(
                f"{self.where}: expected a table of token vectors, {_TABLE} alone or {_MODEL2VEC_TABLE} with "
                f"{_MAPPING} and {_WEIGHTS} where there are any; got {listed or 'no tensors'}"
            )
        shape = found[self._name]
        beside = {name: found[name] for name in (_MAPPING, _WEIGHTS) if name in found}
        rows = next(iter(beside.values()), shape[:1])[0] if len(shape) == 2 else 0
        if len(shape) != 2 or any(one != (rows,) for one in beside.values()):
            sizes = ", ".join(f"{name} {list(one)}" for name, one in {self._name: shape, **beside}.items())
            words = "expected a table [rows, width] and one entry a token beside it"
            raise ValueError(f"{self.where}: {words}; got {sizes}")
        if _MAPPING not in beside and rows != shape[0]:
            raise ValueError(f"{self.where}: {_WEIGHTS} has {rows} entries, {self._name} {shape[0]} rows")
        self._beside, self._shape = tuple(beside), (rows, shape[1])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {_TABLE: self._shape}

    def read(self, name: str) -> torch.Tensor:
        assert name == _TABLE
        table = self._source.read(self._name)
        if _MAPPING in self._beside:
            mapping = self._source.read(_MAPPING)
            inside = not mapping.is_floating_point() and bool(((mapping >= 0) & (mapping < len(table))).all())
            if not inside:
                raise ValueError(f"{self.where}: {_MAPPING} must hold rows of {self._name}, which has {len(table)}")
            table = table[mapping.long()]
        if _WEIGHTS in self._beside:  # as model2vec, numbers of 64 bits where they are stored in so many
            table = table * self._source.read(_WEIGHTS)[:, None]
        return table if table.dtype in _FLOATS[1:] else table.float()  # int8 is its numbers, without a scale


def with_sizes(document: Config, table: StaticTable) -> dict[str, Any]:
    """The config with the table's sizes, which no file says."""
    rows, width = table.shapes()[_TABLE]
    return {**document, "vocab_size": rows, "hidden_size": width}
