"""What `check` and `bench` allow of each element type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ftbert.dtypes import FP8, INT8, Q8_0
from ftbert.quantization import STORED_TYPES, Limits


@dataclass(frozen=True)
class Gate:
    """Everything is measured from transformers in float32. None: the number is shown, and nothing is asked of it.

    max_abs_diff: of a valid token's hidden state, by the kind of device. error_ratio: the same, as a multiple of the
    error of transformers' own model in that type; cosines may then be lower than min_cosine by that measure too
    (`least_cosine`). mean_cosine, min_cosine: of tokens, or with by_text of texts' vectors; by_text also shows the
    errors layer by layer and compares what heads decide. unusual: the mean and the least cosine of random ids, and of
    masks that move positions. agreement: the share of heads' decisions that must be the same. bench_error: of all
    hidden states together, as a share of their size.
    """

    min_cosine: float
    bench_error: float
    mean_cosine: float | None = None
    max_abs_diff: Mapping[str, float] | None = None
    error_ratio: float | None = None
    by_text: bool = False
    unusual: tuple[float, float] | None = None
    agreement: float = 1.0


def _by_text(limits: Limits, unusual: tuple[float, float], bench_error: float) -> Gate:
    """Of a type of 8 bits."""
    return Gate(
        by_text=True, mean_cosine=limits.mean, min_cosine=limits.worst, unusual=unusual, agreement=0.99,
        bench_error=bench_error,
    )  # fmt: skip


GATES = {
    torch.float32: Gate(max_abs_diff={"cpu": 2e-5, "cuda": 5e-5}, min_cosine=0.99999, bench_error=1e-3),
    torch.float16: Gate(error_ratio=1.25, min_cosine=0.9999, bench_error=0.05),
    torch.bfloat16: Gate(error_ratio=1.25, min_cosine=0.999, bench_error=0.2),
    FP8: _by_text(STORED_TYPES[FP8].limits, unusual=(0.95, 0.9), bench_error=0.5),
    INT8: _by_text(STORED_TYPES[INT8].limits, unusual=(0.99, 0.97), bench_error=0.3),
    Q8_0: _by_text(STORED_TYPES[INT8].limits, unusual=(0.99, 0.97), bench_error=0.3),  # as fine, in blocks
}


def cosines_allowed(gate: Gate, usual: bool) -> tuple[float | None, float]:
    """The mean and the least."""
    return (gate.mean_cosine, gate.min_cosine) if usual or gate.unusual is None else gate.unusual


def least_cosine(gate: Gate, usual: float, theirs: float) -> float:
    """usual: the least cosine of models that the type fits. theirs: that of transformers' own model in the type, which
    counts where it is lower: 1 - cosine grows with the square of the error. NaN, of numbers beyond the type, excuses
    nothing."""
    if gate.error_ratio is None or not theirs < usual:
        return usual
    return min(usual, 1 - gate.error_ratio**2 * (1 - theirs))


def within(value: float, most: float | None) -> bool:
    """False for NaN."""
    return value <= (float("inf") if most is None else most)
