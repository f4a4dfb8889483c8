"""The benchmark of shared prefixes: that both ways give the same scores, and where it says that one is faster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_shared_prefix as bench  # noqa: E402


def test_quick_run(tmp_path: Path) -> None:
    assert bench.main(["--quick", "--rounds", "1", "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(one["prefix"], one["saved_tokens"]) for one in found["points"]] == [(0, 0), (9, 18)]
    assert all(one["difference"] < 1e-5 for one in found["points"]) and found["provenance"]["dtype"] == "fp32"


@pytest.mark.parametrize(
    ("shared", "words"),
    [((100, 99, 90, 80), "from 8 tokens (50.0%) on"), ((100, 90, 99, 80), "from 12 tokens (75.0%) on"), ((90, 90, 90, 99), "nowhere")],
)
def test_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, shared: tuple[int, ...], words: str
) -> None:
    """From where on it stays so; without a prefix there is nothing to be faster."""

    def measured(_: Any, texts: int, prefix: int, __: Any) -> dict[str, Any]:
        return {"saved_tokens": 4 * prefix, "saved": prefix / 4, "whole_ms": 100.0, "shared_ms": shared[prefix], "difference": 0.0}

    monkeypatch.setattr(bench, "measure", measured)
    words_given = ["--quick", *(f"--prefix={n}" for n in range(4)), "--out", str(tmp_path / "out.json")]
    assert bench.main(words_given) == 0
    assert f"3 texts: the prefix once is faster {words};" in capsys.readouterr().out
