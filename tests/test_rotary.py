"""Rotary positions, and norms over heads of queries and keys: the kernels, and models that have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from calls import kernels
from compare import assert_close
from conftest import Place, places_here
from heads import NORMS, Norm, as_rotary, frequencies, norm_arguments, turned
from hypothesis import given, settings
from hypothesis import strategies as st
from own_kernels import have_warpgroups
from torch import Tensor

from ftbert._library import load_library
from ftbert.checkpoint import (
    ModelConfig,
)

load_library()
ops = torch.ops.ftbert
def random(*shape: int, place: Place, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(place.dtype).to(place.device)


def check(place: Place, rows: int, kv_heads: int, ratio: int, size: int, dims: int, interleaved: bool, norm: Norm) -> None:
    """dims 0: no rotation."""
    heads, rounds = kv_heads * ratio, norm[3]
    qkv = random(rows, (heads + 2 * kv_heads) * size, place=place)
    weights = [1 + 0.2 * random(size, place=place, seed=seed) for seed in (1, 2, 3, 4)]
    positions = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(5)).int().to(place.device)
    table = ops.rotary_table(frequencies(dims).to(place.device), 1.0, 50) if dims else None
    got = ops.rotary(qkv, positions if dims else None, table, heads, kv_heads, interleaved, *norm_arguments(norm, weights))
    angles = positions.double()[:, None] * frequencies(dims).to(place.device)
    want = as_rotary(qkv.double(), heads, kv_heads, angles, interleaved, norm, weights)
    # Of the row that is normalised one bit more may be rounded.
    assert_close(got, want, atol=2e-6 + (4 * place.eps if rounds else 0), rtol=0.6 * place.eps + 1e-6)
    assert torch.equal(got[:, -kv_heads * size :], qkv[:, -kv_heads * size :])


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size,dims", [(32, 32), (64, 64), (64, 16), (64, 24), (80, 80), (96, 48), (128, 128), (256, 256), (256, 64), (7, 6), (64, 0)])
def test_heads(place: Place, size: int, dims: int, interleaved: bool, norm: Norm) -> None:
    check(place, 37, 2, 3, size, dims, interleaved, norm)


@pytest.mark.parametrize("kv_heads,ratio", [(1, 1), (12, 1), (1, 8), (4, 4)])
@pytest.mark.parametrize("rows", [0, 1, 700])
def test_rows_and_heads(place: Place, rows: int, kv_heads: int, ratio: int) -> None:
    check(place, rows, kv_heads, ratio, 64, 64, False, NORMS[3])


@pytest.mark.parametrize("size", [600, 1030])
def test_long_heads(place: Place, size: int) -> None:
    """Of which a GPU's threads hold more than their registers do."""
    for norm in NORMS:
        check(place, 9, 1, 2, size, size - 2, False, norm)
    check(place, 9, 1, 2, 2048, 2048, True, NORMS[1])


HERE = places_here()


