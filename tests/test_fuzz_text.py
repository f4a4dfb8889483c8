"""A slice of tests/fuzz_text.py."""

from __future__ import annotations

from pathlib import Path

from fuzz_text import run


def test_random_settings_equal_sentence_transformers_or_are_refused(tmp_path: Path) -> None:
    found = run(40, 0, tmp_path)
    assert found["same"] >= 10
    assert found["refused"] >= 3
