"""Nodes that onnxruntime's optimisers have fused, taken apart again: what they compute as ONNX's own operators.

SkipLayerNormalization, EmbedLayerNormalization, BiasGelu, FastGelu, Attention, MultiHeadAttention, FusedMatMul, and
FusedGemm; of weights in 8 bits QAttention and QEmbedLayerNormalization: of the domain com.microsoft, as
docs/ContribOperators.md of onnxruntime has them. Values keep their names. Weights stay where they are: an Attention's
one matrix is read by a Slice for each of query, key and value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

DOMAIN = "com.microsoft"
_STANDARD = ("", "ai.onnx")
# Of that domain, and read as they are: activations by what they compute, and products of integers.
_READ = frozenset({"Gelu", "QuickGelu", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"})
# In the names of ops that compute in 8 bits, or keep weights in 8 bits or fewer.
_IN_8_BITS = ("quant", "nbits", "bnb4", "qlinear", "qattention", "qgemm", "qmoe", "qembed", "integer")
_MASKED = -10000.0  # onnxruntime's mask_filter_value where the node has none


def is_in_8_bits(operator: str) -> bool:
    return any(part in operator.lower() for part in _IN_8_BITS)


def unfuse(model: Any) -> bool:
    """Changes `model`. True where an attention is told how many tokens each row has, and attends to so many first ones.
    ValueError names an operator that is not known, or the input of one that is not computed here."""
    for node in model.graph.node:
        known = node.op_type in _READ or node.op_type in _APART or is_in_8_bits(node.op_type)
        if node.domain not in (*_STANDARD, DOMAIN) or (node.domain == DOMAIN and not known):
            raise ValueError(f"operator {node.op_type!r} of the domain {node.domain!r} is none that ftbert knows")
    if not any(node.domain == DOMAIN and node.op_type in _APART for node in model.graph.node):
        return False
    rewriting = _Rewriting(model.graph)
    rewriting.run()
    return rewriting.counts


class _Rewriting:
    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.shapes = {one.name: tuple(one.dims) for one in graph.initializer}
        self.maker = {name: node for node in graph.node for name in node.output}
        self.nodes: list[Any] = []  # the graph to come
        self.made = 0
        self.counts = False
        self.numbers: dict[tuple[Any, ...], str] = {}

    def run(self) -> None:
        for node in self.graph.node:
            apart = _APART.get(node.op_type) if node.domain == DOMAIN else None
            if apart is None:
                self.nodes.append(node)
            else:
                apart(self, node, {one.name: one for one in node.attribute})
        read = Counter([one.name for one in self.graph.output])
        read.update(name for node in self.nodes for name in node.input)
        kept = []
        for node in reversed(self.nodes):
            # What stood before a QAttention, and outputs that nobody reads.
            if node.op_type == "DynamicQuantizeLinear" and not any(read[name] for name in node.output):
                read.subtract(node.input)
            else:
                kept.append(_copy(node))
        del self.graph.node[:]
        self.graph.node.extend(reversed(kept))

    def make(self, kind: str, *inputs: str, named: str = "", **attributes: Any) -> str:
        """A node of ONNX's own, and the name of its output."""
        from onnx import helper

        self.made += 1
        name = named or f"ftbert/{kind}/{self.made}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, values: Any, kind: Any = np.int64) -> str:
        from onnx import numpy_helper

        found = np.asarray(values, kind)
        key = (found.dtype.str, found.shape, found.tobytes())
        if key not in self.numbers:
            self.numbers[key] = f"ftbert/number/{len(self.numbers)}"
            self.graph.initializer.append(numpy_helper.from_array(found, self.numbers[key]))
        return self.numbers[key]

    def part(self, name: str, begin: int, end: int, axis: int) -> str:
        return self.make("Slice", name, self.constant([begin]), self.constant([end]), self.constant([axis]))

    def sum(self, *names: str) -> str:
        total, *rest = [name for name in names if name]
        for name in rest:
            total = self.make("Add", total, name)
        return total


_Attributes = dict[str, Any]


def _copy(node: Any) -> Any:
    from onnx import NodeProto

    made = NodeProto()
    made.CopyFrom(node)
    return made


def _refuse(node: Any, what: str) -> ValueError:
    return ValueError(f"{node.op_type} {next(iter(node.output), '')!r}: {what} is not supported")


def _inputs(node: Any, count: int, most: int) -> list[str]:
    """Padded to `count`; ValueError where there is one past the first `most`."""
    given = [*node.input]
    if any(given[most:]):
        raise _refuse(node, f"input {most + next(i for i, name in enumerate(given[most:]) if name)}")
    return (given + [""] * count)[:count]


def _expect_off(node: Any, attributes: _Attributes, *names: str) -> None:
    for name in names:
        if name in attributes and attributes[name].i:
            raise _refuse(node, f"{name} {attributes[name].i}")


def _norm(of: _Rewriting, node: Any, attributes: _Attributes, total: str, gamma: str, beta: str) -> None:
    eps = attributes["epsilon"].f if "epsilon" in attributes else 1e-12
    if not beta:
        raise _refuse(node, "a norm without a bias")
    of.make("LayerNormalization", total, gamma, beta, named=node.output[0], axis=-1, epsilon=eps)


