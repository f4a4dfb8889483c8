"""The benchmark's run in int8: its peers, its quantized model, and its tables."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_model  # noqa: E402
import floors  # noqa: E402
import int8_peers  # noqa: E402
import peers  # noqa: E402
import points  # noqa: E402
import quantized  # noqa: E402
import report  # noqa: E402
import runtimes  # noqa: E402

CPU = torch.device("cpu")
THEIRS = [kind for kind in (*int8_peers.INT8_PEERS, runtimes.OnnxInt8) if not issubclass(kind, peers.Ftbert)]


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=300
    )
    return AutoModel.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", THEIRS, ids=lambda kind: kind.__name__)
@torch.inference_mode()
def test_others_compute_the_model_in_int8(kind: Any, reference: Any) -> None:
    if not kind.available():
        pytest.skip(f"{kind.needs} is not installed")
    peer = bench_model.build(kind, reference, CPU, torch.int8)
    batch = points.make_batch(300, 5, 24, "half", CPU)
    want = reference(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state[batch.valid]
    found = bench_model.compare(peer.prepare(batch), want, batch)
    assert 1e-4 < found["rms_diff"] < 0.1 and peer.passes(found["max_abs_diff"])  # rounded, and no more than that


@torch.inference_mode()
def test_a_matrix_comes_back_from_its_parts(reference: Any) -> None:
    for name, module in reference.named_modules():
        if not name.startswith("encoder.") or not isinstance(module, torch.nn.Linear):
            continue
        parts = quantized.in_parts_of_int8(module.weight, reference, name)
        stored, scale, smooth = parts["weight"], parts["weight.scale"], parts["input.smooth"]
        assert stored.dtype == torch.int8 and (stored.abs().amax(1) == 127).all() and (smooth > 0).all()
        off = stored * scale[:, None] * smooth - module.weight
        assert (off.abs() <= 0.5001 * scale[:, None] * smooth).all()
        read = quantized.seen_inputs(reference)[name].largest * smooth
        shared = read / (module.weight / smooth).abs().amax(0)
        torch.testing.assert_close(shared, shared.mean().expand_as(shared))  # both are as large, but for a factor


def test_only_int8_and_ours_run_in_int8() -> None:
    every = (*bench_model.PEERS, *bench_model.MODERN_PEERS, *bench_model.FP8_PEERS, *THEIRS, *int8_peers.INT8_PEERS[:2])
    names = [kind.name for kind in every if torch.int8 in kind.dtypes and "cpu" in kind.devices]
    assert len(names) == len(set(names)) and {"ftbert", "ftbert, fp32", "ftbert, bf16"} < set(names)
    assert all(name.startswith("ftbert") or "int8" in name for name in names)


def test_int8_is_the_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_model.main(["--dtype", "int8", "--device", "cuda"])
    assert "--dtype int8 needs --device cpu" in capsys.readouterr().err


def test_products_in_int8_have_a_floor(reference: Any) -> None:
    assert 0 < floors.cpu_gemm_floor(reference, 9, torch.int8) < 1


def test_a_run_in_int8_becomes_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ours in wider types, which are never the fastest, and errors."""
    names = ["ftbert", "ftbert, fp32", "ftbert, bf16", "onnxruntime int8", "OpenVINO int8", "CTranslate2 int8"]
    rows = {name: {"ms": 2.0 + i, "max_abs_diff": 0.01, "rms_diff": 0.002} for i, name in enumerate(names)}
    rows["ftbert, bf16"]["ms"] = 1.0
    rows["CTranslate2 int8"]["max_abs_diff"] = 3.0
    facts = {
        "dtype": "int8", "cpu": "AMD EPYC Processor", "cpu_capability": "AVX512", "threads": 2, "commit": "a" * 40,
        "packages": {"torch": "2.13.0", "transformers": "5.17.0"},
    }  # fmt: skip
    results = [
        {"model": model, "batch": batch, "longest": 128, "fill_name": fill, "tokens": 614, "peers": rows}
        for model, batch, fill in (("base", 16, "ragged"), ("minilm", 32, "full"))
    ]
    accuracy = {"mean_cosine": 0.99952, "worst_cosine": 0.9991, "spearman": 0.82, "spearman_delta": -0.0002}
    models = [{"name": "it", "texts": 9, "rows": {"ftbert int8": accuracy, "other": {"failed": "words"}}}]
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "cpu-int8.json").write_text(json.dumps({"provenance": facts, "results": results}), encoding="utf-8")
    (tmp_path / "int8-accuracy.json").write_text(json.dumps({"provenance": facts, "models": models}), encoding="utf-8")
    kinds = ("results: cpu-int8", "summary: cpu-int8", "accuracy: int8-accuracy")
    text = report.fill_marks("".join(f"<!-- {kind} -->\n<!-- end -->\n" for kind in kinds))
    assert report.fill_marks(text) == text
    assert "| ftbert, bf16 | onnxruntime int8 | OpenVINO int8 | CTranslate2 int8 (off by 3) |" in text
    assert "| base 16x128 ragged | 614 | **2** | 3 | 1 | 5 | 6 | 7 |" in text
    assert "| milliseconds | ftbert | onnxruntime | OpenVINO |" in text
    assert "| AMD EPYC, AVX-512, int8, minilm 32x128 full | **2** | 5 | 6 |" in text
    assert "| base | 0.002 (0.01) | 0.002 (0.01) |" in text
    assert "| it, ftbert int8 | 0.99952 | 0.9991 | -0.0002 |" in text and "words" not in text


@torch.inference_mode()
def test_ours_computes_the_quantized_model(reference: Any) -> None:
    """In int8, and in the wider types beside it, which are nearer."""
    batch = points.make_batch(300, 5, 24, "half", CPU)
    want = reference(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state[batch.valid]
    off = {}
    for kind in (peers.Ftbert, int8_peers.FtbertBf16, int8_peers.FtbertFp32):
        made = bench_model.attempt(partial(bench_model.build, kind, reference, CPU, torch.int8))
        if isinstance(made, str) and "this CPU" in made:
            pytest.skip(made)
        off[kind.name] = bench_model.compare(made.prepare(batch), want, batch)["rms_diff"]
    assert off["ftbert, fp32"] < 1e-5 < off["ftbert"] < 0.05 and off["ftbert, bf16"] < 0.02
