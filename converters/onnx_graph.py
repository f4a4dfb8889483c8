"""An ONNX graph to ask questions of: who makes a value, who reads it, which values are constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftbert.converters.onnx_file import BFLOAT16, Constant, Node, OnnxFile, computed
from ftbert.converters.onnx_integers import dequantised

# Ops that hand a value on unchanged, as far as structure is concerned.
_SAME = {"Identity", "Dropout", "Cast", "CastLike"}
# Ops that move elements without changing them.
LAYOUT = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand"}
# Largest constant that is worth looking at as numbers: position ids are, weights are not.
_SMALL = 1 << 16
# Sides of the longest shape that is worth knowing.
_SIDES = 8


@dataclass(frozen=True)
class Matrix:
    """A constant matrix [rows, cols], stored as it is or the other way round."""

    constant: Constant
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.constant.shape[::-1] if self.transposed else self.constant.shape

    @property
    def t(self) -> Matrix:
        return Matrix(self.constant, not self.transposed)


class Graph:
    """Nodes with their names resolved: Identity, Dropout and Cast are gone, nodes over constants are constants.

    producer: value -> the node that makes it. consumers: value -> the nodes that read it. Both by resolved names.
    """

    def __init__(self, file: OnnxFile) -> None:
        self.inputs = {one.name for one in file.inputs}
        self.constants = dict(file.constants)
        self.nodes: list[Node] = []
        self.producer: dict[str, Node] = {}
        self.consumers: dict[str, list[Node]] = {}
        self._same: dict[str, str] = {}
        self._sizes: dict[str, list[int | None]] = {}
        # Elements that folding may read and make: a few nodes can ask for more than any memory.
        self._budget = 16 * _SMALL + 8 * sum(one.size for one in self.constants.values() if not one.problem)
        for node in file.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        inputs = [self._same.get(name, name) for name in node.inputs]
        if node.type in _SAME and inputs and node.outputs:
            self._same[node.outputs[0]] = inputs[0]
            return
        if node.type == "Constant" and node.outputs:
            value = _constant_value(node)
            if value is not None:
                self.constants[node.outputs[0]] = value
                return
        folded = self._dequantised(node, inputs) if node.type == "DequantizeLinear" else self._fold(node, inputs)
        if folded is not None:
            self.constants[node.outputs[0]] = folded
            return
        found = Node(node.type, inputs, node.outputs, node.attributes)
        self.nodes.append(found)
        for name in found.outputs:
            self.producer[name] = found
        for name in set(inputs):
            self.consumers.setdefault(name, []).append(found)

    def _fold(self, node: Node, inputs: list[str]) -> Constant | None:
        parts = []
        for name in inputs:
            matrix = self.matrix(name)
            one = matrix.constant if matrix is not None else self.constants.get(name)
            if one is None or one.problem or one.type == BFLOAT16:
                return None
            parts.append((one, matrix is not None and matrix.transposed))
        if node.type == "Transpose" and parts and parts[0][0].size > _SMALL:
            return None  # `matrix` sees through it without a copy
        values = fold(node, parts, self._budget - sum(one.size for one, _ in parts))
        if values is None:
            return None
        self._budget -= values.size + sum(one.size for one, _ in parts)
        return computed(node.outputs[0], values)

    def _dequantised(self, node: Node, inputs: list[str]) -> Constant | None:
        parts = [self.constants[name] for name in inputs if name in self.constants]
        if len(parts) != len([name for name in inputs if name]) or not node.outputs:
            return None
        try:
            return dequantised(node.outputs[0], parts, int(node.attributes.get("axis", 1)))
        except ValueError as error:
            raise ValueError(f"{node.type} {node.outputs[0]!r}: {error}") from None

    def matrix(self, name: str) -> Matrix | None:
        """A two-dimensional float constant, also behind a Transpose."""
        node, turned = self.producer.get(name), False
        if node is not None and node.type == "Transpose" and node.attributes.get("perm", [1, 0]) == [1, 0]:
            name, turned = node.inputs[0], True
        constant = self.constants.get(name)
        if constant is None or not constant.is_float or len(constant.shape) != 2 or not constant.size:
            return None
        return Matrix(constant, turned)

    def vector(self, name: str) -> Constant | None:
        """A one-dimensional float constant, not empty."""
        constant = self.constants.get(name)
        fits = constant is not None and constant.is_float and len(constant.shape) == 1 and constant.size
        return constant if fits else None

    def numbers(self, name: str) -> np.ndarray | None:
        """A small constant's values, float64 or int64."""
        constant = self.constants.get(name)
        if constant is None or constant.problem or constant.size > _SMALL or constant.type == BFLOAT16:
            return None
        return constant.read().astype(np.float64 if constant.is_float else np.int64)

    def number(self, name: str) -> float | None:
        """A constant with one element."""
        values = self.numbers(name)
        return float(values.reshape(-1)[0]) if values is not None and values.size == 1 else None

    def sizes(self, name: str, depth: int = 8) -> list[int | None]:
        """A shape as far as it is constant; None for a side that is only known when the model runs."""
        if name not in self._sizes:
            values, node = self.numbers(name), self.producer.get(name)
            if values is not None:
                sides: list[int | None] = [int(value) for value in values.reshape(-1)[: _SIDES + 1]]
            elif node is not None and node.type == "Concat" and depth:
                sides = []
                for part in node.inputs:
                    sides = [*sides, *self.sizes(part, depth - 1)][: _SIDES + 1]
            else:
                sides = [None]
            self._sizes[name] = sides
        return self._sizes[name]

    def resolved(self, name: str) -> str:
        """The value that has this name in the file."""
        return self._same.get(name, name)

    def before_layout(self, name: str) -> str:
        """The value that `name` is only another view of."""
        for _ in range(16):
            node = self.producer.get(name)
            if node is None or node.type not in LAYOUT or not node.inputs:
                break
            name = node.inputs[0]
        return name

    def onward(self, starts: Iterable[str], through: Callable[[Node, str], bool]) -> list[str]:
        """`starts` and all that is made of them by nodes for which `through(node, what it reads)` is true."""

        def made_of(one: str) -> list[str]:
            return [name for node in self.consumers.get(one, []) if through(node, one) for name in node.outputs]

        return closure(starts, made_of)

    def views(self, name: str) -> list[str]:
        """`name` and every value that is only another view of it."""
        return self.onward([name], lambda node, one: node.type in LAYOUT and node.inputs[0] == one)

    def ancestors(self, *names: str) -> list[Node]:
        """Every node that the names are computed from; not through Shape."""

        def maker(name: str) -> Node | None:
            node = self.producer.get(name)
            return None if node is None or node.type in ("Shape", "Size") else node

        found = closure(names, lambda name: node.inputs if (node := maker(name)) else [])
        return [node for name in found if (node := maker(name))]

    def reach(self, starts: Iterable[str]) -> set[str]:
        """Every value computed from `starts`; the Shape of a value does not count as computed from it."""
        return set(self.onward(starts, lambda node, _: node.type not in ("Shape", "Size")))


