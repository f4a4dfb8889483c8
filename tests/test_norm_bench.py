"""The benchmark of the training norms: its tables and its picture of a result, its failures, and that a peer with other
results is not timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import norm_cases  # noqa: E402
import norm_tables  # noqa: E402
import norm_timing  # noqa: E402
import norm_training_report as training  # noqa: E402
import report  # noqa: E402

CPU = torch.device("cpu")


def passes(forward: float, backward: float, **more: float) -> dict[str, float]:
    both = {"forward": forward, "backward": backward}
    return {f"{way}_gbs": gbs for way, gbs in both.items()} | {f"{way}_us": 1e3 / gbs for way, gbs in both.items()} | more


def document() -> dict[str, Any]:
    rows = [
        {"op": "layer_norm", "shape": [64, 256], "dtype": "bfloat16", "tensor_bytes": 1000, "peers": {
            "ftbert": passes(900, 800, kept_bytes=2000, peak_bytes=4000), "torch": passes(450, 1600, kept_bytes=2100, peak_bytes=5000),
            "quack": {"failed": "ImportError: none"}, "copy of x": {"forward_gbs": 990, "forward_us": 1.0}}},
        {"op": "batch_norm_relu", "shape": [2, 3, 4, 5], "dtype": "float16", "tensor_bytes": 1000, "peers": {"ftbert": passes(8, 4)}},
        {"op": "relu", "shape": [2, 3, 4, 5], "dtype": "float32", "tensor_bytes": 1000, "peers": {
            "relu_backward_from_mask": {"cold_us": 17.7, "warm_us": 10.0, "flushed_us": 18.0, "cold_gbs": 500.0}}},
    ]  # fmt: skip
    return {"provenance": {"dtype": "bf16", "cpu": "a CPU"}, "copy_gbs": 1000.0, "rows": rows}


def test_tables_and_lines() -> None:
    text = norm_tables.markdown_of(document())
    assert "| rows x columns | ftbert | torch | copy of x |" in text
    assert "| 64x256 | **900 (90%)** | 450 (45%) | 990 (99%) |" in text  # the copy is no peer
    assert "| 64x256 | 800 (80%) | **1,600 (160%)** |" in text
    assert "| batch_norm_relu 2x3x4x5 float16 | 125 / 250 |" in text
    assert "| relu_backward_from_mask | 17.7 | 18.0 | 10.0 |" in text
    assert "| layer_norm 64x256 | 2.00 | 2.10 |" in text
    summary = norm_tables.markdown_of(document(), summary=True)
    assert "% of the 1,000 GB/s" in summary and "| layer_norm 64x256 | 90 / 80 | 45 / 160 |" in summary
    lines = list(norm_tables.lines_of(document()["rows"][0], 1000.0))
    assert any("quack" in line and "failed: ImportError: none" in line for line in lines)
    assert norm_tables.shares(document(), "layer_norm", "backward") == {"ftbert": {256: 0.8}, "torch": {256: 1.6}}


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import norm_chart

    norm_chart.draw(document(), tmp_path / "norm.png")
    assert (tmp_path / "norm.png").read_bytes().startswith(b"\x89PNG")


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


def test_passes_are_timed_in_turns() -> None:
    case = next(norm_cases.row_cases(("layer_norm",), (32,), CPU, torch.float32, 8))
    calls: list[str] = []

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        calls.append("forward")
        return F.layer_norm(x, weight.shape, weight, bias)

    sets = norm_timing.operand_sets(case, CPU)
    found = norm_timing.record_passes(function, sets, CPU)
    assert len(calls) == len(sets)
    times = norm_timing.in_turns({"forward": found.forward, "backward": found.backward}, CPU, 3)
    assert all(seconds > 0 for seconds in times.values()) and len(calls) == 6 * len(sets)


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


def test_report_fills_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = {"commit": "1234567890", "gpu": "GPU", "driver": "1", "cuda": "13", "dtype": "bf16", "packages": {"torch": "2", "transformers": "5"}}
    ways = {training.BEFORE: {"losses": [0.5], "step_ms": 7.0}}
    trained = {"provenance": facts, "results": [{"name": "BERT", "ways": ways}]}
    for name, found in (("norm-gpu", document() | {"provenance": facts}), ("norm-training-gpu", trained)):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = "<!-- norms: norm-gpu -->\n<!-- end -->\n<!-- norm-training: norm-training-gpu -->\nanother run\n<!-- end -->"
    text = report.fill_marks(page, report.PAGES[1])
    assert "One GPU (driver 1, CUDA 13), bf16" in text and "| 90 / 80 |" in text and "| before | 7.00 | 0.5000 |" in text
    assert "another run" not in text and report.fill_marks(text, report.PAGES[1]) == text
