"""What an ONNX graph says about its model, as transformers' config.json; and whether a given config.json agrees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ftbert.checkpoint import ModelConfig, activations
from ftbert.converters.families import FAMILIES
from ftbert.converters.onnx_encoder import Encoder


def distinct_layers(encoder: Encoder) -> int:
    """How many sets of weights the layers have, in runs: ALBERT's share. By content, for exporters make copies."""
    weights = [layer.up.weight.constant for layer in encoder.layers]
    return 1 + sum(
        one is not other and not np.array_equal(one.read(), other.read()) for one, other in itertools.pairwise(weights)
    )


def guess_family(encoder: Encoder) -> str:
    """transformers' model_type, from what only that family does."""
    tables = encoder.tables
    if encoder.relative_bias is not None:
        return "mpnet"
    if encoder.norm_place == "pre":
        return "roberta-prelayernorm" if tables.positions == "from_padding" else "megatron-bert"
    if tables.positions == "from_padding":
        return "roberta"
    if encoder.projection is not None:
        if distinct_layers(encoder) < len(encoder.layers):
            return "albert"
        return "electra" if encoder.pooler is None else "rembert"
    return "bert" if tables.token_type is not None else "distilbert"


def facts(encoder: Encoder) -> dict[str, Any]:
    """Entries of an encoder's config as the graph has them, by their path (family.py); of "layer" one for each."""
    tables, layers = encoder.tables, encoder.layers
    found: dict[str, Any] = {
        "vocab": tables.word.shape[0],
        "hidden": layers[0].out.n,
        "layers": len(layers),
        "layer.attention.heads": [layer.attention.heads for layer in layers],
        "layer.attention.head_size": [layer.attention.head_size for layer in layers],
        "layer.ffn.inter": [layer.up.n for layer in layers],
        "embedding": tables.word.shape[1],
        "positions.rows": tables.position.shape[0] if tables.position is not None else 0,
        "token_types": tables.token_type.shape[0] if tables.token_type is not None else 0,
        "layer.attention_norm.eps": [layer.attention_norm.eps for layer in layers],
        "layer.ffn_norm.eps": [layer.ffn_norm.eps for layer in layers],
        "layer.ffn.activation": [layer.activation for layer in layers],
        "layer.norm_place": [encoder.norm_place] * len(layers),
        "positions.kind": tables.positions,
    }
    for name, norm in (("embedding_norm", encoder.embedding_norm), ("final_norm", encoder.final_norm)):
        if norm is not None:
            found[f"{name}.eps"] = norm.eps
    if tables.positions == "from_padding":
        found["padding_id"] = tables.padding_id
    return found


def document(encoder: Encoder) -> dict[str, Any]:
    """A config.json for transformers' model of this kind, which says once what holds for all layers."""
    family, known = FAMILIES[guess_family(encoder)], {"padding_id": 0} | facts(encoder)
    found: dict[str, Any] = {"model_type": family.name}
    for path, (key, _) in family.keys.items():
        if path in family.fixed or path not in known:
            continue
        values = known[path] if isinstance(known[path], list) else [known[path]]
        values += [found[key]] if key in found else []
        if len(set(values)) > 1:
            raise ValueError(f"it has different values of {path.removeprefix('layer.')}: {', '.join(map(str, values))}")
        found[key] = values[0]
    if family.name == "albert":
        found["num_hidden_groups"], found["inner_group_num"] = distinct_layers(encoder), 1
    if encoder.relative_bias is not None:
        found["relative_attention_num_buckets"] = encoder.relative_bias.shape[0]
    return found


def fit(given: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """`given`, with the tables' heights as the graph has them where the export has cut them."""
    known = facts(encoder)
    cut = {"max_position_embeddings": known["positions.rows"], "type_vocab_size": known["token_types"]}
    return given | {key: rows for key, rows in cut.items() if isinstance(given.get(key), int) and 0 < rows < given[key]}


def differences(config: ModelConfig, encoder: Encoder) -> list[str]:
    """Every entry in which the config and the graph disagree, in words."""
    wrong = []
    for path, value in facts(encoder).items():
        for said, found in zip(_said(config, path), value if isinstance(value, list) else [value], strict=False):
            words = f"{path.removeprefix('layer.')}: the config says {said}, the graph {found}"
            if not _same(path, said, found) and words not in wrong:
                wrong.append(words)
    return wrong


def _said(config: ModelConfig, path: str) -> list[Any]:
    """What the config says there, of "layer" once for each."""
    first, *rest = path.split(".")
    if path == "layers":
        return [config.depth]
    values: list[Any] = list(config.layers) if first == "layer" else [getattr(config, first)]
    for key in rest:
        values = [None if value is None else getattr(value, key) for value in values]
    return values


def _same(path: str, said: Any, found: Any) -> bool:
    if path.endswith("activation"):
        # Spellings of one function: the graph cannot know which of them the author wrote.
        return bool(activations().get(said, said) == activations().get(found, found))
    if path.endswith("eps"):
        return said is not None and math.isclose(said, found, rel_tol=1e-3)
    return bool(said == found)
