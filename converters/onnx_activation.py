"""Which activation a piece of an ONNX graph computes: decided by its values, not by its spelling.

GELU alone comes as one node, as five nodes around Erf in two orders, or as eight around Tanh; what all of these have
in common is the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ftbert.converters.onnx_graph import LAYOUT, Graph

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


# As HuggingFace spells them. The first that fits is taken.
_KNOWN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": _gelu,
    "gelu_new": lambda x: _gelu(x, "tanh"),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "sigmoid": _sigmoid,
}  # fmt: skip
_OPS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Neg": np.negative,
    "Erf": _erf, "Tanh": np.tanh, "Sigmoid": _sigmoid, "Exp": np.exp, "Sqrt": np.sqrt, "Abs": np.abs, "Gelu": _gelu,
    "Relu": lambda x: np.maximum(x, 0), "Reciprocal": lambda x: 1 / x, "Max": np.maximum, "Min": np.minimum,
    "FastGelu": lambda x: _gelu(x, "tanh"), "QuickGelu": _KNOWN["quick_gelu"], "Swish": _KNOWN["silu"],
    "Softplus": lambda x: np.logaddexp(0, x), "Log": np.log,
}  # fmt: skip
ELEMENTWISE = frozenset(_OPS)

# gelu and gelu_new are 4.7e-4 apart at most; constants in the file are float32 or, at worst, float16.
_POINTS = np.linspace(-6, 6, 241)
_TOLERANCE = 5e-5


def activation(graph: Graph, start: str, end: str) -> str:
    """The name of the function from value `start` to value `end`; ValueError lists the ops if it is no known one."""
    used: list[str] = []
    try:
        with np.errstate(all="ignore"):
            values = _evaluate(graph, end, {start: _POINTS}, used, 64)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"activation: cannot follow {', '.join(used) or 'it'} ({error})") from error
    for name, function in _KNOWN.items():
        if np.shape(values) == _POINTS.shape and np.abs(values - function(_POINTS)).max() < _TOLERANCE:
            return name
    raise ValueError(f"activation: {', '.join(dict.fromkeys(used)) or 'none'} compute none of {', '.join(_KNOWN)}")


def _evaluate(graph: Graph, name: str, known: dict[str, np.ndarray], used: list[str], depth: int) -> np.ndarray:
    if name in known:
        return known[name]
    number = graph.number(name)
    if number is not None:
        return np.asarray(number)
    node = graph.producer.get(name)
    if node is None or not depth:
        raise ValueError(f"{name!r} is no constant")
    used.append(node.type)
    if node.type in LAYOUT:
        known[name] = _evaluate(graph, node.inputs[0], known, used, depth - 1)
        return known[name]
    arguments: list[Any] = [_evaluate(graph, part, known, used, depth - 1) for part in node.inputs]
    if node.type == "Gelu":
        arguments.append(node.attributes.get("approximate") or "none")
    known[name] = np.asarray(_OPS[node.type](*arguments))
    return known[name]
