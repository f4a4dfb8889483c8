"""What an ONNX graph says about its model, as transformers' config.json; and whether a given config.json agrees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from ftbert.checkpoint import EncoderConfig, activations
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
    """EncoderConfig's entries as the graph has them. ValueError where its layers differ from each other."""
    tables, layers = encoder.tables, encoder.layers
    norms = [one for layer in layers for one in (layer.attention_norm, layer.ffn_norm)]
    norms += [norm for norm in (encoder.embedding_norm, encoder.final_norm) if norm is not None]
    found: dict[str, Any] = {
        "vocab": tables.word.shape[0],
        "hidden": layers[0].out.n,
        "layers": len(layers),
        "heads": _same("numbers of heads", [layer.attention.heads for layer in layers]),
        "head_size": _same("head sizes", [layer.attention.head_size for layer in layers]),
        "inter": _same("feed-forward widths", [layer.up.n for layer in layers]),
        "embedding": tables.word.shape[1],
        "max_positions": tables.position.shape[0] if tables.position is not None else 0,
        "token_types": tables.token_type.shape[0] if tables.token_type is not None else 0,
        "layer_norm_eps": _same("eps of LayerNorm", [norm.eps for norm in norms]),
        "activation": _same("activations", [layer.activation for layer in layers]),
        "norm_place": encoder.norm_place,
        "positions": tables.positions,
    }
    if tables.positions == "from_padding":
        found["padding_id"] = tables.padding_id
    return found


def _same(what: str, values: list[Any]) -> Any:
    if len(set(values)) > 1:
        raise ValueError(f"its layers have different {what}: {', '.join(map(str, values))}")
    return values[0]


def document(encoder: Encoder) -> dict[str, Any]:
    """A config.json for transformers' model of this kind."""
    family, known = FAMILIES[guess_family(encoder)], {"padding_id": 0} | facts(encoder)
    found = {key: known[ours] for ours, (key, _) in family.keys.items() if ours not in family.fixed}
    found["model_type"] = family.name
    if family.name == "albert":
        found["num_hidden_groups"], found["inner_group_num"] = distinct_layers(encoder), 1
    if encoder.relative_bias is not None:
        found["relative_attention_num_buckets"] = encoder.relative_bias.shape[0]
    return found


def fit(given: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """`given`, with the tables' heights as the graph has them where the export has cut them."""
    known = facts(encoder)
    cut = {"max_position_embeddings": known["max_positions"], "type_vocab_size": known["token_types"]}
    return given | {key: rows for key, rows in cut.items() if isinstance(given.get(key), int) and 0 < rows < given[key]}


def differences(config: EncoderConfig, encoder: Encoder) -> list[str]:
    """Every entry in which the config and the graph disagree, in words."""
    wrong = []
    for key, value in facts(encoder).items():
        said = getattr(config, key)
        if key == "activation":
            # Spellings of one function: the graph cannot know which of them the author wrote.
            same = activations().get(said, said) == activations().get(value, value)
        elif key == "layer_norm_eps":
            same = math.isclose(said, value, rel_tol=1e-3)
        else:
            same = said == value
        if not same:
            wrong.append(f"{key}: the config says {said}, the graph {value}")
    return wrong
