"""What tests of fp8's loading share: few texts to calibrate by, and which sources were quantized."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ftbert.quantization import cache, calibration_texts, quantize


@contextmanager
def few_calibration_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calibration takes a fraction of its time: threads wait for each other over such small matrices."""
    few, threads = calibration_texts()[:30], torch.get_num_threads()
    monkeypatch.setattr(sys.modules["ftbert.quantization.quantize"], "calibration_texts", lambda: few)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quantized_sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sources that are quantized from here on, in their order."""
    sources: list[str] = []

    def counted(source: Path, *args: Any, **kwargs: Any) -> Any:
        sources.append(source.name)
        return quantize(source, *args, **kwargs)

    monkeypatch.setattr(cache, "quantize", counted)
    return sources
