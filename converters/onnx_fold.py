"""Nodes of an ONNX graph whose inputs are all constants, computed: weights merged at run time, shapes in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ftbert.converters.onnx_file import Constant, Node

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


# Moves: as many elements as go in. The rest broadcasts, or is a product of matrices.
_MOVES: dict[str, Callable[[list[np.ndarray], _Attributes], np.ndarray]] = {
    "Concat": lambda values, attributes: np.concatenate(values, attributes.get("axis", 0)),
    "Reshape": _reshape,
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
