"""Attention in an ONNX graph: which values are query, key and value, how many heads, what is added to the scores."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftbert.converters.onnx_graph import LAYOUT, Graph
from ftbert.converters.onnx_pieces import Linear

# Between a projection and the scores: scaling, moving dimensions. Around the softmax: masking and guarding NaN too.
# What exactly they compute is seen when the graph is evaluated.
_TO_PROJECTION = LAYOUT | {"Mul", "Div"}
_TO_SCORES = _TO_PROJECTION | {"Add", "Sub", "Where", "IsNaN", "Softmax"}
# A file of few bytes can share the weights of any number of layers.
_MOST_LAYERS = 1024


@dataclass
class Way:
    """What stood between a value and the Linear or product it came from."""

    end: str
    heads: list[int | None] = field(default_factory=list)  # [batch, seq, heads, head_size] of the innermost Reshape
    added: list[str] = field(default_factory=list)  # masks, and a relative bias
    softmax: bool = False


@dataclass(frozen=True)
class Attention:
    """output = softmax(query @ key^T / sqrt(head_size) + added) @ value"""

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
            ways = [_walk(graph, name, linears, stream, _TO_PROJECTION) for name in node.inputs[:3]]
            added = [name for name in node.inputs[3:4] if name]
            found.append(_attention(linears, ways, added, node.outputs[0], node.attributes.get("q_num_heads")))
        elif node.type == "MatMul" and len(node.inputs) == 2 and all(name in stream for name in node.inputs):
            weights = _walk(graph, node.inputs[0], linears, stream, _TO_SCORES)
            product = graph.producer.get(weights.end)
            if weights.softmax and product is not None and product.type == "MatMul" and len(product.inputs) == 2:
                parts = (*product.inputs, node.inputs[1])
                ways = [_walk(graph, name, linears, stream, _TO_PROJECTION) for name in parts]
                found.append(_attention(linears, ways, weights.added, node.outputs[0], None))
        if len(found) > _MOST_LAYERS:
            raise ValueError(f"it has more than {_MOST_LAYERS} attentions")
    return found


def _walk(graph: Graph, name: str, linears: dict[str, Linear], stream: set[str], allowed: set[str]) -> Way:
    """Back from `name` along the values in the stream, to a Linear or to anything that is not allowed on the way."""
    way = Way(name)
    for _ in range(64):
        node = graph.producer.get(way.end)
        if way.end in linears or node is None or node.type not in allowed:
            break
        data = node.inputs[1:] if node.type == "Where" else node.inputs
        inner = {part for part in data if part in stream}
        if len(inner) != 1:
            break
        way.end = inner.pop()
        if node.type == "Softmax":
            way.softmax = True
        elif node.type == "Reshape" and len(node.inputs) == 2:
            sides = graph.sizes(node.inputs[1])
            way.heads = sides if len(sides) == 4 else way.heads
        elif node.type in ("Add", "Sub", "Where"):
            way.added += [part for part in data if part != way.end]
    return way


def _attention(
    linears: dict[str, Linear], ways: list[Way], added: list[str], output: str, heads: int | None
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
    if not isinstance(heads, int) or heads <= 0 or hidden % heads:
        raise ValueError(f"attention {output!r}: the number of heads is nowhere written (Reshape to {sides})")
    return Attention(query, key, value, output, heads, hidden // heads, tuple(added))
