"""--model-memory-limit: what weights would take, before they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import has_bf16
from served import with_head

import ftbert
from ftbert.converters import open_checkpoint
from ftbert.server import Settings
from ftbert.server.loading import load_engine
from ftbert.server.metrics import Row
from ftbert.server.weight_memory import weight_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("weights"), hidden_size=256, intermediate_size=1024, num_hidden_layers=4)


@pytest.mark.parametrize("dtype", [None, "fp32", pytest.param("bf16", marks=has_bf16), "auto", "q8_0"])
def test_it_is_what_the_loaded_model_has(folder: Path, dtype: str | None, tmp_path: Path) -> None:
    """As its TorchScript file, which holds all of it once, beside a few kilobytes."""
    torch.jit.script(ftbert.load(folder, dtype=dtype).module).save(str(tmp_path / "model.pt"))
    size = (tmp_path / "model.pt").stat().st_size - 32_000
    assert weight_bytes(open_checkpoint(folder), CPU, dtype) == pytest.approx(size, rel=0.01)


def test_heads_count(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    few, many = (open_checkpoint(with_head(tmp_path / str(n), n, tiny_bert)) for n in (1, 1001))
    assert weight_bytes(many, CPU, None) - weight_bytes(few, CPU, None) == 1000 * (64 + 1) * 4


def test_a_model_with_more_is_refused_with_its_size(folder: Path) -> None:
    size = weight_bytes(open_checkpoint(folder), CPU, "fp32")
    settings = Settings((("m", str(folder)),), model_memory_limit=size - 1, batch_tokens=64)
    with pytest.raises(ValueError, match=rf"would take {size} bytes of memory, more than {size - 1} \(model-memory-limit\)"):
        load_engine(settings, 0, "cpu", None, Row())
    engine, about = load_engine(Settings((("m", str(folder)),), model_memory_limit=size, batch_tokens=64), 0, "cpu", None, Row())
    engine.close()
    assert about.model.hidden == 256
