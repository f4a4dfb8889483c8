"""ReLU's gradient from a mask of bits, beside the one that reads the output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from norm_cases import Case, Operands
from norm_timing import Run, flushed_seconds, in_turns, operand_sets, record
from torch import Tensor

Way = Callable[[Tensor, Tensor, Tensor, Tensor], Any]  # x, dy, y, mask


def relu_row(shape: tuple[int, ...], device: torch.device, rounds: int) -> dict[str, Any]:
    """Of the document, in fp32: operands new in every call ("cold"), the same ("warm"), and single calls behind a
    kernel that reads other data through the cache ("flushed")."""
    size, bits = 4 * torch.Size(shape).numel(), 1 / 32
    relu, from_mask = torch.ops.ftbert.relu_with_mask, torch.ops.ftbert.relu_backward_from_mask
    from_output = torch.ops.aten.threshold_backward
    ways: dict[str, tuple[float, Way]] = {  # with the tensors like x that must move
        "relu_with_mask": (2 + bits, lambda x, dy, y, mask: relu(x)),
        "relu, torch": (2, lambda x, dy, y, mask: torch.relu(x)),
        "relu_backward_from_mask": (2 + bits, lambda x, dy, y, mask: from_mask(dy, mask)),
        "relu_backward, torch": (3, lambda x, dy, y, mask: from_output(dy, y, 0)),
    }

    def make() -> Operands:
        return Operands(tuple(torch.randn(shape, device=device) for _ in range(2)), ())

    sets = []
    for operands in operand_sets(Case("relu", shape, make, size, (2, 3)), device):
        sets.append((*operands.inputs, *relu(operands.inputs[0])))
    x, dy, y, mask = sets[0]
    if not (torch.equal(y, x.relu()) and torch.equal(from_mask(dy, mask), from_output(dy, y, 0))):
        raise ValueError("ReLU from a mask differs from PyTorch's")

    def calls(way: str, of: list[Any]) -> list[Run]:
        return [partial(ways[way][1], *one) for one in of]

    runs: dict[tuple[str, str], Run] = {}
    for way in ways:
        runs[way, "cold"] = record(calls(way, sets), device)
        runs[way, "warm"] = record(calls(way, sets[:1] * len(sets)), device, keep=False)
    times = {key: value / len(sets) for key, value in in_turns(runs, device, rounds).items()}
    flushed = flushed_seconds({way: calls(way, sets)[0] for way in ways}, device, 5 * rounds)
    peers = {}
    for way, (tensors, _) in ways.items():
        cold = times[way, "cold"]
        peers[way] = {"cold_us": 1e6 * cold, "warm_us": 1e6 * times[way, "warm"], "flushed_us": 1e6 * flushed[way]}
        peers[way] |= {"cold_gbs": tensors * size / cold / 1e9}
    return {"op": "relu", "shape": shape, "dtype": "float32", "tensor_bytes": size, "peers": peers}
