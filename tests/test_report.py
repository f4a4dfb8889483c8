"""The page, the charts and README's tables follow from the result files."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import charts  # noqa: E402
import report  # noqa: E402

RESULT: dict[str, Any] = {
    "provenance": {"dtype": "fp32", "threads": 2, "cpu": "Some CPU", "packages": {"torch": "2", "transformers": "5"}},
    "results": [
        {
            "model": "base", "batch": 4, "longest": 8, "fill_name": "full", "tokens": 32, "fill": 1.0,
            "gemm_floor_ms": 5.0, "byte_floor_ms": 1.0,
            "peers": {
                "ftbert": {"ms": 10.0, "max_abs_diff": 1e-6},
                "transformers (sdpa)": {"ms": 123.4, "max_abs_diff": 0.0},
                "coarse <int8>": {"ms": 8.0, "max_abs_diff": 0.66},
                "broken": {"failed": "RuntimeError: no"},
            },
        }
    ],
}  # fmt: skip


@pytest.fixture()
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "cpu-fp32.json").write_text(json.dumps(RESULT))
    return tmp_path


def test_readme_says_what_the_results_say() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- results: cpu-fp32 -->" in text
    assert report.fill_marks(text) == text, "run benchmarks/report.py"


def test_results_name_no_machine_path() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        command = json.loads(path.read_text(encoding="utf-8"))["provenance"]["command"]
        assert " /" not in command and "=/" not in command, path.name


def test_the_fastest_that_computes_the_same_is_bold(results: Path) -> None:
    text = report.fill_marks("a\n<!-- results: cpu-fp32 -->\nold\n<!-- end -->\nb")
    assert "old" not in text and text.startswith("a\n") and text.endswith("\nb")
    assert "| base 4x8 full | 32 | **10** | 123 | 8 |" in text
    assert "coarse <int8> (off by 0.66)" in text and "broken" not in text
    assert report.fill_marks(text) == text


def test_the_page_is_whole_and_escaped(results: Path) -> None:
    page = report.page()
    assert page.count("<svg") == 2 and "12.3x" in page and "50 %" in page
    assert "coarse &lt;int8&gt;" in page and "<int8>" not in page
    assert "broken: RuntimeError: no" in page
    for path in results.glob("*.svg"):
        ElementTree.fromstring(path.read_text(encoding="utf-8"))
    assert len(list(results.glob("*.svg"))) == 2


def test_a_result_without_ftbert_and_with_a_floor_that_failed(results: Path) -> None:
    result = json.loads(json.dumps(RESULT))
    del result["results"][0]["peers"]["ftbert"]
    result["results"][0]["failed"] = "RuntimeError: no profiler"
    (results / "cpu-fp32.json").write_text(json.dumps(result))
    page = report.page()
    assert "base 4x8 full: RuntimeError: no profiler" in page and page.count("<svg") == 2


def test_charts_are_well_formed() -> None:
    series = {"a & b": [1.0, None], "c": [0.5, 2.0]}
    for svg in (charts.bars("t < u", ["x", "y"], series, "x", 1.0), charts.stacks("t", ["x", "y"], series)):
        root = ElementTree.fromstring(svg)
        assert sum(element.tag.endswith("title") for element in root.iter()) in (3, 4)