def closure(starts: Iterable[str], following: Callable[[str], Iterable[str]]) -> list[str]:
    """`starts` and all that `following` leads to from them, each once."""
    found: list[str] = []
    todo = list(starts)
    seen = set(todo)
    while todo:
        found.append(todo.pop())
        fresh = [name for name in dict.fromkeys(following(found[-1])) if name not in seen]
        seen.update(fresh)
        todo += fresh
    return found


def histogram(nodes: Iterable[Node]) -> str:
    """'24 MatMul, 7 LayerNormalization, ...', for messages."""
    counted = Counter(node.type for node in nodes).most_common()
    more = f" and {len(counted) - 12} more kinds" if len(counted) > 12 else ""
    return ", ".join(f"{number} {kind[:40]}" for kind, number in counted[:12]) + more


def _constant_value(node: Node) -> Constant | None:
    kinds = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    for key, kind in kinds.items():
        if node.attributes.get(key) is not None:
            return computed(node.outputs[0], np.array(node.attributes[key], kind))
    value = node.attributes.get("value")
    return value if isinstance(value, Constant) else None


# Nodes whose inputs are all constants, computed: weights merged at run time, shapes in pieces.
_Attributes = dict[str, Any]


def _axes(values: list[np.ndarray], attributes: _Attributes) -> tuple[int, ...]:
    """An attribute until opset 12, an input from 13 on."""
    found = attributes.get("axes") if len(values) < 2 else values[1].reshape(-1).tolist()
    return tuple(int(axis) for axis in found or ())


