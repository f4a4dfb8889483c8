"""An ONNX export of a BERT-family model as a source of tensors.

The graph is followed from the embeddings on (onnx_encoder.py), so it does not matter which exporter wrote the file
and whether it kept any name. A config.json beside it is used and must agree with the graph; without one the config is
what the graph says, eps, head count and activation included. The encoder, the pooler and a head of scores are taken
(onnx_head.py). What was read is a guess until the graph itself has been evaluated and computes the same
(onnx_check.py).
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftbert.checkpoint import FORMAT, ModelConfig, TensorSource, exists, list_folder, read_json_object
from ftbert.converters.clip_families import text_part
from ftbert.converters.families import find_family
from ftbert.converters.family import Family
from ftbert.converters.head_tables import HeadRow
from ftbert.converters.onnx_config import differences, document, fit
from ftbert.converters.onnx_encoder import Encoder, trace
from ftbert.converters.onnx_file import BFLOAT16, DTYPES, OnnxFile, computed, data_files, read_onnx
from ftbert.converters.onnx_graph import Graph, Matrix, histogram
from ftbert.converters.onnx_head import GraphHead, described, find_head, row_of
from ftbert.converters.onnx_integers import Dequantised, has_row_scales
from ftbert.converters.onnx_pieces import Linear, Norm

_TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer_config.json")
_MOST = 20  # problems shown


class OnnxSource(TensorSource):
    """The constants of a traced graph under HuggingFace's names, matrices as torch.nn.Linear has them."""

    def __init__(
        self, file: OnnxFile, encoder: Encoder, head: GraphHead | None, tensors: dict[str, Matrix]
    ) -> None:  # fmt: skip
        self.where = str(file.path)
        self.files = (file.path, *data_files(file.constants.values()))
        self.file, self.encoder, self.head = file, encoder, head
        self._tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: matrix.shape for name, matrix in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        matrix = self._tensors[name]
        found = torch.tensor(matrix.constant.read())
        found = found.view(torch.bfloat16) if matrix.constant.type == BFLOAT16 else found
        return found.t().contiguous() if matrix.transposed else found

    def in_8_bits(self, name: str) -> tuple[Dequantised, bool] | None:
        """The integers that the file has of a matrix with a scale for each row, and whether they are transposed."""
        matrix = self._tensors[name]
        found = matrix.constant
        fits = isinstance(found, Dequantised) and has_row_scales(found, matrix.transposed)
        return (found, matrix.transposed) if isinstance(found, Dequantised) and fits else None


def onnx_of(source: str | Path) -> Path | None:
    """The model in an .onnx file or a folder: model.onnx, onnx/model.onnx, or the only .onnx there is. Else None, as
    for a folder that has the weights in a format that is read directly."""
    path = Path(source)
    if not exists(path):
        return None
    if path.is_file():
        return path if path.suffix.lower() == ".onnx" else None
    names = list_folder(path)
    other = ("*.safetensors", "*.safetensors.index*.json", "pytorch_model*.bin", "pytorch_model.bin.index*.json")
    if any(fnmatch(name, pattern) for name in names for pattern in other):
        return None
    places = [path, *([path / "onnx"] if "onnx" in names and (path / "onnx").is_dir() else [])]
    held = {folder: list_folder(folder) for folder in places}
    for folder in places:
        if "model.onnx" in held[folder]:
            return folder / "model.onnx"
    found = [folder / name for folder in places for name in sorted(held[folder]) if name.endswith(".onnx")]
    if len(found) > 1:
        several = ", ".join(str(one.relative_to(path)) for one in found)
        raise ValueError(f"{path}: several ONNX files ({several}); name one of them")
    return found[0] if found else None


def home_of(path: Path) -> Path | None:
    """The folder with the tokenizer and config.json of the model at `path`."""
    folders = [path.parent, path.parent.parent] if path.parent.name == "onnx" else [path.parent]
    return next((one for one in folders if any((one / name).is_file() for name in ("config.json", *_TOKENIZER))), None)


