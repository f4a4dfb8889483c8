"""Which activation a piece of an ONNX graph computes: decided by its values, not by its spelling.

GELU alone comes as one node, as five nodes around Erf in two orders, or as eight around Tanh; what all of these have
in common is the function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ftbert.checkpoint import activations
from ftbert.converters.onnx_graph import LAYOUT, Graph

_tanh_gelu = partial(functional.gelu, approximate="tanh")

_OPS: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow, "Neg": torch.neg,
    "Erf": torch.erf, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Exp": torch.exp, "Sqrt": torch.sqrt,
    "Abs": torch.abs, "Gelu": functional.gelu, "Relu": torch.relu, "Reciprocal": torch.reciprocal,
    "Max": torch.maximum, "Min": torch.minimum, "FastGelu": _tanh_gelu,
    "QuickGelu": lambda x: x * torch.sigmoid(1.702 * x),
    "Swish": functional.silu, "Softplus": functional.softplus, "Log": torch.log,
}  # fmt: skip
ELEMENTWISE = frozenset(_OPS)

# gelu and gelu_new are 4.7e-4 apart at most; constants in the file are float32 or, at worst, float16.
_POINTS = torch.linspace(-6, 6, 241, dtype=torch.float64)
_TOLERANCE = 5e-5


@cache
def _known() -> dict[str, Callable[[Tensor], Tensor]]:
    """What the core computes, each by its first name in transformers, and two that are recognised to be refused."""
    from transformers.activations import ACT2FN

    names = {kind: name for name, kind in reversed(activations().items()) if name in ACT2FN}
    return {name: ACT2FN[name] for name in (*names.values(), "quick_gelu", "sigmoid")}


def evaluated(name: str, values: np.ndarray) -> np.ndarray:
    """The function of that name, which `activation` gave."""
    found: np.ndarray = _known()[name](torch.from_numpy(values)).numpy()
    return found


def activation(graph: Graph, start: str, end: str) -> str:
    """The name of the function from value `start` to value `end`; ValueError lists the ops if it is no known one."""
    used: list[str] = []
    try:
        values = _evaluate(graph, end, {start: _POINTS}, used, 64)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"activation: cannot follow {', '.join(used) or 'it'} ({error})") from error
    for name, function in _known().items():
        if values.shape == _POINTS.shape and (values - function(_POINTS)).abs().max() < _TOLERANCE:
            return name
    raise ValueError(f"activation: {', '.join(dict.fromkeys(used)) or 'none'} compute none of {', '.join(_known())}")


def _evaluate(graph: Graph, name: str, known: dict[str, Tensor], used: list[str], depth: int) -> Tensor:
    if name in known:
        return known[name]
    number = graph.number(name)
    if number is not None:
        return torch.tensor(number, dtype=torch.float64)
    node = graph.producer.get(name)
    if node is None or not depth:
        raise ValueError(f"{name!r} is no constant")
    used.append(node.type)
    if node.type in LAYOUT:
        known[name] = _evaluate(graph, node.inputs[0], known, used, depth - 1)
        return known[name]
    arguments = [_evaluate(graph, part, known, used, depth - 1) for part in node.inputs]
    how = {"approximate": node.attributes.get("approximate") or "none"} if node.type == "Gelu" else {}
    known[name] = _OPS[node.type](*arguments, **how)
    return known[name]
