"""From logits to scores: the activations that a model's folder may name, on numpy rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def sigmoid(rows: Rows) -> Rows:
    """Exact on both sides: 1 - 1 / (1 + e^x) would leave nothing of a score below 1e-7."""
    small = np.exp(-np.abs(rows))
    return np.where(rows >= 0, 1, small) / (1 + small)


def softmax(rows: Rows) -> Rows:
    """Of each row."""
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# None falls where logits rise, so that an order by the logits is one by the scores, and finer.
ACTIVATIONS: dict[str, Callable[[Rows], Rows]] = {
    "Identity": lambda rows: rows, "Sigmoid": sigmoid, "Softmax": softmax, "Tanh": np.tanh,
    "ReLU": lambda rows: np.maximum(rows, 0),
}  # fmt: skip


def probabilities(rows: Rows) -> Rows:
    """TEI's rule, whatever the folder says: softmax of each row, of a single class its sigmoid."""
    return sigmoid(rows) if rows.shape[1] == 1 else softmax(rows)


def choose_activation(named: str | None, problem_type: str | None, labels: int) -> str:
    """vLLM's rule. named: the folder's, which counts first; problem_type: of the config, as in transformers' loss.
    ValueError for one that is not in ACTIVATIONS."""
    if named is None:
        usual = "Sigmoid" if labels == 1 else "Softmax"
        return {"regression": "Identity", "multi_label_classification": "Sigmoid"}.get(problem_type or "", usual)
    if named not in ACTIVATIONS:
        known = ", ".join(name for name in ACTIVATIONS if name != "Softmax")  # no folder of a CrossEncoder may name it
        raise ValueError(f"the folder's activation {named} is not served; expected one of {known}")
    return named