@settings(max_examples=150, deadline=None)
@given(
    place=st.sampled_from(HERE),
    rows=st.integers(0, 70),
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 4),
    size=st.one_of(st.integers(1, 150), st.sampled_from([16, 32, 64, 128, 256])),
    part=st.floats(0, 1),
    interleaved=st.booleans(),
    norm=st.sampled_from(NORMS),
)
def test_any_shape(
    place: Place, rows: int, kv_heads: int, ratio: int, size: int, part: float, interleaved: bool, norm: Norm
) -> None:
    if norm[0] == "layer" and size < 4:
        norm = NORMS[0]  # a variance of almost nothing magnifies rounding
    check(place, rows, kv_heads, ratio, size, int(part * size) // 2 * 2, interleaved, norm)


def test_angles(device: str) -> None:
    """Of far positions, of many frequencies, of one that is high; each is the nearest float."""
    for of in (frequencies(64), frequencies(260, 1e6), torch.tensor([3e5], dtype=torch.float64)):
        table = ops.rotary_table(of.to(device), 1.25, 100001).cpu()
        for position in (0, 1, 77, 100000):
            want = torch.stack([(position * of).cos(), (position * of).sin()], dim=1)
            assert_close(table[position], 1.25 * want, atol=1e-7, rtol=6e-8)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(HERE), st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 7), st.sampled_from([4, 6, 64, 260]),
    st.floats(0.25, 8), st.integers(1, 30),
)  # fmt: skip
def test_angles_by_a_sequences_length(
    place: Place, lengths: list[int], more: int, dims: int, factor: float, trained: int
) -> None:
    """Theta grows as nomic's own code has it, NomicBertDynamicNTKRotaryEmbedding, for each sequence by its tokens."""
    theta, device = 1000.0, place.device
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    positions = torch.cat([*(torch.arange(n) + 3 for n in lengths), torch.zeros(more)]).int()
    got = ops.rotary_angles(frequencies(dims, theta).to(device), 1.25, factor, trained, positions.to(device), cu).cpu()
    rows = []
    for n in lengths:
        base = theta * (factor * n / trained - (factor - 1)) ** (dims / (dims - 2)) if n > trained else theta
        angle = (torch.arange(n).double() + 3)[:, None] * base ** (-torch.arange(0, dims, 2).double() / dims)
        rows.append(torch.stack([angle.cos(), angle.sin()], dim=2))
    assert_close(got, torch.cat([1.25 * torch.cat(rows), torch.zeros(more, dims // 2, 2)]), atol=2e-7, rtol=1e-6)


def test_far_positions_turn_by_their_own_angle(place: Place) -> None:
    of, positions = frequencies(64), torch.tensor([100000, 3], dtype=torch.int32, device=place.device)
    qkv = random(2, 3 * 64, place=place)
    got = ops.rotary(qkv, positions, ops.rotary_table(of.to(place.device), 1.0, 100001), 1)
    want = turned(qkv.double().view(2, 3, 64)[:, :2], positions.double()[:, None] * of.to(place.device), False)
    assert_close(got[:, :128], want.reshape(2, 128), atol=1e-6, rtol=0.6 * place.eps)


def test_as_transformers(device: str) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

    rows, size = 10, 64
    config = Qwen3Config(hidden_size=2 * size, num_attention_heads=2, head_dim=size, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    columns = torch.arange(rows, device=device)
    cos, sin = Qwen3RotaryEmbedding(config).to(device)(torch.zeros(1, device=device), columns[None])
    table = ops.rotary_table(frequencies(size).to(device), 1.0, rows)
    assert_close(table, torch.stack([cos[0, :, : size // 2], sin[0, :, : size // 2]], dim=-1), atol=1e-6)
    qkv = random(rows, 4 * size, place=Place(device, torch.float32))
    norms = [Qwen3RMSNorm(size).to(device) for _ in range(2)]
    for seed, one in enumerate(norms):
        one.weight.data = 1 + 0.2 * random(size, place=Place(device, torch.float32), seed=seed)
    q, k = qkv[:, : 2 * size].view(rows, 2, size), qkv[:, 2 * size : 3 * size].view(rows, 1, size)
    with torch.no_grad():
        want = apply_rotary_pos_emb(norms[0](q), norms[1](k), cos[0], sin[0])
    gammas = [one.weight.detach() for one in norms]
    got = ops.rotary(qkv, columns.int(), table, 2, 1, False, "rms", gammas[0], None, gammas[1], None, 1e-6)
    assert_close(got[:, : 3 * size], torch.cat(want, dim=1).reshape(rows, -1), atol=5e-6)


def test_heads_in_bf16_on_the_cpu() -> None:
    """What attention there reads of products in bf16; the norms' weights are the stream's."""
    qkv = torch.randn(33, 4 * 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    qkv[3, 5] = float("nan")
    gamma, positions = torch.rand(64) + 0.5, torch.arange(33, dtype=torch.int32)
    arguments = positions, ops.rotary_table(frequencies(48), 1.0, 33), 2, 1, False, "rms", gamma, None, gamma, None
    got, want = ops.rotary(qkv, *arguments), ops.rotary(qkv.float(), *arguments)
    assert torch.equal(got[:, :192].isnan(), want[:, :192].isnan()) and bool(got[3, 5].isnan())
    assert torch.equal(got.nan_to_num(), want.bfloat16().nan_to_num())


def test_a_position_outside_of_the_table(place: Place) -> None:
    qkv, table = random(3, 192, place=place), ops.rotary_table(frequencies(64).to(place.device), 1.0, 8)
    positions = torch.tensor([7, 8, -1], dtype=torch.int32, device=place.device)
    if place.device == "cpu":
        with pytest.raises(RuntimeError, match=r"positions: expected values in \[0, 8\), got 8 at \[1\]"):
            ops.rotary(qkv, positions, table, 1)
        return
    got = ops.rotary(qkv, positions, table, 1)
    assert bool(got[1:, :128].isnan().all()) and torch.equal(got[:, 128:], qkv[:, 128:]) and bool(got[0].isfinite().all())


# ---- models --------------------------------------------------------------------------------------------------------

LONGEST = 40


def model(place: Place, attention: str, positions: str, rows: int = LONGEST, heads: int = 4, size: int = 32) -> Any:
    """Two layers that turn heads in two ways, and one that norms them as well."""
    attentions: list[dict[str, Any]] = [
        {"rotary": {"theta": 1e4}},
        {"rotary": {"theta": 1e2, "dims": 16, "interleaved": True}, "window": [5, 5]},
        {"rotary": {"theta": 1e4}, "qk_norm": {"eps": 1e-6, "bias": False}},
    ]
    norm = {"eps": 1e-6}
    config = ModelConfig.from_json({
        "vocab": 50, "hidden": 64, "embedding": 64, "positions": {"kind": positions, "rows": rows}, "padding_id": 1,
        "embedding_norm": norm, "layers": [{"attention": one} for one in attentions],
        "layer": {
            "attention": {"heads": heads, "head_size": size, "kv_heads": 2}, "attention_norm": norm,
            "ffn": {"inter": 96, "activation": "gelu"}, "ffn_norm": norm,
        },
    })  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in config.weight_shapes().items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else noise * (shape[-1] ** -0.5 if len(shape) == 2 else 0.1)
    on_place = {name: one.to(place.device, place.dtype) for name, one in weights.items()}
    return torch.classes.ftbert.Encoder(on_place, config.text(), attention)


def batch(device: str) -> tuple[Tensor, Tensor]:
    """Right-padded, holed, left-padded, empty and full rows; the padding id alone at padding."""
    mask = torch.ones(5, 33, dtype=torch.int64)
    mask[0, 20:], mask[1, [0, 3, 4, 30]], mask[2, :9], mask[3] = 0, 0, 0, 0
    ids = torch.randint(2, 50, mask.shape, generator=torch.Generator().manual_seed(0)) * mask + (1 - mask)
    return ids.to(device), mask.to(device)


@pytest.mark.parametrize("attention", ["auto", "general"])
@pytest.mark.parametrize("positions", ["none", "absolute", "from_padding"])
def test_models(place: Place, positions: str, attention: str) -> None:
    """Wherever a model runs, by both paths, in recordings and with what the call reads: the same."""
    ids, mask = batch("cpu")
    want = model(Place("cpu", torch.float32), "general", positions).forward(ids, mask)[0]
    mine, limit = model(place, attention, positions), max(2e-5, 30 * place.eps)
    ids, mask = ids.to(place.device), mask.to(place.device)
    for _ in range(3):
        got = mine.forward(ids, mask)[0]
        assert_close(got, want, atol=limit)
    for name in ("first", "last"):
        rows = mine.forward_batch(ids, mask, None, None, 0, [name], None)[0]
        at = mask.argmax(1) if name == "first" else 32 - mask.flip(1).argmax(1)
        full = want[torch.arange(5), at.cpu()] * mask.cpu().any(1)[:, None]
        assert_close(rows, full, atol=limit, what=name)


@pytest.mark.parametrize("copies", [1, 60])
@pytest.mark.parametrize("size", [64, 128])
def test_models_whose_products_may_turn_heads(place: Place, size: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of sizes for which there are such products; of few tokens and heads of 64 on Hopper they do."""
    monkeypatch.setenv("FTBERT_DEFERRED_NORM", "off")
    ids, mask = batch("cpu")
    want = model(Place("cpu", torch.float32), "general", "none", size=size).forward(ids, mask)[0].repeat(copies, 1, 1)
    mine = model(place, "auto", "none", size=size)
    ids, mask = ids.repeat(copies, 1).to(place.device), mask.repeat(copies, 1).to(place.device)
    assert_close(mine.forward(ids, mask)[0], want, atol=max(2e-5, 30 * place.eps))
    if place.device == "cuda" and size == 64 and copies == 1:
        hopper = place.dtype != torch.float32 and have_warpgroups()
        assert kernels("rotary_kernel", lambda: mine.forward(ids, mask)) in ((0,) if hopper else (0, 3))


@pytest.mark.parametrize("positions", ["none", "from_padding"])
def test_a_text_is_the_same_alone_padded_and_packed(place: Place, positions: str) -> None:
    """Left padding moves columns, and angles are of differences."""
    mine, limit = model(place, "auto", positions), max(2e-5, 30 * place.eps)
    text = torch.randint(2, 50, (21,), generator=torch.Generator().manual_seed(1)).to(place.device)
    alone = mine.forward(text[None], None)[0][0]
    left = torch.cat([torch.ones(12, dtype=torch.int64, device=place.device), text])[None]
    assert_close(mine.forward(left, (left != 1).long())[0][0, 12:], alone, atol=limit, what="left-padded")
    cu = torch.tensor([0, 5, 26, 26, 30], dtype=torch.int32, device=place.device)
    among = torch.cat([text[:5], text, text[:4]])
    assert_close(mine.forward_packed(among, cu, 21)[5:26], alone, atol=limit, what="packed")


@pytest.mark.parametrize("positions", ["none", "absolute", "from_padding"])
def test_longer_than_the_table(place: Place, positions: str) -> None:
    mine, longest = model(place, "auto", positions), LONGEST - (2 if positions == "from_padding" else 0)
    ids = torch.full((1, longest + 1), 7, device=place.device)
    cu = torch.tensor([0, longest + 1], dtype=torch.int32, device=place.device)
    words = f"sequence of {longest + 1} tokens: the model has positions for {longest}"
    with pytest.raises(RuntimeError, match=words):
        mine.forward(ids, None)
    with pytest.raises(RuntimeError, match=words):  # few tokens, far away
        mine.forward(ids, torch.arange(longest + 1, device=place.device)[None] >= longest - 2)
    with pytest.raises(RuntimeError, match=words):
        mine.forward_packed(ids[0], cu, longest + 1)
    assert bool(mine.forward(ids[:, 1:], None)[0].isfinite().all())


def test_a_table_of_too_many_positions() -> None:
    cpu = Place("cpu", torch.float32)
    with pytest.raises(ValueError, match="tables of rotary positions of more than 2\\^21 rows"):
        model(cpu, "auto", "none", rows=2**21 + 1)
