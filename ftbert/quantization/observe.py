"""What the products of a model read: statistics of transformers' equivalent model over calibration texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

_SAMPLE = 1024  # rows of each matrix's input that are kept


@dataclass
class Observed:
    """Of the rows x [k] that a matrix multiplies: their number, the sums of x and, if with_gram, of x x^T, the largest
    absolute value of each column, and some of the rows themselves."""

    with_gram: bool = True
    count: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))  # [k]
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, 1))  # [k, k]
    most: Tensor = field(default_factory=lambda: torch.zeros(1))  # [k]
    kept: list[Tensor] = field(default_factory=list)

    def add(self, rows: Tensor, share: int) -> None:
        """share: how many of them to keep, evenly spread."""
        if not self.count:
            self.total = rows.new_zeros(rows.shape[1], dtype=torch.float64)
            self.most = rows.new_zeros(rows.shape[1])
            self.squares = rows.new_zeros([rows.shape[1] if self.with_gram else 0] * 2)
        self.count += len(rows)
        self.total += rows.sum(0, dtype=torch.float64)
        if self.with_gram:
            self.squares.addmm_(rows.T, rows)
        self.most = torch.maximum(self.most, rows.abs().amax(0))
        self.kept.append(rows[:: max(1, len(rows) // share)][:share].clone())

    @property
    def largest(self) -> float:
        """Not finite where any of them is not."""
        return float(self.most.max())

    @property
    def mean(self) -> Tensor:
        """float32 [k]"""
        return (self.total / self.count).float()

    @property
    def gram(self) -> Tensor:
        """float32 [k, k], x x^T on average: of few rows nearer to its diagonal, which they tell better."""
        cols = len(self.squares)
        told = self.squares * (self.count / (self.count + cols))
        told.diagonal().copy_(self.squares.diagonal())
        return told / self.count

    @property
    def sample(self) -> Tensor:
        """float32 [rows, k]"""
        return torch.cat(self.kept)


@torch.no_grad()
def observe(
    reference: torch.nn.Module,
    modules: Mapping[str, str],
    batches: Sequence[tuple[Tensor, Tensor]],
    with_gram: bool = True,
) -> dict[str, Observed]:
    """reference: transformers' encoder. modules: its module of each of our matrices, by that one's name. batches: ids
    and masks, [batch, seq] each, on its device. ValueError names the first matrix whose input is not finite, or that no
    batch reached."""
    found = {ours: Observed(with_gram) for ours in modules}
    share = -(-_SAMPLE // max(1, len(batches)))
    kept, shape = torch.zeros(0, dtype=torch.int64), torch.Size()

    def look(ours: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        # A table of positions goes through projections too: all of its rows count.
        found[ours].add(rows.index_select(0, kept) if inputs[0].shape[:-1] == shape else rows, share)

    with ExitStack() as hooks:
        for ours, name in modules.items():
            hooks.callback(reference.get_submodule(name).register_forward_pre_hook(partial(look, ours)).remove)
        for ids, mask in batches:
            kept, shape = mask.flatten().nonzero().flatten(), mask.shape
            reference(input_ids=ids, attention_mask=mask)
    if missed := [ours for ours, seen in found.items() if not seen.count]:
        raise ValueError(f"{missed[0]}: transformers' model does not compute it by the module {modules[missed[0]]}")
    if wrong := [ours for ours, seen in found.items() if not math.isfinite(seen.largest)]:
        raise ValueError(f"{wrong[0]}: what it multiplies is not finite for some of the texts")
    return found
