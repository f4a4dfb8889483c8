"""The benchmark of generation: its GGUF files, peers that compute one function, gates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ftbert

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_decode  # noqa: E402
import decode_models  # noqa: E402
import decode_report as report  # noqa: E402

TINY = decode_models.SHAPES["tiny"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decode_models.write_random(tmp_path_factory.mktemp("decode") / "tiny.gguf", TINY)


def test_written_files_are_llama_cpps(tmp_path: Path, tiny: Path) -> None:
    """Read by llama.cpp's own package: types, places and numbers, also of a file whose matrices had another type."""
    found = gguf.GGUFReader(tiny)
    assert {one.tensor_type.name for one in found.tensors} == {"Q8_0", "F32"}
    assert found.fields["llama.attention.head_count_kv"].contents() == TINY.kv_heads
    again = gguf.GGUFReader(decode_models.requantise(tiny, tmp_path / "again.gguf"))
    for one, other in zip(found.tensors, again.tensors, strict=True):
        assert one.name == other.name and one.data_offset % 32 == other.data_offset % 32 == 0
        was, now = (gguf.quants.dequantize(x.data, x.tensor_type) for x in (one, other))
        assert np.abs(was - now).max() <= np.abs(was).max() / 220  # half a step, and the scale's rounding


def test_sizes_of_a_model(tiny: Path) -> None:
    assert decode_models.shape_of(tiny) == TINY
    model = decode_models.transformers_model(tiny, CPU, torch.float32)
    matrices = sum(one.numel() for name, one in model.named_parameters() if one.ndim == 2 and "embed_tokens" not in name)
    assert TINY.weights == matrices
    assert TINY.step_bytes(10, 3, 2.0, 4.0) == 2 * matrices + 3 * 10 * 2 * TINY.layers * 2 * 16 * 4
    assert decode_models.SHAPES["llama-2-7b"].weights * 34 / 32 == pytest.approx(7.0e9, rel=0.01)


def test_quick_run(tmp_path: Path) -> None:
    """All peers of this process compute one function, and each case has a time of each."""
    out = tmp_path / "decode.json"
    words = ["--quick", "--dtype", "fp32", "--folder", str(tmp_path), "--out", str(out)]
    assert bench_decode.main(words) == 0
    document = json.loads(out.read_text())
    names = {"transformers", "PyTorch", "ftbert fp32"}
    assert all(document["peers"][name]["error"] <= 1e-9 for name in names)
    assert [(row["generate"], row["batch"], row["tokens"]) for row in document["rows"]] == [
        (True, 1, 0), (True, 1, 24), (True, 3, 24), (False, 1, 16),
    ]  # fmt: skip
    assert all(set(row["peers"]) == names for row in document["rows"])


def test_a_peer_that_computes_something_else_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ftbert.load

    def other(model: Any, **options: Any) -> Any:
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.neg_()
        return load(model, **options)

    monkeypatch.setattr(ftbert, "load", other)
    out = tmp_path / "decode.json"
    words = ["--quick", "--dtype", "fp32", "--context", "0", "--prompt", "9", "--folder", str(tmp_path), "--out", str(out)]
    assert bench_decode.main(words) == 1
    document = json.loads(out.read_text())
    assert "logits differ from transformers'" in document["peers"]["ftbert fp32"]["failed"]
    assert all("ftbert fp32" not in row["peers"] for row in document["rows"])


def document() -> dict[str, Any]:
    def row(generate: bool, batch: int, tokens: int, **ms: float) -> dict[str, Any]:
        many = batch if generate else tokens
        peers = {name.replace("_", " ", 1): {"ms": t, "tokens_s": 1e3 * many / t, "share": 3 / t} for name, t in ms.items()}
        return {"generate": generate, "batch": batch, "tokens": tokens, "peers": peers}

    rows = [
        row(True, 1, 0, ftbert_q8_0=3.0, **{"llama.cpp_q8_0": 4.0}), row(True, 1, 448, ftbert_q8_0=3.2, **{"llama.cpp_q8_0": 4.2}),
        row(True, 8, 448, ftbert_q8_0=4.7), row(False, 1, 512, ftbert_q8_0=20.0, **{"llama.cpp_q8_0": 45.0}),
    ]  # fmt: skip
    peers = {"ftbert q8_0": {}, "llama.cpp q8_0": {}, "ftbert bf16": {"failed": "no"}, "transformers": {"failed": "nor this"}}
    facts = {"device": "cuda", "gpu": "GPU", "dtype": "q8_0"}
    return {"provenance": facts, "model": "llama-2-7b", "copy_gbs": 3000.0, "products_ms": {"512": 15.0}, "peers": peers, "rows": rows}


def test_gates_and_failures() -> None:
    said = list(report.gates(document()))
    assert said == [
        "met: llama-2-7b, tokens behind 0, ftbert q8_0 to llama.cpp q8_0: 1.333, at least 1.3",
        "met: llama-2-7b, tokens behind 448, ftbert q8_0 to llama.cpp q8_0: 1.313, at least 1.3",
        "met: ftbert q8_0, share of copy bandwidth behind 448: 0.9375, at least 0.75",
        "met: ftbert q8_0, step of 8 texts to that of one: 1.469, at most 1.5",
        "missed: ftbert q8_0, prompt of 512 to its products: 1.333, at most 1.25",
        "missed: prompt of 512, ftbert q8_0 to llama.cpp q8_0: 2.25, at least 2.5",
    ]
    assert list(report.failures(document())) == ["ftbert bf16: no"]
