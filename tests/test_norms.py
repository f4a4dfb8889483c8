"""RMSNorm and scaled embeddings: the kernels against float64 and against transformers' classes, and whole layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from compare import ONE_SUM, assert_close
from conftest import Place
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ftbert._library import load_library
from ftbert.checkpoint import (
    ModelConfig,
    NormConfig,
)

load_library()
ops = torch.ops.ftbert
COLS = [1, 7, 26, 64, 384, 768, 1024, 1028, 4096, 5000, 100_003]


def random(*shape: int, place: Place, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(place.dtype).to(place.device)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("parts", ["all", "no bias", "no input", "norm alone"])
@pytest.mark.parametrize(
    "offset,rounding", [(0.0, "before_gamma"), (0.0, "once"), (1.0, "once"), (-0.5, "before_gamma")]
)
def test_rms(place: Place, rows: int, cols: int, parts: str, offset: float, rounding: str) -> None:
    rows = min(rows, (1 << 18) // cols + 1)
    x, gamma, beta = (
        random(rows, cols, place=place),
        1 + 0.2 * random(cols, place=place, seed=3),
        random(cols, place=place, seed=4),
    )
    b = random(cols, place=place, seed=2) if parts in ("all", "no input") else None
    r = random(rows, cols, place=place, seed=1) if parts in ("all", "no bias") else None
    total = x.float()  # sums that nearly cancel become large again: with the kernels' rounding
    for one in (b, r):
        total = total if one is None else total + one.float()
    total = total.double()
    for one in (None, beta):
        out, made = ops.add_bias_input_layernorm(x, b, r, gamma, one, 1e-6, "rms", offset, rounding)
        expected = reference.rmsnorm(total, gamma.double(), 0 if one is None else one.double(), 1e-6, offset)
        assert_close(made, total, atol=place.eps, rtol=place.eps, what="sum")
        assert_close(out, expected, atol=8 * place.eps, rtol=(4 + cols / 16384) * ONE_SUM * place.eps)
        alone, nothing = ops.add_bias_input_layernorm(x, b, r, gamma, one, 1e-6, "rms", offset, rounding, False)
        assert torch.equal(alone, out) and nothing.numel() == 0


@pytest.mark.parametrize("cols", [7, 768, 9000])
@pytest.mark.parametrize("rounding", ["once", "before_gamma"])
def test_rms_of_rows_of_zeros_and_of_small_and_large_numbers(place: Place, cols: int, rounding: str) -> None:
    """1 / sqrt(1e-12) is no float16, nor is the square of 60000."""
    x = random(4, cols, place=place)
    x[0], x[2], x[3] = 0, x[2] * 1e-5, x[3].clamp(-1, 1) * 60000
    gamma = 1 + 0.2 * random(cols, place=place, seed=1)
    out, _ = ops.add_bias_input_layernorm(x, None, None, gamma, None, 1e-12, "rms", 0.0, rounding)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    expected = reference.rmsnorm(x.double(), gamma.double(), 0, 1e-12)
    assert_close(out, expected, atol=2 * place.eps, rtol=4 * ONE_SUM * place.eps)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("cols", [64, 1024, 3840])
@torch.no_grad()
def test_rms_is_that_of_transformers(place: Place, kind: type[torch.nn.Module], cols: int) -> None:
    norm = kind(cols, eps=1e-6).to(place.dtype).to(place.device)
    norm.weight.normal_(1.0, 0.3, generator=torch.Generator(place.device).manual_seed(0))
    x = random(64, cols, place=place, scale=3.0)
    offset, rounding = (1.0, "once") if kind is Gemma3RMSNorm else (0.0, "before_gamma")
    out, _ = ops.add_bias_input_layernorm(x, None, None, norm.weight, None, 1e-6, "rms", offset, rounding)
    expected = norm(x)
    if place.dtype == torch.float32:
        assert_close(out, expected, atol=0, rtol=8 * ONE_SUM * place.eps)
        return
    # Where a float lies between two 16-bit numbers, its last bit decides; a product of the one or the other follows.
    assert_close(out, expected, atol=0, rtol=2 * place.eps)
    assert (out != expected).float().mean() < 2e-3
    other, _ = ops.add_bias_input_layernorm(
        x, None, None, norm.weight, None, 1e-6, "rms", offset, "once" if rounding == "before_gamma" else "before_gamma"
    )
    assert (other != expected).float().mean() > 0.05  # the roundings differ


@pytest.mark.parametrize("cols", [1, 26, 312, 768, 4100])
@pytest.mark.parametrize("norm", ["none", "layer", "rms"])
@pytest.mark.parametrize("scale", [1.0, math.sqrt(640)])
@torch.no_grad()
def test_scaled_embeddings(place: Place, cols: int, norm: str, scale: float) -> None:
    if norm == "layer" and cols == 1:
        pytest.skip("LayerNorm of one number")
    embed = Gemma3TextScaledWordEmbedding(50, cols, 0, scale)
    embed.weight.copy_(random(50, cols, place=Place("cpu", place.dtype)))
    embed = embed.to(place.dtype).to(place.device)
    position, types = random(40, cols, place=place, seed=1), random(3, cols, place=place, seed=2)
    gamma, beta = 1 + 0.2 * random(cols, place=place, seed=3), random(cols, place=place, seed=4)
    generator = torch.Generator().manual_seed(0)
    ids, kinds = (torch.randint(0, n, (70,), generator=generator).to(place.device) for n in (50, 3))
    index = torch.randperm(70, generator=generator)[:33].to(place.device)
    places = torch.randint(0, 40, (33,), generator=generator).int().to(place.device)

    words = embed(ids[index])
    if norm == "none":
        got = ops.embeddings_layernorm(
            ids, None, index, places, embed.weight, None, None, None, None, 1e-6, scale=scale
        )
        assert torch.equal(got, words)
    total = words.double() + types.double()[kinds[index]] + position.double()[places.long()]
    expected = {
        "none": lambda: total,
        "layer": lambda: reference.layernorm(total, gamma.double(), beta.double(), 1e-6),
        "rms": lambda: reference.rmsnorm(total, gamma.double(), beta.double(), 1e-6, 1.0),
    }[norm]()
    vectors = (None, None) if norm == "none" else (gamma, beta)
    words_of_norm = {"kind": "rms", "offset": 1.0} if norm == "rms" else {}
    got = ops.embeddings_layernorm(
        ids, kinds, index, places, embed.weight, position, types, *vectors, 1e-6, scale=scale, **words_of_norm
    )
    assert_close(got, expected, atol=12 * ONE_SUM * place.eps, rtol=4 * ONE_SUM * place.eps)
    if place.device == "cuda":
        places[5] = 40
        got = ops.embeddings_layernorm(
            ids, kinds, index, places, embed.weight, position, types, *vectors, 1e-6, scale=scale, **words_of_norm
        )
        assert got[5].isnan().all() and not got[:5].isnan().any() and not got[6:].isnan().any()


def sandwich(of_result: bool) -> ModelConfig:
    norm = {"eps": 1e-6, "kind": "rms", "bias": False} | ({"offset": 1} if of_result else {"rounding": "before_gamma"})
    layer: dict[str, Any] = {
        "attention": {"heads": 4, "head_size": 32, "kv_heads": 2, "qkv_bias": False, "out_bias": False},
        "ffn": {"inter": 200, "activation": "gelu_pytorch_tanh", "up_bias": False, "down_bias": False},
        "norm_place": "pre", "attention_norm": norm, "ffn_norm": norm,
    }  # fmt: skip
    if of_result:
        layer |= {"attention_result_norm": norm, "ffn_result_norm": norm}
    return ModelConfig.from_json({
        "vocab": 50, "hidden": 128, "embedding": 128, "positions": {"kind": "none", "rows": 64}, "final_norm": norm,
        "embedding_scale": math.sqrt(128) if of_result else 1, "layers": [{"repeat": 3, **layer}],
    })  # fmt: skip


def forward(
    config: ModelConfig, weights: dict[str, torch.Tensor], ids: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Of packed ids, in the weights' type."""

    def norm(name: str, of: NormConfig | None, x: torch.Tensor) -> torch.Tensor:
        return x if of is None else reference.rmsnorm(x, weights[f"{name}.weight"], 0, of.eps, of.offset)

    x = weights["embeddings.word"][ids] * config.embedding_scale
    for i, layer in enumerate(config.layers):
        name = f"layers.{i}."
        qkv = norm(f"{name}attention.norm", layer.attention_norm, x) @ weights[f"{name}attention.qkv.weight"].T
        made = reference.attention(qkv, lengths, layer.attention.heads, kv_heads=layer.attention.kv_heads)
        made = made @ weights[f"{name}attention.out.weight"].T
        x = x + norm(f"{name}attention.result_norm", layer.attention_result_norm, made)
        made = norm(f"{name}ffn.norm", layer.ffn_norm, x) @ weights[f"{name}ffn.up.weight"].T
        made = reference.activation(made, layer.ffn.activation) @ weights[f"{name}ffn.down.weight"].T
        x = x + norm(f"{name}ffn.result_norm", layer.ffn_result_norm, made)
    return norm("final_norm", config.final_norm, x)


