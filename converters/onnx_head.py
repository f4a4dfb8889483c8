"""The head of a reranker or classifier behind the encoder in an ONNX graph, whose scores are one of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftbert.checkpoint import activations
from ftbert.converters.family import Config, Family
from ftbert.converters.head_tables import HeadRow, rows_of
from ftbert.converters.onnx_activation import ELEMENTWISE, activation, evaluated
from ftbert.converters.onnx_encoder import Encoder, Pieces, first_tokens
from ftbert.converters.onnx_pieces import Linear, behind

_SEQUENCE, _TOKENS = "sequence_classification", "token_classification"


@dataclass(frozen=True)
class GraphHead:
    """scores = out(activation(dense(x))): of each token for `_TOKENS`, else x is the first token or, without `dense`,
    the pooler's output. output: the name of the graph's output. activation: "none" without `dense`."""

    task: str
    output: str
    out: Linear
    dense: Linear | None = None
    activation: str = "none"


def find_head(pieces: Pieces, encoder: Encoder, outputs: Iterable[str]) -> GraphHead | None:
    """None where no output is made so, or several are."""
    found = [head for name in outputs for head in _heads(pieces, encoder, name)]
    return found[0] if len(found) == 1 else None


def _heads(pieces: Pieces, encoder: Encoder, output: str) -> Iterator[GraphHead]:
    graph = pieces.graph
    out = pieces.by_output.get(graph.before_layout(graph.resolved(output)))
    if out is None:
        return
    if out.input == encoder.hidden:
        yield GraphHead(_TOKENS, output, out)
        return
    for dense in first_tokens(pieces, encoder.hidden):
        if out in behind(graph, dense.output, pieces.readers, ELEMENTWISE):
            yield GraphHead(_SEQUENCE, output, out, dense, activation(graph, dense.output, out.input))


def row_of(head: GraphHead, family: Family, encoder: Encoder, config: Config, given: bool) -> HeadRow | None:
    """The row of the head's table that it is, None where it is none of this family's or of the class that the config
    names. given: whether the config lies beside the graph. ValueError where the class has another activation."""
    row = next((one.formed(config) for one in rows_of(family.name) if one.task == head.task), None)
    named = (config.get("architectures") or [""])[0] if given else ""
    if row is None or not str(named or row.architecture).endswith(row.architecture):
        return None
    if head.task == _TOKENS:
        return row if not row.dense and row.reads(config) == "tokens" else None
    if row.reads(config) == "pooler":
        return row if head.dense is encoder.pooler else None
    if not row.dense or row.reads(config) != "first":
        return None
    wanted, known = row.activated(config), activations()
    if known.get(wanted, wanted) != known.get(head.activation, head.activation):
        raise ValueError(f"the head for {row.task}: its class has activation {wanted}, the graph {head.activation}")
    return row


def described(head: GraphHead, row: HeadRow, family: Family) -> dict[str, Any]:
    """What a config.json for it says."""
    from transformers.models.auto import modeling_auto

    tables = {
        _SEQUENCE: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        _TOKENS: modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    return {"architectures": [tables[row.task][family.name]], "num_labels": head.out.n}


def scores(head: GraphHead, weights: dict[str, np.ndarray], hidden: np.ndarray, pooled: np.ndarray) -> np.ndarray:
    """float32, by the checkpoint's tensors. hidden: [batch, seq, hidden]. pooled: [batch, hidden], where `weights` has
    nothing before `out`. weights: by the last two parts of their names."""
    x = hidden if head.task == _TOKENS else hidden[:, 0] if "dense.weight" in weights else pooled
    if "dense.weight" in weights:
        x = evaluated(head.activation, x @ weights["dense.weight"].T + weights["dense.bias"])
    return x @ weights["out.weight"].T + weights["out.bias"]
