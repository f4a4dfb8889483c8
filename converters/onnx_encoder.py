"""From an ONNX graph to an encoder: its numbers, and which constant is which of its weights.

Nothing here depends on names. The walk starts at the embedding tables and follows attention, residual sums and
LayerNorms from layer to layer, so anonymous initialisers are as good as named ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ftbert.converters.onnx_activation import ELEMENTWISE, activation
from ftbert.converters.onnx_attention import Attention, find_attentions
from ftbert.converters.onnx_embeddings import Tables, find_lookups, find_tables, is_input
from ftbert.converters.onnx_file import Constant
from ftbert.converters.onnx_fused import is_in_8_bits
from ftbert.converters.onnx_graph import Graph
from ftbert.converters.onnx_pieces import Linear, Norm, behind, find_linears, find_norms

_T = TypeVar("_T")


@dataclass(frozen=True)
class Layer:
    attention: Attention
    out: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    ffn_norm: Norm
    activation: str
    output: str


@dataclass
class Encoder:
    """What the walk found. relative_bias: [buckets, heads], looked up by distance and added to the scores.

    hidden, pooled: the values that are the last hidden state and the pooler's output. mask: the input that is the
    attention mask. "" where there is none.
    """

    tables: Tables
    embedding_norm: Norm | None
    projection: Linear | None
    norm_place: Literal["post", "pre"]
    layers: list[Layer] = field(default_factory=list)
    final_norm: Norm | None = None
    pooler: Linear | None = None
    relative_bias: Constant | None = None
    hidden: str = ""
    pooled: str = ""
    mask: str = ""


class Pieces:
    """The graph's Linears, LayerNorms and table look-ups, by the values they connect."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        linears = find_linears(graph)
        norms = find_norms(graph)
        self.by_output = {linear.output: linear for linear in linears}
        self.readers: dict[str, list[Linear]] = {}
        for linear in linears:
            self.readers.setdefault(linear.input, []).append(linear)
        self.norm_of = {norm.output: norm for norm in norms}
        self.norms_on: dict[str, list[Norm]] = {}
        for norm in norms:
            self.norms_on.setdefault(graph.before_layout(norm.input), []).append(norm)
        self.lookups = find_lookups(graph)
        self.stream = graph.reach(name for name, (_, index) in self.lookups.items() if is_input(graph, index))

    def residual(self, linear: Linear, what: str) -> tuple[str, str]:
        """(sum, the other operand) of the Add behind it; ValueError where there is none."""
        name = self.graph.before_layout(linear.output)
        for view in self.graph.views(linear.output):
            for node in self.graph.consumers.get(view, []):
                parts = [self.graph.before_layout(part) for part in node.inputs]
                if node.type == "Add" and len(parts) == 2 and all(part in self.stream for part in parts):
                    return node.outputs[0], parts[1] if parts[0] == name else parts[0]
        raise ValueError(f"{what}: expected a residual sum behind it")


def trace(graph: Graph) -> tuple[Encoder, Pieces]:
    """The encoder, and what it was found in. ValueError says which piece of an encoder is missing."""
    kinds = {node.type for node in graph.nodes}
    if quantised := sorted(filter(is_in_8_bits, kinds)):
        raise ValueError(
            f"it is quantised with {', '.join(quantised)}, which ftbert does not read; give the plain export, or what "
            "onnxruntime.quantization.quantize_dynamic makes of it"
        )
    pieces = Pieces(graph)
    if not pieces.stream:
        raise ValueError("no embedding: no table [vocabulary, embedding] is looked up by an input")
    attentions = find_attentions(graph, pieces.by_output, pieces.stream)
    if not attentions:
        raise ValueError("no attention: no softmax over the product of two Linears of the embeddings")
    encoder = _embeddings(pieces, attentions[0])
    for i, attention in enumerate(attentions):
        try:
            encoder.layers.append(_layer(pieces, attention, encoder.norm_place == "post"))
        except ValueError as error:
            raise ValueError(f"layer {i}: {error}") from error
    value = encoder.layers[-1].output
    if encoder.norm_place == "pre":
        encoder.final_norm = _one(pieces.norms_on.get(value, []), "LayerNorm after the last layer")
        value = encoder.final_norm.output
    encoder.hidden = value
    encoder.pooler, encoder.pooled = _pooler(pieces, value)
    encoder.relative_bias = _relative_bias(pieces, attentions)
    encoder.mask = _mask(graph, encoder.tables, encoder.hidden)
    return encoder, pieces


