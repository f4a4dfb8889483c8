"""What pip and `python -m build` find: a library for this torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ftbert import _library
from ftbert.torch_release import torch_release


def test_releases_of_torch() -> None:
    assert torch_release("2.13.0+cpu") == torch_release("2.13.1") == "2.13.*"
    assert torch_release("2.13.0") != torch_release("2.1.3")
    assert torch_release("2.14.0.dev20260101+cu130") == "2.14.0.dev20260101"
    assert torch_release("2.11.0a0+eb65b36914.nv26.02") == "2.11.0a0"


def test_another_torch_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the library is touched: this one is no library at all."""
    (tmp_path / "libftbert.so").write_text("")
    (tmp_path / "built_for.json").write_text('{"torch": "1.4.2+cpu"}')
    monkeypatch.setattr(_library, "_LIBRARY", tmp_path / "libftbert.so")
    with pytest.raises(ImportError) as raised:
        _library.load_library.__wrapped__()
    said = str(raised.value)
    assert said.startswith(f"ftbert was built for torch 1.4.* and this is torch {torch.__version__};")
    assert "--no-build-isolation" in said and "\n" not in said


def test_the_build_records_its_torch() -> None:
    record = json.loads(_library.library_path().with_name("built_for.json").read_text())
    assert torch_release(record["torch"]) == torch_release(torch.__version__)
