"""How alike two sets of vectors are, by the names and meanings of sentence-transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from ftbert.text.tokens import listed


def similarity(one: Any, other: Any, name: str) -> Tensor:
    """Every vector of `one` [n, width] with every vector of `other` [m, width] -> [n, m]; a single [width] counts as
    [1, width].

    Arrays, tensors, sparse ones too, lists or columns of them. name: "cosine", "dot", or "euclidean" and "manhattan",
    distances times -1.
    """
    left, right = (rows[None] if rows.ndim == 1 else rows for rows in _pair(one, other, name))
    if left.is_sparse:
        found = torch.sparse.mm(left, right.T).to_dense()
        return found / _lengths(left)[:, None] / _lengths(right) if name == "cosine" else found
    if name == "cosine":
        return normalize(left, dim=-1) @ normalize(right, dim=-1).T
    if name == "dot":
        return left @ right.T
    return -torch.cdist(left, right, p=_POWERS[name])


def similarity_pairwise(one: Any, other: Any, name: str) -> Tensor:
    """Each vector of `one` [n, width] with the one in the same row of `other` -> [n]."""
    left, right = _pair(one, other, name)
    if left.is_sparse:
        found = (left * right).sum(-1).to_dense()
        return found / _lengths(left) / _lengths(right) if name == "cosine" else found
    if name == "cosine":
        return (normalize(left, dim=-1) * normalize(right, dim=-1)).sum(-1)
    if name == "dot":
        return (left * right).sum(-1)
    return -torch.linalg.vector_norm(left - right, ord=_POWERS[name], dim=-1)


_POWERS = {"euclidean": 2.0, "manhattan": 1.0}


def _lengths(rows: Tensor) -> Tensor:
    """[n] of sparse rows [n, width], as `normalize` takes them."""
    return (rows * rows).sum(-1).to_dense().sqrt().clamp_min(1e-12)


def _pair(one: Any, other: Any, name: str) -> tuple[Tensor, Tensor]:
    """On one device, in one dtype; sparse where both are and `name` is a product."""
    left, right = _tensor(one), _tensor(other)
    if not (left.is_sparse and right.is_sparse and name not in _POWERS):
        left, right = (some.to_dense() if some.is_sparse else some for some in (left, right))
    dtype = torch.promote_types(left.dtype, right.dtype)
    device = right.device if left.device.type == "cpu" else left.device
    return left.to(device, dtype), right.to(device, dtype)


def _tensor(values: Any) -> Tensor:
    """At least float32: products in fewer bits would round the results together."""
    if isinstance(values, list | tuple) and values and isinstance(values[0], Tensor):
        values = torch.stack(list(values))
    elif not isinstance(values, Tensor):
        if getattr(values, "ndim", 1) == 1 and not isinstance(values, np.ndarray):
            values = listed(values)  # a column of vectors, an iterator
            if values and isinstance(values[0], Tensor):
                return _tensor(values)
        values = torch.from_numpy(np.asarray(values, None if isinstance(values, np.ndarray) else np.float32))
    small = values.is_floating_point() and torch.finfo(values.dtype).bits < 32
    return values.float() if small or not values.is_floating_point() else values
