"""Attention in an ONNX graph: which values are query, key and value, how many heads, what is added to the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ftbert.converters.onnx_graph import LAYOUT, Graph
from ftbert.converters.onnx_pieces import Linear

# Between a projection and the scores, and around the softmax: scaling, masking, moving dimensions, guarding NaN.
_ON_THE_WAY = LAYOUT | {
    "Add", "Sub", "Mul", "Div", "Where", "IsNaN", "Softmax", "Max", "Min", "Clip", "Slice", "Concat",
}  # fmt: skip


@dataclass
class Way:
    """What stood between a value and the Linear or product it came from."""

    end: str
    heads: list[int | None] = field(default_factory=list)  # [batch, seq, heads, head_size] of the innermost Reshape
    scale: float | None = 1.0  # None: computed when the model runs
    added: list[str] = field(default_factory=list)  # masks, and a relative bias
    softmax: bool = False


@dataclass(frozen=True)
class Attention:
    """output = softmax(scale * query @ key^T + added) @ value"""

    query: Linear
    key: Linear
    value: Linear
    output: str
    heads: int
    head_size: int
    added: tuple[str, ...]


def find_attentions(graph: Graph, linears: dict[str, Linear], stream: set[str]) -> list[Attention]:
    """In the graph's order. linears: by output. stream: every value that depends on the tokens' embeddings.

    ValueError says what an attention that was recognised as one lacks.
    """
    found = []
    for node in graph.nodes:
        if node.type == "Attention" and len(node.inputs) >= 3:  # opset 23
            ways = [_walk(graph, name, linears, stream) for name in node.inputs[:3]]
            scores = Way("", scale=node.attributes.get("scale"), added=[name for name in node.inputs[3:4] if name])
            if node.attributes.get("is_causal"):
                raise ValueError("causal attention: this is a decoder")
            found.append(_attention(linears, ways, scores, node.outputs[0], node.attributes.get("q_num_heads")))
        elif node.type == "MatMul" and len(node.inputs) == 2 and all(name in stream for name in node.inputs):
            weights = _walk(graph, node.inputs[0], linears, stream)
            product = graph.producer.get(weights.end)
            if weights.softmax and product is not None and product.type == "MatMul":
                ways = [_walk(graph, name, linears, stream) for name in (*product.inputs, node.inputs[1])]
                found.append(_attention(linears, ways, weights, node.outputs[0], None))
    return found


def _walk(graph: Graph, name: str, linears: dict[str, Linear], stream: set[str]) -> Way:
    """Back from `name` along the values in the stream, to a Linear or to anything that is not on the way."""
    way = Way(name)
    for _ in range(64):
        node = graph.producer.get(way.end)
        if way.end in linears or node is None or node.type not in _ON_THE_WAY:
            break
        data = node.inputs[1:] if node.type == "Where" else node.inputs
        inner = [part for part in data if part in stream]
        if not inner or (node.type in ("Slice", "Concat") and len(set(inner)) != 1):
            break
        outer = [part for part in data if part != inner[0]]
        if node.type == "Softmax":
            way.softmax = True
        elif node.type == "Reshape":
            sides = graph.sizes(node.inputs[1])
            way.heads = sides if len(sides) == 4 else way.heads
        elif node.type in ("Mul", "Div") and outer:
            factor = graph.number(outer[0])
            if way.scale is not None:
                way.scale = None if not factor else way.scale * (factor if node.type == "Mul" else 1 / factor)
        elif node.type in ("Add", "Sub", "Where"):
            way.added += outer
        way.end = inner[0]
    return way


def _attention(
    linears: dict[str, Linear], ways: list[Way], scores: Way, output: str, heads: int | None
) -> Attention:
    projections = [linears.get(way.end) for way in ways]
    missing = [what for what, one in zip(("query", "key", "value"), projections, strict=True) if one is None]
    query, key, value = projections
    if query is None or key is None or value is None:
        raise ValueError(f"attention {output!r}: no Linear makes its {', '.join(missing)}")
    hidden = query.n
    sides = [*ways[0].heads, None, None, None, None][2:4]
    if heads is None:
        heads = sides[0] if sides[0] and sides[0] > 0 else hidden // sides[1] if sides[1] and sides[1] > 0 else None
    if not heads or hidden % heads:
        raise ValueError(f"attention {output!r}: the number of heads is nowhere written (Reshape to {sides})")
    factors = (scores.scale, ways[0].scale, ways[1].scale)
    scale = math.prod(factor for factor in factors if factor is not None)
    if None not in factors and not math.isclose(scale, (hidden // heads) ** -0.5, rel_tol=2e-3):
        raise ValueError(f"attention {output!r}: scores are scaled by {scale:.6g}, not by 1/sqrt({hidden // heads})")
    return Attention(query, key, value, output, heads, hidden // heads, tuple(scores.added))
