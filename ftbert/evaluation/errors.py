"""How far hidden states are from those of float32: in all, layer by layer, and what the heads decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftbert.model import Model

# Heads whose result is a choice, by transformers' names of their logits.
_CHOICES = {
    "sequence_classification": ("logits",), "token_classification": ("logits",),
    "question_answering": ("start_logits", "end_logits"),
}  # fmt: skip


class Difference:
    """Of rows [rows, hidden] from those of float32, which come in pieces."""

    def __init__(self) -> None:
        self.lost, self.size, self.largest = 0.0, 0.0, 0.0
        self.cosines: list[float] = []

    def add(self, got: Tensor, want: Tensor) -> None:
        got, want = got.double(), want.double()  # the cosine of two equal float32 rows can come out as 0.9999999
        off = got - want
        self.lost += float(off.square().sum())
        self.size += float(want.square().sum())
        self.largest = float(torch.maximum(off.abs().max(), off.new_tensor(self.largest)))  # which keeps NaN
        self.cosines += torch.nn.functional.cosine_similarity(got, want, dim=-1).tolist()

    @property
    def relative(self) -> float:
        """The root of the squares' sum, as a share of that of float32."""
        return (self.lost / self.size) ** 0.5 if self.size else float("nan")

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosines) / len(self.cosines)

    @property
    def min_cosine(self) -> float:
        """NaN if any is."""
        return float(torch.tensor(self.cosines, dtype=torch.float64).min())


@dataclass(frozen=True)
class LayerError:
    """name: "embeddings", or "layers.3" behind that layer. relative_error: |got - want| / |want| over all valid tokens.
    Cosines are of tokens."""

    name: str
    relative_error: float
    mean_cosine: float
    min_cosine: float

    def __str__(self) -> str:
        return f"{self.name:<12}{self.relative_error:>15.4f}{self.mean_cosine:>13.7f}{self.min_cosine:>13.7f}"


@dataclass(frozen=True)
class HeadAgreement:
    """What a head decides, of texts or of tokens: argmaxes. 0 decisions: its result is a number. max_abs_diff: of its
    logits."""

    task: str
    decisions: int
    agreed: int
    agreement_allowed: float
    max_abs_diff: float
    passed: bool

    def __str__(self) -> str:
        share = f"{self.agreed} of {self.decisions}" if self.decisions else "-"
        return (
            f"{self.task:<24}{share:>16}{self.agreement_allowed:>9.0%}{self.max_abs_diff:>15.2e}  "
            f"{'ok' if self.passed else 'FAILED'}"
        )


def layer_errors(model: Model, reference: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> tuple[LayerError, ...]:
    """Of the residual stream behind each layer. reference: transformers' encoder. batches: ids and masks."""
    found: list[Difference] = []
    for ids, mask in batches:
        valid = mask.bool()
        got: Any = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
        want = reference(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        found = found or [Difference() for _ in want]
        for one, ours, theirs in zip(found, got, want, strict=True):
            one.add(ours[valid], theirs[valid])
    return tuple(
        LayerError(f"layers.{i - 1}" if i else "embeddings", one.relative, one.mean_cosine, one.min_cosine)
        for i, one in enumerate(found)
    )


def costliest(layers: Sequence[LayerError]) -> str:
    """The layer that adds most, "" without layers. Errors of different layers add up as their squares do."""
    if len(layers) < 2:
        return ""
    added = {
        layer.name: layer.relative_error**2 - before.relative_error**2
        for before, layer in zip(layers, layers[1:], strict=False)
    }
    return max(added, key=lambda name: added[name])


def head_agreements(
    model: Model, reference: Any, sequences: Sequence[Tensor], allowed: float
) -> tuple[HeadAgreement, ...]:
    """Of the heads of `model` that choose among classes, text by text. reference: transformers' model with its heads.
    Of fewer than 100 decisions one may differ."""
    found = []
    for task in (head.task for head in model.heads if head.task in _CHOICES):
        decisions = agreed = 0
        difference = Difference()
        for sequence in sequences:
            ids = sequence[None].to(model.device)
            got, want = model(ids), reference(input_ids=ids)
            for name in _CHOICES[task]:
                ours, theirs = got[name].float(), want[name].float()
                rows = theirs.shape[-1]
                difference.add(ours.reshape(-1, rows), theirs.reshape(-1, rows))
                if rows > 1:
                    same = ours.argmax(-1) == theirs.argmax(-1)
                    decisions, agreed = decisions + same.numel(), agreed + int(same.sum())
        wrong, finite = decisions - agreed, difference.largest < float("inf")
        passed = finite and wrong <= max(1.0, (1 - allowed) * decisions)
        found.append(HeadAgreement(task, decisions, agreed, allowed, difference.largest, passed))
    return tuple(found)
