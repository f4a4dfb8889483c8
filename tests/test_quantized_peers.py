"""The benchmark's models in 8 bits, ours beside them, and its lengths."""

from __future__ import annotations

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
import int8_peers  # noqa: E402
import peers  # noqa: E402
import points  # noqa: E402
import quantized  # noqa: E402

from ftbert.converters import open_checkpoint  # noqa: E402

CPU = torch.device("cpu")
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"intermediate_size": 128},
    "modernbert": {"intermediate_size": 96, "local_attention": 8, "global_attn_every_n_layers": 2},
    "qwen3": {"intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300, "pad_token_id": 0}



def model(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | CONFIGS[family])
    return AutoModel.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference() -> Any:
    return model("bert")


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


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_models_in_e4m3(family: str) -> None:
    reference = model(family)
    folder = quantized.quantized_folder(reference, peers.E4M3)
    assert folder == quantized.quantized_folder(reference, peers.E4M3)  # written once
    plain, stored = open_checkpoint(reference), open_checkpoint(folder)
    matrices = [spec.name for spec in stored.config.encoder.weight_specs() if spec.matrix and spec.stored]
    assert len(matrices) == 4 * 3 and stored.stored_dtype == quantized.beside_e4m3(reference)
    for name in matrices:
        matrix, scale = stored.read(name, peers.E4M3), stored.read(f"{name}.scale", torch.float32)
        want = plain.read(name)
        assert (matrix.float() * scale[:, None] - want).abs().max() <= 2**-4 * want.abs().max()
        read = stored.read(f"{name.removesuffix('.weight')}.input.scale", torch.float32)
        assert read.shape == (1,) and 1e-5 < float(read) < 1


@pytest.mark.parametrize("batch", [8, 32, 64, 128, 1000])
def test_lengths_as_of_mlperf(batch: int) -> None:
    lengths = points.mlperf_lengths(batch)
    assert len(lengths) == batch and lengths == points.mlperf_lengths(batch)
    assert abs(sum(lengths) / batch - 177) <= 1 and max(lengths) == 384 and min(lengths) >= 16
    assert points.make_batch(300, batch, 384, "mlperf", CPU).lengths == lengths
