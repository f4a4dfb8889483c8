"""The benchmark's peers in fp8, its quantized models and its lengths, on the CPU: whatever of them needs no GPU."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import bench_model  # noqa: E402
import fp8_peers  # noqa: E402
import modern_peers  # noqa: E402
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


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES | CONFIGS[request.param])
    return AutoModel.from_config(config, dtype=torch.float32).eval()


def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, window: int = -1) -> Tensor:
    """FlashAttention's call where there is none. q [tokens, heads, head_size]"""
    out = torch.empty_like(q)
    for first, last in itertools.pairwise(cu.tolist()):
        apart = torch.arange(last - first)[:, None] - torch.arange(last - first)
        seen = apart.abs() <= (window if window >= 0 else longest)
        if getattr(self, "causal", False):
            seen &= apart >= 0
        heads = [x[first:last].transpose(0, 1)[None].float() for x in (q, k, v)]
        sums = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        out[first:last] = sums[0].transpose(0, 1).to(q.dtype)
    return out


def result(peer: Any, batch: peers.Batch) -> Tensor:
    """Of the call that a CUDA graph would record."""
    positions = torch.cat([torch.arange(n) for n in batch.lengths])
    if isinstance(peer, modern_peers.PackedModern):
        peer.angles = {}
        for kind in set(peer.layer_types):
            extra = {} if peer.causal else {"layer_type": kind}
            cos, sin = peer.model.rotary_emb(torch.empty(1), positions[None], **extra)
            peer.angles[kind] = modern_peers.Angles(cos[0, :, None], sin[0, :, None])
    return peer.forward(batch.packed, positions, batch.cu_seqlens, max(batch.lengths))  # type: ignore[no-any-return]


def eager(peer: Any) -> None:
    peer.embed, peer.run = peer.embeddings, peer.layer
    peer.last = lambda x: peer.norm(x, peer.final_weight)


KINDS = [kind for kind in fp8_peers.FP8_PEERS if issubclass(kind, peers.RecordedPacked)]


def scales_rows() -> bool:
    """Whether this torch multiplies E4M3 with a scale for each row on the CPU."""
    eye = torch.eye(16, dtype=torch.float32).to(peers.E4M3)
    try:
        torch._scaled_mm(eye, eye.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def skip_without_its_product(kind: Any) -> None:
    if getattr(kind, "by_rows", False) and not scales_rows():
        pytest.skip("this torch has no scales of rows on the CPU")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@torch.inference_mode()
def test_pytorch_in_fp8_computes_the_model(kind: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if reference.config.model_type not in kind.families or getattr(kind, "cudnn", False):
        pytest.skip("a peer of other models or batches")
    skip_without_its_product(kind)
    monkeypatch.setattr(kind, "attend", attend)
    batch = points.make_batch(300, 5, 24, "half", CPU)
    want = reference(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state[batch.valid]
    peer = bench_model.build(kind, reference, CPU, peers.E4M3)
    eager(peer)
    found = bench_model.compare(lambda: result(peer, batch), want, batch)
    narrow = issubclass(kind, fp8_peers.ScaledProducts)
    assert found["rms_diff"] < (0.1 if narrow else 0.02) and peer.passes(found["max_abs_diff"])
    assert not narrow or found["rms_diff"] > 2e-3  # what the products read is rounded


@pytest.mark.parametrize("kind", [fp8_peers.PackedTensorScales, fp8_peers.PackedRowScales], ids=lambda kind: kind.__name__)
@torch.inference_mode()
def test_pytorch_in_fp8_compiles(kind: Any, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for every size; a layer of it, as on a GPU."""
    if reference.config.model_type != "bert":
        pytest.skip("one family will do: a compiler takes its time")
    skip_without_its_product(kind)
    monkeypatch.setattr(kind, "attend", attend)
    peer: Any = bench_model.build(kind, reference, CPU, peers.E4M3)
    compiled = torch.compile(peer.linear, dynamic=True)
    weights = peer.layers[0]
    for rows in (9, 32):
        x = torch.randn(rows, 64).half()
        assert (compiled(x, weights[0], weights[1]) - peer.linear(x, weights[0], weights[1])).abs().max() < 2e-2


@torch.inference_mode()
def test_quantized_models_of_the_benchmark(reference: Any) -> None:
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


def test_only_our_names_and_peers_of_fp8_run_in_fp8() -> None:
    every = (*peers.PEERS, *modern_peers.MODERN_PEERS, *fp8_peers.FP8_PEERS)
    for family in CONFIGS:
        names = [kind.name for kind in every if peers.E4M3 in kind.dtypes and family in (kind.families or CONFIGS)]
        assert len(names) == len(set(names)) and {"ftbert, packed", "ftbert, packed, 16 bits"} < set(names)
        assert all(name.startswith("ftbert") or "fp8" in name or "16 bits" in name for name in names)


@pytest.mark.parametrize("batch", [8, 32, 64, 128, 1000])
def test_lengths_as_of_mlperf(batch: int) -> None:
    lengths = points.mlperf_lengths(batch)
    assert len(lengths) == batch and lengths == points.mlperf_lengths(batch)
    assert abs(sum(lengths) / batch - 177) <= 1 and max(lengths) == 384 and min(lengths) >= 16
    assert points.make_batch(300, batch, 384, "mlperf", CPU).lengths == lengths


@pytest.mark.parametrize("text", ["large:64x512:mlperf", "large:1x384:mlperf", "large:64x384:mlper", "huge:1x1:full"])
def test_points_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        points.parse_point(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp8_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_model.main(["--dtype", "fp8"])
    assert "a GPU of compute capability 9.0" in capsys.readouterr().err