def open_onnx(path: Path) -> tuple[dict[str, Any], OnnxSource, Path | None]:
    """(HuggingFace config, tensors, folder of the tokenizer). ValueError names the file and says what was found."""
    file = read_onnx(path)
    broken = [f"{one.name}: {one.problem}" for one in file.constants.values() if one.problem and one.type in DTYPES]
    if broken:
        more = [f"... and {len(broken) - _MOST} more"] if len(broken) > _MOST else []
        raise ValueError("\n  ".join([f"{path}: constants cannot be read:", *broken[:_MOST], *more]))
    home = home_of(path)
    try:
        given = _given_config(home)
        if given is not None:
            _expect_known(find_family(given))  # its reason goes before what the graph lacks
        encoder, pieces = trace(Graph(file))
        config = document(encoder) if given is None else fit(given, encoder)
        family = find_family(config)
        head = find_head(pieces, encoder, file.outputs)
        row = None if head is None else row_of(head, family, encoder, config, given is not None)
        if head is not None and row is not None:
            config = described(head, row, family) | config
            if row.dense and head.dense is encoder.pooler:  # a tanh, but no pooler
                encoder.pooler, encoder.pooled = None, ""
        numbers = family.config(config)
        wrong = differences(numbers, encoder)
        if wrong:
            said = "what a config for it would say" if given is None else f"{home}/config.json"
            raise ValueError("\n  ".join([f"{said} does not fit the graph:", *wrong]))
        names = _names(family, numbers, encoder)
        if head is None or row is None:
            head = None
        else:
            names |= _head_names(head, row)
        source = OnnxSource(file, encoder, head, names)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        # Of a flipped bit anything may come; the graph's own words are the best there is to say about it.
        raise ValueError(
            f"{path}: no BERT-family encoder that ftbert can read: {error}\n"
            f"  The graph ({file.producer or 'producer unknown'}) has {histogram(file.nodes)}."
        ) from error
    return config, source, home


def _expect_known(family: Family) -> None:
    biases = {"attention.relative_bias", "layers.{i}.attention.relative_bias"} & family.names.keys()
    reason = ""
    if "attention.positions" in family.names:
        reason = "its scores have products with a table of positions"
    elif "rotary" in family.positions:
        reason = "its words' rows are scaled by the share of masked tokens"
    elif family.fixed.get("positions.kind") == "none":
        reason = "its scores have biases by distance in place of positions" if biases else "its positions are rotary"
    if reason:
        raise ValueError(f"model type {family.name!r} is read from its own weights, not from an ONNX graph: {reason}")


def _given_config(home: Path | None) -> dict[str, Any] | None:
    if home is None or not (home / "config.json").is_file():
        return None
    found = read_json_object(home / "config.json")
    return None if found.get("format") == FORMAT else text_part(found)


def _head_names(head: GraphHead, row: HeadRow) -> dict[str, Matrix]:
    """As `_names`, of the head. What stands before its scores is the pooler where its class reads that."""
    parts = {"out": head.out} | ({"dense": head.dense} if row.dense and head.dense is not None else {})
    found = {row.names(f"{part}.weight")[0]: linear.weight for part, linear in parts.items()}
    return found | {
        row.names(f"{part}.bias")[0]: Matrix(linear.bias or computed("", np.zeros(linear.n, np.float32)))
        for part, linear in parts.items()
    }


def _names(family: Family, config: ModelConfig, encoder: Encoder) -> dict[str, Matrix]:
    """HuggingFace's name -> constant, through the family's table."""
    found: dict[str, Matrix] = {}

    def add(ours: str, parts: list[Matrix]) -> None:
        try:
            names = family.source_names(ours)
        except KeyError:
            raise ValueError(f"it has {ours}, which {family.name} has not") from None
        found.update(zip(names, parts, strict=True))

    def linear(ours: str, *parts: Linear) -> None:
        add(f"{ours}.weight", [part.weight for part in parts])
        # An exporter that folds constants drops a bias of zeros.
        add(f"{ours}.bias", [Matrix(part.bias or computed("", np.zeros(part.n, np.float32))) for part in parts])

    def norm(ours: str, one: Norm) -> None:
        add(f"{ours}.weight", [Matrix(one.weight)])
        add(f"{ours}.bias", [Matrix(one.bias)])

    for what in ("word", "position", "token_type"):
        if (table := getattr(encoder.tables, what)) is not None:
            add(f"embeddings.{what}", [Matrix(table)])
    if encoder.embedding_norm is not None:
        norm("embeddings.norm", encoder.embedding_norm)
    if encoder.projection is not None:
        linear("embeddings.projection", encoder.projection)
    if encoder.relative_bias is not None:
        add("attention.relative_bias", [Matrix(encoder.relative_bias)])
    firsts = {c.weights_of: encoder.layers[-1 - i] for i, c in enumerate(reversed(config.layers))}
    for weights, layer in firsts.items():
        ours = f"layers.{weights}"
        linear(f"{ours}.attention.qkv", layer.attention.query, layer.attention.key, layer.attention.value)
        linear(f"{ours}.attention.out", layer.out)
        norm(f"{ours}.attention.norm", layer.attention_norm)
        linear(f"{ours}.ffn.up", layer.up)
        linear(f"{ours}.ffn.down", layer.down)
        norm(f"{ours}.ffn.norm", layer.ffn_norm)
    if encoder.final_norm is not None:
        norm("final_norm", encoder.final_norm)
    if encoder.pooler is not None and "pooler" in family.names:
        linear("pooler", encoder.pooler)
    return found
