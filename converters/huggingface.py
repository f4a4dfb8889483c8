"""A HuggingFace checkpoint seen through the tables: which tensors make ours, and every way in which they do not fit."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ftbert.checkpoint import (
    PROJECTION,
    Checkpoint,
    CheckpointConfig,
    HeadConfig,
    Make,
    ModelConfig,
    TensorSource,
    check_shapes,
    own_class,
    shown,
)
from ftbert.converters.families import find_family
from ftbert.converters.family import Config, Derived, Family
from ftbert.converters.head_tables import HeadRow, find_rows, head_config
from ftbert.converters.left_out import left_out, outside, silent

MERGE = "merge it into the weights with peft's merge_and_unload(), and load the model that this returns"


def recognise(document: Config, source: TensorSource, folder: Path | None) -> Checkpoint:
    """The tensors of `source` under our names. folder: the tokenizer's. ValueError says why a config cannot be run, or
    lists every missing and misshapen tensor, and those left over in the encoder (left_out.py)."""
    family = find_family(document)
    encoder = family.config(document)
    found = source.shapes()
    if adapted := next((name for name in found if ".base_layer." in name or ".lora_" in name), None):
        raise ValueError(f"{source.where}: {adapted} belongs to a PEFT adapter; {MERGE}")
    family = family.spelled(found)
    prefix = _prefix(family, found)
    encoder = _with_frequencies(encoder, family, prefix, source)
    architecture = _architecture(document)
    own = own_class(document)
    layer = None if own is None else own.projection
    if layer is not None and (layer.width or f"{layer.name}.weight" in found):
        rows = [HeadRow(PROJECTION, "", "tokens", layer.name, biases=(("out", "", False),))]
    else:
        rows = find_rows(family.name, architecture, document, found)
    if "pooler" in family.names:
        pooled = any(prefix + theirs in found for theirs in family.source_names("pooler.weight"))
        encoder = replace(encoder, pooler=pooled or any(row.source == "pooler" for row in rows))

    names: dict[str, tuple[str, ...]] = {}
    made: dict[str, Make] = {}
    shapes: dict[str, list[int]] = {}  # theirs -> what it must be
    for ours, shape in encoder.weight_shapes().items():
        row = family.row(ours)
        theirs = [_spelling(prefix + name, found) for name in family.source_names(ours)]
        if ours == "embeddings.word" and theirs[0] not in found:
            theirs = [_tied_head(rows, document, found) or theirs[0]]
        names[ours] = tuple(theirs)
        if isinstance(row, Derived):
            made[ours] = row.make
            shapes |= zip(theirs, row.shapes(encoder, document, shape), strict=True)
        else:
            counts = encoder.stacked_rows(ours) if len(theirs) > 1 else shape[:1]
            shapes |= {name: [count, *shape[1:]] for name, count in zip(theirs, counts, strict=True)}
    heads = []
    for head_row in rows:
        head = _head(head_row, family, document, encoder, source, names["embeddings.word"][0])
        heads.append(head)
        for kind, shape in head.shapes(encoder.hidden).items():
            candidates = [_spelling(name, found) for name in head_row.names(kind)]
            theirs = [name for name in candidates if name in found] or candidates
            names[f"heads.{head.task}.{kind}"] = (theirs[0],)
            shapes[theirs[0]] = shape
    others = outside(family, prefix, found) - shapes.keys()
    made_by_code = {prefix + name: make for name, make in family.made.items() if prefix + name in found}
    check_shapes(source.where, shapes, found, silent(family, found) | made_by_code.keys(), others)
    for name, make in made_by_code.items():
        _expect_made(source, name, make(encoder))
    dropped = left_out(rows, architecture, found, others)
    config = CheckpointConfig(family.name, encoder, document, tuple(heads), dropped)
    return Checkpoint(config, source, names, folder, made)


_STORED_IN_16_BITS = 2**-7  # how far numbers up to 1 may then be from what they were


def _expect_made(source: TensorSource, name: str, wanted: torch.Tensor) -> None:
    """ValueError where a file holds other numbers than the code of its class makes."""
    found = source.read(name).float()
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0, atol=_STORED_IN_16_BITS):
        raise ValueError(
            f"{source.where}: {name} is not what transformers makes of the config ({list(wanted.shape)}); a trained or "
            "longer one is not supported"
        )


def _architecture(document: Config) -> str:
    """The transformers class that the config names first, "" where it names none."""
    names = document.get("architectures") or [""]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise ValueError(f"architectures: expected a list of class names, got {shown(names)}")
    return names[0]


def _head(
    row: HeadRow, family: Family, document: Config, encoder: ModelConfig, source: TensorSource, word: str
) -> HeadConfig:
    found = source.shapes()
    own = next((name for name in row.names("out.weight") if name in found), None)
    # A file may hold the head's matrix although it is the embeddings'; if they differ, they are apart whatever the
    # config says, as transformers has it.
    tied = row.ties(document) and (
        own in (None, word) or (found[own] == found.get(word) and torch.equal(source.read(own), source.read(word)))
    )
    return head_config(row, family, document, encoder, found, tied)


def _tied_head(rows: list[HeadRow], document: Config, found: dict[str, Any]) -> str | None:
    """The matrix of a head that is the embeddings', where a file has it under the head's name alone."""
    names = (name for row in rows if row.ties(document) for name in row.names("out.weight"))
    return next((name for name in names if name in found), None)


def _prefix(family: Family, found: dict[str, Any]) -> str:
    probes = [family.source_names("embeddings.word")[0]]
    if "layers.{i}.attention.qkv" in family.names:  # where a family has layers
        probes.append(family.source_names("layers.0.attention.qkv.weight")[0])
    # Where none fits, complain about the names as they would be without a prefix.
    fitting = (prefix for probe in probes for prefix in family.prefixes if prefix + probe in found)
    return next(fitting, family.prefixes[0])


def _with_frequencies(encoder: ModelConfig, family: Family, prefix: str, source: TensorSource) -> ModelConfig:
    """With the rotary frequencies that a file holds, which may have been rounded when the model was trained."""
    found = source.shapes()
    names = (one for pattern in family.frequencies for one in found if fnmatchcase(one, prefix + pattern))
    name = next(names, None)
    if name is None or not any(layer.attention.rotary for layer in encoder.layers):
        return encoder
    values = source.read(name).double().flatten()
    layers = []
    for layer in encoder.layers:
        rotary = layer.attention.rotary
        if rotary is not None:
            pairs = torch.arange(0, rotary.dims, 2, dtype=torch.float64)
            theta = rotary.theta
            own = torch.tensor(rotary.frequencies) if theta is None else theta ** (-pairs / rotary.dims)
            if len(values) != len(own):
                raise ValueError(f"{source.where}: {name} has {len(values)} frequencies for heads of {rotary.dims}")
            if not torch.allclose(own, values, rtol=1e-6, atol=0):  # more than float32's rounding
                rotary = replace(rotary, theta=None, frequencies=tuple(values.tolist()))
        layers.append(replace(layer, attention=replace(layer.attention, rotary=rotary)))
    return replace(encoder, layers=tuple(layers))


def _spelling(name: str, found: dict[str, Any]) -> str:
    """Checkpoints converted from TensorFlow before 2019 call LayerNorm's tensors gamma and beta."""
    if name not in found and "LayerNorm." in name:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return old if old in found else name
    return name