@pytest.mark.parametrize("of_result", [False, True], ids=["pre", "sandwich"])
def test_layers_with_rms(place: Place, of_result: bool) -> None:
    config, generator = sandwich(of_result), torch.Generator().manual_seed(0)
    weights = {}
    for name, shape, matrix, _ in config.weight_specs():
        tensor = torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if matrix else 0.3)
        tensor += "norm" in name and not of_result
        weights[name] = tensor.to(place.dtype).to(place.device)
    lengths = [17, 1, 40, 0, 9]
    ids = torch.randint(0, 50, (sum(lengths),), generator=generator).to(place.device)
    cu = reference.offsets(lengths, place.device)
    want = ["packed_tokens", "first", "last"]
    for path in ("fused", "general"):
        encoder = torch.classes.ftbert.Encoder(weights, config.text(), path)
        tokens, first, last = ops.forward_batch(encoder, ids, None, None, cu, max(lengths), want)
        expected = forward(config, {name: tensor.double() for name, tensor in weights.items()}, ids, lengths)
        limit = {"atol": max(1e-5, 24 * place.eps), "rtol": 8 * place.eps}
        assert_close(tokens, expected, **limit, what=path)
        ends = cu[1:].long()
        for rows, at in ((first, cu[:-1].long()), (last, ends - 1)):
            kept = torch.tensor(lengths) > 0
            assert_close(rows[kept], expected[at][kept], **limit, what=path)
