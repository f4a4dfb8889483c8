"""What an encoder is made of, found in an ONNX graph whatever the exporter wrote it as."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftbert.converters.onnx_file import Constant, Node
from ftbert.converters.onnx_graph import LAYOUT, Graph, Matrix


@dataclass(frozen=True)
class Linear:
    """output [.., n] = input [.., k] @ weight.T + bias. weight [n, k]; bias [n] or None where the graph has none."""

    input: str
    output: str
    weight: Matrix
    bias: Constant | None

    @property
    def n(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class Norm:
    """LayerNorm over the last dimension."""

    input: str
    output: str
    weight: Constant
    bias: Constant
    eps: float


def find_linears(graph: Graph) -> list[Linear]:
    """MatMul by a constant matrix with the Add behind it, and Gemm."""
    found = []
    for node in graph.nodes:
        weight = graph.matrix(node.inputs[1]) if node.type in ("Gemm", "MatMul") and len(node.inputs) > 1 else None
        if weight is not None:
            found.append((_gemm if node.type == "Gemm" else _matmul)(graph, node, weight))
    return found


def _gemm(graph: Graph, node: Node, weight: Matrix) -> Linear:
    weight = weight if node.attributes.get("transB", 0) else weight.t
    bias = graph.vector(node.inputs[2]) if len(node.inputs) > 2 else None
    return Linear(graph.before_layout(node.inputs[0]), graph.before_layout(node.outputs[0]), weight, bias)


def _matmul(graph: Graph, node: Node, weight: Matrix) -> Linear:
    weight = weight.t
    output, bias = node.outputs[0], None
    readers = graph.consumers.get(output, [])
    while len(readers) == 1 and readers[0].type in ("Reshape", "Squeeze", "Unsqueeze"):
        output, readers = readers[0].outputs[0], graph.consumers.get(readers[0].outputs[0], [])
    if len(readers) == 1 and readers[0].type == "Add":
        other = [name for name in readers[0].inputs if name != output]
        bias = graph.vector(other[0]) if other else None
    if bias is None or bias.shape != weight.shape[:1]:
        return Linear(graph.before_layout(node.inputs[0]), node.outputs[0], weight, None)
    return Linear(graph.before_layout(node.inputs[0]), readers[0].outputs[0], weight, bias)


def find_norms(graph: Graph) -> list[Norm]:
    """LayerNormalization, or what older opsets spell it as: (x - mean) / sqrt(mean square + eps) * weight + bias."""
    found = []
    for node in graph.nodes:
        if node.type == "LayerNormalization" and len(node.inputs) == 3:
            weight, bias = graph.vector(node.inputs[1]), graph.vector(node.inputs[2])
            eps = float(node.attributes.get("epsilon", 1e-5))
            norm = Norm(node.inputs[0], node.outputs[0], weight, bias, _short(eps)) if weight and bias else None
        else:
            norm = _spelled_out(graph, node)
        if norm is not None:
            found.append(norm)
    return found


def _spelled_out(graph: Graph, node: Node) -> Norm | None:
    scaled, bias = _with_vector(graph, node, "Add")
    product, weight = _with_vector(graph, graph.producer.get(scaled), "Mul")
    quotient = graph.producer.get(product)
    if bias is None or weight is None or quotient is None or quotient.type != "Div":
        return None
    centred, root = (graph.producer.get(name) for name in quotient.inputs[:2])
    if centred is None or root is None or centred.type != "Sub" or root.type != "Sqrt":
        return None
    variance = graph.producer.get(root.inputs[0])
    if variance is None or variance.type != "Add":
        return None
    eps = next((value for name in variance.inputs if (value := graph.number(name)) is not None), None)
    return None if eps is None else Norm(centred.inputs[0], node.outputs[0], weight, bias, _short(eps))


def _with_vector(graph: Graph, node: Node | None, kind: str) -> tuple[str, Constant | None]:
    """(the other operand, the constant vector) of an Add or Mul."""
    if node is not None and node.type == kind and len(node.inputs) == 2:
        for value, constant in (node.inputs, node.inputs[::-1]):
            vector = graph.vector(constant)
            if vector is not None:
                return value, vector
    return "", None


def _short(eps: float) -> float:
    """The file has float32: 9.999999960041972e-13 was written as 1e-12."""
    return float(str(np.float32(eps)))


def behind(graph: Graph, start: str, ends: dict[str, list[Linear]], allowed: frozenset[str]) -> list[Linear]:
    """The Linears that read `start` after nothing but `allowed` ops and changes of layout. `ends`: by their input."""
    values = graph.onward([start], lambda node, _: node.type in allowed or node.type in LAYOUT)
    return [linear for name in values for linear in ends.get(name, [])]