def _skip_layer_norm(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    value, skip, gamma, beta, bias = _inputs(node, 5, 5)
    if any(node.output[1:3]):
        raise _refuse(node, "an output of mean or variance")
    biased = of.sum(value, bias)
    named = node.output[3] if len(node.output) > 3 else ""
    _norm(of, node, attributes, of.make("Add", biased, skip, named=named), gamma, beta)


def _embed_layer_norm(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    ids, types, word, position, segment, gamma, beta, mask, given = _inputs(node, 9, 9)
    if given:
        raise _refuse(node, "an input of position ids")
    _embed(of, node, attributes, ids, types, [word, segment, position, gamma, beta], mask)


def _quantised_embed(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    ids, types, word, position, segment, gamma, beta, mask, *rest = _inputs(node, 18, 18)
    stored = ((word, 0), (segment, 2), (position, 1), (gamma, 3), (beta, 4))
    floats = [of.make("DequantizeLinear", one, rest[i], rest[5 + i]) if one else "" for one, i in stored]
    _embed(of, node, attributes, ids, types, floats, mask)


def _embed(
    of: _Rewriting, node: Any, attributes: _Attributes, ids: str, types: str, weights: list[str], mask: str
) -> None:
    """weights: the tables of words, token types and positions, and the norm's. mask: "" where there is none."""
    word, segment, position, gamma, beta = weights
    if len(node.output) > 1 and node.output[1]:
        if mask:  # how many tokens each row has: onnxruntime's Attention then takes those before it
            of.make("ReduceSum", mask, of.constant([1]), named=node.output[1], keepdims=0)
        elif any(node.output[1] in other.input for other in of.graph.node):
            raise _refuse(node, "an output of lengths without a mask")
    # Rows 0, 1, ... of the table of positions, as many as there are columns of ids.
    tables = [of.make("Gather", word, ids), of.make("Gather", position, _columns(of, ids))]
    if types:
        tables.insert(1, of.make("Gather", segment, types))
    *first, last = tables
    named = node.output[2] if len(node.output) > 2 else ""
    _norm(of, node, attributes, of.make("Add", of.sum(*first), last, named=named), gamma, beta)


def _gelu(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    """By operators that every opset has: x / 2 (1 + erf(x / sqrt 2)), and by tanh."""
    value, bias = _inputs(node, 2, 2)
    x = of.sum(value, bias)

    def times(one: str, number: float) -> str:
        return of.make("Mul", one, of.constant(number, np.float32))

    if node.op_type == "FastGelu":
        cubed = of.make("Mul", of.make("Mul", x, x), times(x, 0.044715))
        found = of.make("Tanh", times(of.make("Add", x, cubed), math.sqrt(2 / math.pi)))
    else:
        found = of.make("Erf", times(x, math.sqrt(0.5)))
    of.make("Mul", times(x, 0.5), of.make("Add", found, of.constant(1, np.float32)), named=node.output[0])


def _matmul(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    one, other = _inputs(node, 2, 2)
    _expect_off(node, attributes, "transBatchA", "transBatchB", "transA")
    if "transB" in attributes and attributes["transB"].i:
        if len(of.shapes.get(other, ())) != 2:
            raise _refuse(node, "transB of a value that is no constant matrix")
        other = of.make("Transpose", other, perm=[1, 0])
    alpha = attributes["alpha"].f if "alpha" in attributes else 1.0
    named = node.output[0] if alpha == 1 else ""
    product = of.make("MatMul", one, other, named=named)
    if alpha != 1:
        of.make("Mul", product, of.constant(alpha, np.float32), named=node.output[0])


def _gemm(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    kind = attributes["activation"].s.decode("utf-8", "replace") if "activation" in attributes else ""
    if kind not in ("", "Tanh", "Relu", "Sigmoid"):
        raise _refuse(node, f"activation {kind!r}")
    numbers = {name: attributes[name].f for name in ("alpha", "beta") if name in attributes}
    turned = {name: attributes[name].i for name in ("transA", "transB") if name in attributes}
    product = of.make("Gemm", *node.input, named="" if kind else node.output[0], **numbers, **turned)
    if kind:
        of.make(kind, product, named=node.output[0])


def _attention(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    value, weight, bias, mask, past, added, past_length = _inputs(node, 7, 7)
    if past or past_length:
        raise _refuse(node, "an input of past keys")
    _projected(of, node, attributes, value, weight, bias, mask, added)


def _quantised_attention(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    value, weight, bias, _, scale, mask, _, zero, past = _inputs(node, 9, 9)
    maker = of.maker.get(value)
    if maker is None or maker.op_type != "DynamicQuantizeLinear":
        raise _refuse(node, "an input that no DynamicQuantizeLinear makes")
    if past:
        raise _refuse(node, "an input of past keys")
    floats = of.make("DequantizeLinear", weight, scale, *([zero] if zero else []), axis=1)
    of.shapes[floats] = of.shapes.get(weight, ())
    _projected(of, node, attributes, maker.input[0], floats, bias, mask, "")


def _projected(
    of: _Rewriting, node: Any, attributes: _Attributes, value: str, weight: str, bias: str, mask: str, added: str
) -> None:
    """weight: [hidden, 3 width], bias: [3 width], of query, key and value side by side."""
    sides = of.shapes.get(weight, ())
    if len(sides) != 2 or sides[1] % 3 or attributes.get("qkv_hidden_sizes") is not None:
        raise _refuse(node, f"weights of {list(sides) or 'no constant'}, query, key and value not of one width,")
    width = sides[1] // 3
    parts = []
    for i in range(3):
        product = of.make("MatMul", value, of.part(weight, i * width, (i + 1) * width, 1))
        parts.append(of.sum(product, of.part(bias, i * width, (i + 1) * width, 0) if bias else ""))
    _attend(of, node, attributes, parts, width, mask, added)


def _multi_head(of: _Rewriting, node: Any, attributes: _Attributes) -> None:
    query, key, value, bias, mask, added = _inputs(node, 6, 6)
    width = of.shapes.get(bias, (0,))[0] // 3 or _width(of, query)
    if not key or not value or not width:
        raise _refuse(node, "a packed input, or one of unknown width,")
    parts = [query, key, value]
    if bias:
        parts = [of.sum(one, of.part(bias, i * width, (i + 1) * width, 0)) for i, one in enumerate(parts)]
    _attend(of, node, attributes, parts, width, mask, added)


def _width(of: _Rewriting, name: str) -> int:
    """Columns of a product with a constant, also with a bias behind it."""
    for _ in range(4):
        node = of.maker.get(name)
        if node is None:
            return 0
        constants = [of.shapes[one] for one in node.input if one in of.shapes]
        if constants:
            return int(constants[0][-1]) if constants[0] else 0
        name = node.input[0]
    return 0


def _attend(
    of: _Rewriting, node: Any, attributes: _Attributes, parts: list[str], width: int, mask: str, added: str
) -> None:
    """parts: query, key and value [batch, seq, width]. mask: 0 and 1, [batch, seq]."""
    _expect_off(node, attributes, "unidirectional", "do_rotary", "past_present_share_buffer")
    if any(node.output[1:]):
        raise _refuse(node, "an output of keys and values")
    heads = attributes["num_heads"].i if "num_heads" in attributes else 0
    if heads < 1 or width % heads:
        raise _refuse(node, f"num_heads {heads} of {width} columns")
    scale = attributes["scale"].f if "scale" in attributes else 0.0
    sides = of.constant([0, 0, heads, width // heads])
    query, key, value = (
        of.make("Transpose", of.make("Reshape", one, sides), perm=perm)
        for one, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
    )
    scores = of.make("MatMul", query, key)
    scores = of.make("Mul", scores, of.constant(scale or (width // heads) ** -0.5, np.float32))
    if mask:
        low = attributes["mask_filter_value"].f if "mask_filter_value" in attributes else _MASKED
        one, masked = of.constant(1, np.float32), of.constant(low, np.float32)
        off = of.make("Sub", one, of.make("Cast", _of_columns(of, mask, parts[0]), to=1))
        scores = of.make("Add", scores, of.make("Reshape", of.make("Mul", off, masked), of.constant([0, 1, 1, -1])))
    scores = of.sum(scores, added)
    result = of.make("MatMul", of.make("Softmax", scores, axis=-1), value)
    result = of.make("Transpose", result, perm=[0, 2, 1, 3])
    of.make("Reshape", result, of.constant([0, 0, width]), named=node.output[0])


_LENGTHS = ("ReduceSum", "EmbedLayerNormalization", "QEmbedLayerNormalization")


def _of_columns(of: _Rewriting, mask: str, value: str) -> str:
    """The mask [batch, seq] of an attention that may have lengths [batch] instead. value: [batch, seq, width]."""
    maker = of.maker.get(mask)
    while maker is not None and maker.op_type == "Cast":
        maker = of.maker.get(maker.input[0])
    if maker is None or maker.op_type not in _LENGTHS:
        return mask
    of.counts = True
    columns = _columns(of, value)
    lengths = of.make("Cast", of.make("Reshape", mask, of.constant([-1, 1])), to=7)
    return of.make("Less", columns, lengths)


def _columns(of: _Rewriting, value: str) -> str:
    """[1, seq]: 0, 1, ... for as many as `value` has."""
    length = of.make("Gather", of.make("Shape", value), of.constant(1), axis=0)
    return of.make("Reshape", of.make("Range", of.constant(0), length, of.constant(1)), of.constant([1, -1]))


_APART: dict[str, Callable[[_Rewriting, Any, _Attributes], None]] = {
    "SkipLayerNormalization": _skip_layer_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "BiasGelu": _gelu,
    "FastGelu": _gelu,
    "Attention": _attention,
    "QAttention": _quantised_attention,
    "QEmbedLayerNormalization": _quantised_embed,
    "MultiHeadAttention": _multi_head,
    "FusedMatMul": _matmul,
    "FusedGemm": _gemm,
}