def _one(found: list[_T], what: str) -> _T:
    if len(found) != 1:
        raise ValueError(f"expected one {what}, found {len(found)}")
    return found[0]


def _embeddings(pieces: Pieces, first: Attention) -> Encoder:
    """The tables behind the first layer, and where its LayerNorms are."""
    value = first.query.input
    out = _one(pieces.readers.get(first.output, []), "Linear on the attention's output")
    _, other = pieces.residual(out, "layer 0: attention")
    norm_place: Literal["post", "pre"] = "post"
    if other != value:
        if value not in pieces.norm_of:
            raise ValueError(f"layer 0: its residual sum takes {other!r}, its attention {value!r}")
        norm_place, value = "pre", pieces.norm_of[value].input
    projection = pieces.by_output.get(value)
    value = projection.input if projection is not None else value
    norm = pieces.norm_of.get(value)
    total = norm.input if norm is not None else value
    return Encoder(find_tables(pieces.graph, total, pieces.lookups), norm, projection, norm_place)


def _layer(pieces: Pieces, attention: Attention, post: bool) -> Layer:
    """The layer whose attention this is. That its parts take what they should is seen when the graph is evaluated."""
    first_norm = pieces.norm_of.get(attention.query.input)
    out = _one(pieces.readers.get(attention.output, []), "Linear on the attention's output")
    middle, _ = pieces.residual(out, "attention")
    second_norm = _one(pieces.norms_on.get(middle, []), "LayerNorm after the attention")
    up = _one(pieces.readers.get(second_norm.output, []), "Linear on it (two are a gated feed-forward)")
    down = _one(behind(pieces.graph, up.output, pieces.readers, ELEMENTWISE), "Linear behind the activation")
    kind = activation(pieces.graph, up.output, down.input)
    end, _ = pieces.residual(down, "feed-forward")
    if not post:
        if first_norm is None:
            raise ValueError("there is no LayerNorm before the attention")
        return Layer(attention, out, first_norm, up, down, second_norm, kind, end)
    last_norm = _one(pieces.norms_on.get(end, []), "LayerNorm after the feed-forward")
    return Layer(attention, out, second_norm, up, down, last_norm, kind, last_norm.output)


def first_tokens(pieces: Pieces, hidden: str) -> list[Linear]:
    """The Linears over the first token alone."""
    found, graph = [], pieces.graph
    for source, linears in pieces.readers.items():
        node = graph.producer.get(source)
        picks = node is not None and node.type in ("Gather", "Slice") and graph.before_layout(node.inputs[0]) == hidden
        if picks and node is not None and (node.type == "Slice" or graph.number(node.inputs[1]) == 0):
            found += linears
    return found


def _pooler(pieces: Pieces, hidden: str) -> tuple[Linear | None, str]:
    """The Linear over the first token with a tanh behind it, and the tanh's output."""
    for linear in first_tokens(pieces, hidden):
        for reader in pieces.graph.consumers.get(linear.output, []):
            if reader.type == "Tanh":
                return linear, reader.outputs[0]
    return None, ""


def _relative_bias(pieces: Pieces, attentions: list[Attention]) -> Constant | None:
    """The table behind what is added to the scores. ValueError where there are several."""
    found: dict[str, Constant] = {}
    for node in pieces.graph.ancestors(*{name for attention in attentions for name in attention.added}):
        table = pieces.lookups.get(node.outputs[0]) if node.outputs else None
        if table is not None and node.outputs[0] not in pieces.stream:
            found[table[0].name] = table[0]
    if len(found) > 1:
        raise ValueError(f"{len(found)} tables of relative positions; ftbert knows one for all layers")
    return next(iter(found.values()), None)


def _mask(graph: Graph, tables: Tables, hidden: str) -> str:
    """ValueError where the graph's inputs are not those of an encoder."""
    rest = [name for name in graph.inputs if name not in (tables.ids, tables.types) and "type" not in name]
    masks = [name for name in rest if "mask" in name] or [name for name in rest if hidden in graph.reach([name])]
    if len(masks) > 1:
        raise ValueError(f"which of its inputs is the attention mask: {', '.join(sorted(masks))}?")
    return masks[0] if masks else ""
