"""Weights that an ONNX file stores in 8 bits: the floats that they stand for, and rows of int8 with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ftbert.converters.onnx_file import Constant, constant

_UINT8, _INT8 = 2, 3
_SCALES = (1, 10, 11)  # types of scales: float32, float16, float64


@dataclass
class Dequantised(Constant):
    """(integers - zero) * scale in float32. scale float32, zero int32: of a shape that broadcasts with that of the
    integers, [] where they are of the whole tensor."""

    integers: Constant = field(default_factory=Constant)
    scale: np.ndarray = field(default_factory=lambda: np.ones((), np.float32))
    zero: np.ndarray = field(default_factory=lambda: np.zeros((), np.int32))

    def read(self) -> np.ndarray:
        return (self.integers.read() - self.zero).astype(np.float32) * self.scale


def dequantised(name: str, parts: Sequence[Constant], axis: int) -> Dequantised:
    """parts: integers, scale and, where there is one, zero point; of more than one number they are along `axis`.
    ValueError names the constant that is wrong."""
    if len(parts) not in (2, 3):
        raise ValueError(f"{len(parts)} constants, expected integers, a scale and perhaps a zero point")
    for one in parts:
        if one.problem:
            raise ValueError(f"{one.name}: {one.problem}")
    integers, scale, *zeros = parts
    if integers.type not in (_UINT8, _INT8) or any(zero.type != integers.type for zero in zeros):
        raise ValueError(f"{integers.name}: expected uint8 or int8, its zero point of the same type")
    if scale.type not in _SCALES:
        raise ValueError(f"{scale.name}: a scale of ONNX type {scale.type}, expected a float")
    factors = _along(scale, integers, axis).astype(np.float32)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError(f"{scale.name}: scales are finite and above 0, and not all of these are")
    zero = _along(zeros[0], integers, axis).astype(np.int32) if zeros else np.zeros((), np.int32)
    return Dequantised(name, integers.shape, 1, integers=integers, scale=factors, zero=zero)


def _along(one: Constant, integers: Constant, axis: int) -> np.ndarray:
    """A scale or a zero point in a shape that broadcasts with that of the integers."""
    values, rank = one.read(), len(integers.shape)
    if values.size == 1:
        return values.reshape(())
    axis += rank if axis < 0 else 0
    if not 0 <= axis < rank or values.shape != (integers.shape[axis],):
        raise ValueError(f"{one.name} is {list(one.shape)}, and {integers.name} {list(integers.shape)}")
    return values.reshape([-1 if i == axis else 1 for i in range(rank)])


def has_row_scales(one: Dequantised, transposed: bool) -> bool:
    """Whether the rows of the matrix [n, k], or of [k, n] transposed, have one scale each."""
    return len(one.shape) == 2 and (one.scale.ndim == 0 or one.scale.shape[0 if transposed else 1] == 1)


@dataclass(frozen=True)
class Rows:
    """values int8 [n, k] times scale float32 [n]. error: the largest change of a weight by rounding it once more, as a
    share of the largest weight in its row; 0 where the values are the file's."""

    values: np.ndarray
    scale: np.ndarray
    error: float


def int8_rows(one: Dequantised, transposed: bool) -> Rows:
    """Of a matrix as of `has_row_scales`. Integers less their zero points that do not fit int8 are rounded again."""
    differences = one.integers.read().astype(np.int16) - one.zero.astype(np.int16)
    differences = np.ascontiguousarray(differences.T if transposed else differences)
    scale = np.broadcast_to(one.scale.reshape(-1), len(differences)).copy()
    if differences.min() >= -128 and differences.max() <= 127:
        return Rows(differences.astype(np.int8), scale, 0.0)
    largest = np.maximum(np.abs(differences).max(1, keepdims=True), 1).astype(np.float32)
    step = largest / np.float32(127)
    values = np.rint(differences / step)
    error = float((np.abs(values * step - differences) / largest).max())
    return Rows(values.astype(np.int8), scale * step[:, 0], error)


def fold_weights(model: Any, path: Path) -> None:
    """Puts in place of each DequantizeLinear of constants of `model` what it computes."""
    from onnx import numpy_helper

    graph = model.graph
    held = {one.name: one for one in graph.initializer}
    held |= {node.output[0]: one.t for node in graph.node if node.op_type == "Constant"
             for one in node.attribute if one.name == "value"}  # fmt: skip
    folded: set[str] = set()
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if node.op_type == "DequantizeLinear" and all(name in held for name in node.input if name):
            axis = next((one.i for one in node.attribute if one.name == "axis"), 1)
            parts = [constant(held[name], path) for name in node.input if name]
            made = dequantised(node.output[0], parts, axis)
            graph.initializer.append(numpy_helper.from_array(made.read(), node.output[0]))
            folded.update(node.input)
            del graph.node[i]
    folded.difference_update(*(node.input for node in graph.node))
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name in folded:
            del graph.initializer[i]
