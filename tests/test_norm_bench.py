"""The benchmark of the training norms: a peer that computes something else is not timed; what counts as a failure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import norm_cases  # noqa: E402
import norm_training_report as training  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", norm_cases.EAGER)
def test_operands_fit_their_op_and_another_result_is_seen(op: str) -> None:
    every = [*norm_cases.row_cases(norm_cases.ROW_OPS, (48,), CPU, torch.float32, 8), *norm_cases.batch_cases(CPU, torch.float32, (3, 4, 5, 6))]
    case = next(case for case in every if case.op == op)
    operands, function = case.make(), norm_cases.EAGER[op]
    assert operands.inputs[0].nbytes == case.tensor and operands.inputs[0].shape == torch.Size(case.shape)
    assert norm_cases.compare(op, function, operands) < 1e-6

    def off(*inputs: torch.Tensor) -> Any:
        outputs = norm_cases.as_tuple(function(*inputs))
        return (outputs[0] * 1.001, *outputs[1:])

    with pytest.raises(ValueError, match="differs from float64"):
        norm_cases.compare(op, off, operands)


def test_what_a_training_run_must_not_say() -> None:
    mib = 1 << 20
    sizes = {training.BEFORE: 9 * mib, training.AFTER: 5 * mib, training.EFFICIENT: 4 * mib}
    ways = {way: {"losses": [1.0, 0.5], "saved_bytes": size, "step_ms": 1.0} for way, size in sizes.items()}
    result: dict[str, Any] = {"name": "some", "ways": ways, "promised_bytes": mib}
    assert training.saving(result) == {"saved_bytes": 1.0} and not list(training.failures(result))
    assert "promises 1.0 MiB and saves 100.0% (saved)" in "\n".join(training.lines_of(result))
    ways[training.EFFICIENT]["saved_bytes"] -= mib // 16
    ways[training.AFTER]["losses"] = [1.0, 0.6]
    words = "\n".join(training.failures(result))
    assert "losses differ" in words and "saves 106.2% of what it promises" in words
    ways[training.EFFICIENT] = {"failed": "RuntimeError: no"}
    assert any("RuntimeError: no" in word for word in training.failures(result)) and list(training.lines_of(result))