def _reshape(values: list[np.ndarray], attributes: _Attributes) -> np.ndarray:
    sides = [int(side) for side in values[1].reshape(-1)]
    if not attributes.get("allowzero"):
        sides = [side or values[0].shape[i] for i, side in enumerate(sides)]
    return values[0].reshape(sides)


def _divide(values: list[np.ndarray], _: _Attributes) -> np.ndarray:
    one, other = values
    return one / other if one.dtype.kind == "f" else np.trunc(one / other).astype(one.dtype)


def _slice(values: list[np.ndarray], _: _Attributes) -> np.ndarray:
    """From opset 10 on, where what is cut out is an input."""
    found, begins, ends, *rest = values
    axes = rest[0].reshape(-1).tolist() if rest else range(found.ndim)
    steps = rest[1].reshape(-1).tolist() if len(rest) > 1 else [1] * len(begins)
    cut = [slice(None)] * found.ndim
    for axis, begin, end, step in zip(axes, begins.reshape(-1).tolist(), ends.reshape(-1).tolist(), steps, strict=True):
        cut[axis] = slice(begin, end, step)
    return found[tuple(cut)]


# Moves: as many elements as go in. The rest broadcasts, or is a product of matrices.
_MOVES: dict[str, Callable[[list[np.ndarray], _Attributes], np.ndarray]] = {
    "Concat": lambda values, attributes: np.concatenate(values, attributes.get("axis", 0)),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": lambda values, attributes: np.squeeze(values[0], _axes(values, attributes) or None),
    "Transpose": lambda values, attributes: np.transpose(values[0], attributes.get("perm")),
    "Unsqueeze": lambda values, attributes: np.expand_dims(values[0], _axes(values, attributes)),
}
_ELEMENTWISE: dict[str, Callable[[list[np.ndarray], _Attributes], np.ndarray]] = {
    "Add": lambda values, _: values[0] + values[1],
    "Div": _divide,
    "Mul": lambda values, _: values[0] * values[1],
    "Neg": lambda values, _: -values[0],
    "Sqrt": lambda values, _: np.sqrt(values[0]),
    "Sub": lambda values, _: values[0] - values[1],
}
_COMPUTED = {**_MOVES, **_ELEMENTWISE, "MatMul": lambda values, _: np.matmul(*values)}
_KEPT = tuple(np.dtype(kind) for kind in ("f2", "f4", "f8", "i8", "i4", "?"))


def fold(node: Node, parts: Sequence[tuple[Constant, bool]], most: int) -> np.ndarray | None:
    """The node's output. None where it is not computed here, does not fit together or has more than `most` elements.

    parts: its inputs, and whether they are to be transposed.
    """
    shapes = [one.shape[::-1] if turned else one.shape for one, turned in parts]
    size = _size(node.type, shapes)
    if size is None or size > most or len(node.outputs) != 1:
        return None
    try:
        values = [one.read().T if turned else one.read() for one, turned in parts]
        with np.errstate(all="ignore"):
            found = _COMPUTED[node.type](values, node.attributes)
        # Casts are not seen here: weights in 8 bits times a float scale are float32.
        wide = found.dtype == np.float64 and all(value.dtype != np.float64 for value in values)
        found = np.ascontiguousarray(found.astype(np.float32) if wide else found)
        return found if found.dtype in _KEPT else None
    except (ValueError, TypeError, IndexError):  # what does not fit; so onnxruntime refuses it too
        return None


def _size(kind: str, shapes: list[tuple[int, ...]]) -> int | None:
    """Elements of the result, before anything is computed."""
    try:
        if kind in _MOVES and shapes:
            return sum(math.prod(shape) for shape in shapes)
        if kind in _ELEMENTWISE and shapes:
            return math.prod(np.broadcast_shapes(*shapes))
    except ValueError:
        return None
    if kind == "MatMul" and [len(shape) for shape in shapes] == [2, 2]:
        return shapes[0][0] * shapes[1][1]
    return None
