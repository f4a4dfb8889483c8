"""Gated feed-forward layers: activation(gate) * up, the columns of both in turns."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import reference
import torch
from compare import assert_close
from conftest import Place, make_bert

import ftbert
from ftbert._library import load_library
from ftbert.checkpoint import activations

load_library()
ops = torch.ops.ftbert
ACTIVATIONS = sorted(set(activations().values()))


def random(*shape: int, place: Place, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(place.dtype).to(place.device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows,cols", [(0, 64), (1, 1), (3, 77), (65, 1152), (2, 3072), (700, 24)])
def test_add_bias_gate(place: Place, rows: int, cols: int, activation: str) -> None:
    x, bias = random(rows, 2 * cols, place=place, scale=2.0), random(2 * cols, place=place, seed=1)
    for b in (bias, None):
        expected = reference.gate(x.double() + (0 if b is None else b.double()), activation)
        assert_close(ops.add_bias_gate(x, b, activation), expected, atol=max(2e-5, place.eps / 4), rtol=place.eps)


def test_a_gate_of_what_is_no_number(place: Place) -> None:
    x = torch.tensor([[math.nan, 1.0, 1.0, math.nan, math.inf, 2.0, 3.0, -math.inf] * 8], dtype=place.dtype, device=place.device)
    got = ops.add_bias_gate(x, None, "silu")[0].tolist()
    assert all(map(math.isnan, [*got[0::4], *got[1::4]])) and got[2] == math.inf and got[3] == -math.inf


@pytest.mark.parametrize(
    "m,n,k", [(1, 64, 64), (7, 34, 20), (128, 768, 768), (65, 2, 130), (300, 1152, 384), (700, 400, 1100), (5000, 2304, 200)]
)  # fmt: skip
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear(place: Place, m: int, n: int, k: int, activation: str) -> None:
    """By whatever the plans choose: on Hopper kernels of ours that contain the gate, elsewhere add_bias_gate."""
    a, weight = random(m, k, place=place), random(n, k, place=place, scale=1 / math.sqrt(k), seed=1)
    bias = random(n, place=place, seed=2)
    for b in (bias, None):
        expected = reference.gate(a.double() @ weight.double().T + (0 if b is None else b.double()), activation)
        got = ops.product(a, weight, b, activation, True)
        assert_close(got, expected, atol=max(2e-5, 8 * place.eps), rtol=4 * place.eps)
        assert torch.equal(got, ops.product(a, weight, b, activation, True))


@pytest.mark.parametrize("matrices", ["of the stream", "bf16"])
@pytest.mark.parametrize("inter", [64, 20])
def test_layers_whose_up_does_not_depend_on_x(place: Place, inter: int, matrices: str) -> None:
    """Without a gate the same comes out of a down-projection whose columns are as many times larger."""
    if matrices == "bf16" and not (place.device == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("for CPUs with instructions for bf16")
    dtype = torch.bfloat16 if matrices == "bf16" else place.dtype
    model = ftbert.load(make_bert(intermediate_size=inter), device=place.device, dtype=dtype)
    config, plain = json.loads(model.encoder.config()), model.encoder.weights()
    gated, times = dict(plain), torch.tensor([-0.5, 1, 2, 0.25, -1] * inter, device=place.device)[:inter]
    for name, given in list(plain.items()):
        if name.endswith("ffn.down.weight"):
            plain[name] = given * times.to(given.dtype)
        elif name.endswith("ffn.up.weight"):
            gated[name] = torch.stack([given, torch.zeros_like(given)], 1).flatten(0, 1)
        elif name.endswith("ffn.up.bias"):
            gated[name] = torch.stack([given, times.to(given.dtype)], 1).flatten()
    ids = torch.randint(5, 99, (8, 60), generator=torch.Generator().manual_seed(0)).to(place.device)

    def tokens(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
        encoder = torch.classes.ftbert.Encoder(weights, json.dumps(config), "auto")
        return ops.forward_batch(encoder, ids, None, None, None, 0, ["tokens"], None)[0]

    want = tokens(plain, config)
    config["layer"]["ffn"]["gated"] = True
    got = tokens(gated, config)
    assert (want - model(ids).last_hidden_state).abs().max() > 0.1
    assert_close(got, want, atol=max(2e-5, 8 * place.eps) if dtype == place.dtype else 4e-2)
