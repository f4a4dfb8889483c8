"""A few seconds of what `make fuzz` and `make kills` do for minutes, each in a process that has no threads yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fuzz_text
import pytest


@pytest.mark.parametrize(("script", "count"), [("fuzz_files.py", 40), ("fuzz_onnx.py", 20), ("kills.py", 10)])
def test_nothing_is_wrong(script: str, count: int) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / script), "--count", str(count)],
        env={**os.environ, "PYTHONPATH": str(here.parent)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_random_settings_equal_sentence_transformers_or_are_refused(tmp_path: Path) -> None:
    found = fuzz_text.run(40, 0, tmp_path)
    assert found["same"] >= 10 and found["refused"] >= 3


def test_a_child_is_judged() -> None:
    """Also what goes wrong in it: a fuzzer that sees nothing finds nothing."""
    code = (
        "import os, time, isolated\n"
        "print([isolated.run(call, 1.0, 1 << 28)[0] for call in (lambda: 1, lambda: 1 / 0, os.abort,"
        " lambda: time.sleep(9), lambda: bytes(1 << 30))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['done', 'raised', 'crash', 'hang', 'memory']"
