"""Attention beyond BERT's: heads of keys that serve several of queries, another scale, windows, causal masks."""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import Any

import pytest
import reference
import torch
from compare import assert_close
from conftest import Place, places_here
from families import make_model
from hypothesis import given, settings
from hypothesis import strategies as st

import ftbert
from ftbert._library import load_library
from ftbert.gpus import Gpu

load_library()
ops = torch.ops.ftbert

WINDOWS = [(0, 0), (5, -1), (-1, 0), (64, 64), (63, 0), (130, 5), (1000, 1000)]


def random(rows: int, cols: int, place: Place, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(place.dtype).to(place.device)


SIZES = reference.FUSED_SIZES


def has_fused(place: Place, size: int) -> bool:
    """Of other sizes a GPU has no fused kernel: the general path takes those."""
    return place.device == "cpu" or size in SIZES


def fused(
    qkv: torch.Tensor, lengths: list[int], heads: int, kv_heads: int, scale: float | None, window: tuple[int, int],
    table: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    cu = reference.offsets(lengths, qkv.device.type)
    return ops.attention(qkv, cu, max(lengths, default=0), heads, table, kv_heads=kv_heads, scale=scale, left=window[0], right=window[1])


def general(
    qkv: torch.Tensor, lengths: list[int], heads: int, kv_heads: int, scale: float, left: int = -1, right: int = -1,
    relative_bias: torch.Tensor | None = None, soft_cap: float = 0, **positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    cu, seq = reference.offsets(lengths, qkv.device.type), max(lengths, default=0)
    q, k, v = ops.add_qkv_bias(qkv, None, cu, seq, heads, kv_heads)
    scores = (q.float() @ k.float().transpose(-1, -2)).contiguous()
    if positions:
        scores = ops.add_position_products(scores, q, k, cu, None, **positions)
    weights = ops.softmax(scores, cu, scale, relative_bias, None, qkv.dtype, left, right, soft_cap)
    return ops.transpose((weights.float() @ v.float()).to(qkv.dtype).contiguous(), cu, sum(lengths))


def check(
    place: Place, lengths: list[int], heads: int, kv_heads: int, size: int, scale: float | None, window: tuple[int, int],
    span: int = 0,
) -> None:  # fmt: skip
    """span: of a relative bias, if any; distances from it on are read as the last."""
    qkv = random(sum(lengths), (heads + 2 * kv_heads) * size, place)
    table, biases = None, None
    if span:
        table = random(heads, 2 * span - 1, place, seed=1)
        places = [torch.arange(n, device=qkv.device) for n in lengths]
        biases = [table.double()[:, (p - p[:, None]).clamp(1 - span, span - 1) + span - 1] for p in places]
    want = reference.attention(qkv, lengths, heads, biases, kv_heads, scale, *window)
    limit = max(6e-6, 4 * place.eps)
    got = general(qkv, lengths, heads, kv_heads, scale or 1 / math.sqrt(size), *window, table)
    assert_close(got, want, atol=limit, what="general")
    if not has_fused(place, size):
        with pytest.raises(RuntimeError, match="no kernel for head size"):
            fused(qkv, lengths, heads, kv_heads, scale, window, table)
        return
    got = fused(qkv, lengths, heads, kv_heads, scale, window, table)
    assert_close(got, want, atol=limit, what="fused")
    assert torch.equal(got, fused(qkv, lengths, heads, kv_heads, scale, window, table))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [26, *SIZES])
def test_heads_of_keys_serve_several_of_queries(place: Place, size: int, ratio: int, kv_heads: int) -> None:
    check(place, [33, 1, 200, 64], ratio * kv_heads, kv_heads, size, None, (-1, -1))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [26, *SIZES])
@pytest.mark.parametrize("lengths", [[5, 1, 17], [300, 2, 140, 64], [700]], ids=str)
def test_windows(place: Place, lengths: list[int], size: int, window: tuple[int, int]) -> None:
    check(place, lengths, 2, 1, size, None, window)


# Heads, heads of keys, lengths. On Hopper each has kernels of its own: they are chosen by the longest sequence, by whether
# there is a multiprocessor for each block of 64 queries, and by how many keys those see. On other GPUs blocks have 128
# queries where they are many, of some heads only where the longest sequence has more than 1024 tokens, or 2048. Tiles
# are of 64 keys.
EDGES = [1, 63, 64, 65, 127, 128, 129, 191, 192, 193]
CALLS = {
    "one tile": (4, 2, 12 * [64, 1, 63, 17, 0]),
    "few blocks": (2, 1, [513]),
    "few keys": (3, 1, 3 * EDGES),
    "many keys": (3, 1, [*EDGES, 0, 511, 512, 513, 1000]),
    "more": (2, 2, [4096, 1, 1000]),
    "many blocks": (12, 12, [*EDGES, 511, 512, 513, 700]),
    "many keys for many blocks": (12, 12, [2100, 1, 700, 65]),
    "shared keys for many blocks": (12, 4, [2600, 1, 700, 65]),
}


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 64), (0, 500), (1990, 0), (1500, 600)], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", CALLS)
def test_lengths_around_tiles(place: Place, call: str, size: int, window: tuple[int, int]) -> None:
    heads, kv_heads, lengths = CALLS[call]
    if place.device == "cpu" and call != "many keys":
        pytest.skip("a CPU has one kernel")
    qkv = random(sum(lengths), (heads + 2 * kv_heads) * size, place)
    want = reference.attention(qkv, lengths, heads, None, kv_heads, None, *window)
    got = fused(qkv, lengths, heads, kv_heads, None, window)
    assert_close(got, want, atol=max(6e-6, 4 * place.eps))
    assert torch.equal(got, fused(qkv, lengths, heads, kv_heads, None, window))


@pytest.mark.parametrize("window", [(-1, -1), (64, 64)], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_bias_of_many_blocks(place: Place, size: int, window: tuple[int, int]) -> None:
    if place.device == "cpu":
        pytest.skip("a CPU has one kernel")
    check(place, [1100, 1, 300], 32, 32, size, None, window, span=200)


@pytest.mark.parametrize("window", [(64, 64), (128, 0), (-1, 0), (0, 65), (3, -1)], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("copies", [1, 60])
def test_a_key_is_seen_up_to_the_windows_edge(place: Place, copies: int, size: int, window: tuple[int, int]) -> None:
    """One key has a value, and all weigh the same: who sees it has a part of it, however small."""
    if place.device == "cpu" and copies > 1:
        pytest.skip("a CPU has one kernel")
    length = 450
    left, right = (side if side >= 0 else length for side in window)
    queries = torch.arange(length, device=place.device)
    for key in (0, 63, 64, 200, 255, 256, 449):
        qkv = torch.zeros(length, 3 * size, dtype=place.dtype, device=place.device)
        qkv[key, 2 * size :] = 1024
        got = fused(qkv.repeat(copies, 1), copies * [length], 1, 1, None, window)
        seen = (queries - key <= left) & (key - queries <= right)
        assert torch.equal(got != 0, seen.repeat(copies)[:, None].expand(-1, size)), key


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_scale(place: Place, scale: float) -> None:
    check(place, [70, 129], 2, 2, 32, scale, (-1, -1))


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_see_nothing_of_their_blocks_first_tile(place: Place, size: int) -> None:
    """Of a block of queries some reach back to a tile of keys in which others see none; their scores are far below."""
    qkv = random(256, 3 * size, place)
    qkv[:, :size] = qkv[:, :size].abs() + 1
    qkv[:, size : 2 * size] = -qkv[:, size : 2 * size].abs() - 1  # every score below -1 times size
    for window in [(1, 0), (3, 3), (40, 0), (70, 0)]:
        want = reference.attention(qkv, [256], 1, scale=2.0, left=window[0], right=window[1])
        got = fused(qkv, [256], 1, 1, 2.0, window)
        assert bool(got.isfinite().all()), window
        assert_close(got, want, atol=max(2e-3, 40 * place.eps), what=str(window))


def test_keys_outside_of_a_window_do_not_matter(place: Place) -> None:
    size, lengths, window = 64, [200], (16, 0)
    qkv = random(200, 3 * size, place)
    want = fused(qkv, lengths, 1, 1, None, window)
    qkv[:50, size:] = float("nan")  # no query from 66 on sees these; of the same block some do
    assert torch.equal(fused(qkv, lengths, 1, 1, None, window)[128 + 16 :], want[128 + 16 :])


# What the ops call the members of a score policy, each as it changes most results.
MEMBERS: dict[str, dict[str, Any]] = {"window": {"left": 3, "right": 2}, "relative bias": {"relative_bias": None}, "soft cap": {"soft_cap": 0.5}, "products with positions": {"position_keys": None, "position_queries": None, "position_rows": None}}
# Heads, heads of keys, lengths: a call for each kernel of a GPU. A CPU has one.
KERNELS = [
    *((2, 2, [longest, 5]) for longest in (60, 16, 30, 128, 190, 300)),
    (4, 4, 70 * [16]), (4, 4, 70 * [30]), (8, 8, 150 * [100, 10]), (4, 4, 40 * [200]), (4, 2, [70, 300]), (4, 2, 40 * [300]),
]  # fmt: skip


def check_members(place: Place, path: str, heads: int, kv_heads: int, size: int, lengths: list[int]) -> None:
    qkv, last = 2 * random(sum(lengths), (heads + 2 * kv_heads) * size, place), torch.tensor(lengths).cumsum(0) - 1
    scale = 1 / math.sqrt(size)
    cu, table = reference.offsets(lengths, place.device), random(heads, 9, place, seed=1)
    table[:, 0] -= 8  # of the far keys, which are many: near ones decide, so each query feels the bias
    tables = [random(heads * size, 32, place, seed=seed).view(heads, size, 32) / 2 for seed in (2, 3)]
    rows = torch.tensor([1, 1, 2, 3, 5, 6, 7, 8, 9, 11, 12], dtype=torch.int32, device=place.device)
    values = {"relative_bias": table, "position_keys": tables[0], "position_queries": tables[1], "position_rows": rows}
    distances = [torch.arange(n, device=place.device) for n in lengths]
    biases = [table.double()[:, (p - p[:, None]).clamp(-4, 4) + 4] for p in distances]

    def run(given: dict[str, Any]) -> torch.Tensor:
        if path == "general":
            return general(qkv, lengths, heads, kv_heads, scale, **given)
        if path == "one query":  # of each sequence, the last
            q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
            one, end = reference.offsets([1] * len(lengths), place.device), cu[1:].contiguous()
            return ops.attention_apart(q[last].contiguous(), k, v, one, cu[:-1].contiguous(), 1, heads, kv_heads, scale, end_k=end, **given)
        out_scale = torch.tensor([0.05], device=place.device) if path == "to e4m3" else None
        made = ops.attention(qkv, cu, max(lengths), heads, kv_heads=kv_heads, scale=scale, bf16=path == "from bf16", out_scale=out_scale, **given)
        return made if out_scale is None else made.float() * out_scale

    def expected(given: dict[str, Any]) -> torch.Tensor:
        own = {key: value for key, value in given.items() if key not in values}
        added = biases if "relative_bias" in given else None
        positions = (*tables, rows) if "position_rows" in given else None
        want = reference.attention(qkv, lengths, heads, added, kv_heads, scale, positions=positions, **own)
        return want[last] if path == "one query" else want

    plain = expected({})
    for chosen in (names for count in range(5) for names in combinations(MEMBERS, count)):
        given = {key: values[key] if value is None else value for name in chosen for key, value in MEMBERS[name].items()}
        want = expected(given) if chosen else plain
        assert not chosen or (want - plain).abs().max() > 0.5  # whoever ignores a member is found out
        try:
            got = run(given)
        except RuntimeError as refusal:
            assert any(name in str(refusal) for name in chosen), (chosen, refusal)
            continue
        limit, share = {"to e4m3": (0.1, 0.07), "from bf16": (0.1, 0)}.get(path, (max(2e-4, 16 * place.eps), 2 * place.eps))
        assert_close(got, want, limit, share, f"{chosen}, {heads} heads, {len(lengths)} x {max(lengths)}")


@pytest.mark.parametrize("path", ["general", "fused", "to e4m3", "from bf16", "one query"])
@pytest.mark.parametrize("size", SIZES)
def test_every_path_reads_a_member_or_refuses_it_by_name(place: Place, size: int, path: str) -> None:
    if path == ("to e4m3" if place.device == "cpu" else "from bf16") or (path == "to e4m3" and place.dtype == torch.float32):
        pytest.skip("no such operands here")
    for heads, kv_heads, lengths in KERNELS[: 1 if place.device == "cpu" else None]:
        check_members(place, path, heads, kv_heads, size, lengths)


def test_a_model_says_which_member_the_fused_path_does_not_read(place: Place) -> None:
    model = make_model("gemma2", "encoder", 0, head_dim=32, attn_logit_softcapping=0.5, attn_implementation="eager")
    info = ftbert.load(model, device=place.device, dtype=place.dtype).info()
    assert info["attention"] == "general" and "soft cap" in info["attention_reason"]
    with pytest.raises(RuntimeError, match="the fused attention path has no kernel that reads the soft cap"):
        ftbert.load(model, device=place.device, dtype=place.dtype, attention="fused")


def test_info_names_the_kernels(place: Place) -> None:
    model = make_model("llama", "encoder", 0, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=128)
    fused = ftbert.load(model, device=place.device, dtype=place.dtype).info()
    general = ftbert.load(model, device=place.device, dtype=place.dtype, attention="general").info()
    assert "attention_kernels" not in general
    if place.device == "cpu":
        assert "attention_kernels" not in fused
    else:
        assert re.match(r"window all, 0: 1 text: attention_\w+, .* \(16 .*; 64 texts: .*; a token behind a cache: attention_decode$", fused["attention_kernels"])


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_kernels_of_positions_are_for_scores_with_them(place: Place, family: str) -> None:
    if place.device == "cpu" or place.dtype == torch.float32:
        pytest.skip("one kernel there")
    if Gpu.of("cuda").capability < 80 and family == "deberta-v2":
        pytest.skip("the general path there")
    model = make_model(family, "encoder", 0, num_attention_heads=4, hidden_size=128)
    kernels = ftbert.load(model, device=place.device, dtype=place.dtype).info()["attention_kernels"]
    assert ("attention_positions" in kernels) == (family == "deberta-v2")


HERE = places_here()
SIDES = st.one_of(st.sampled_from([-1, 0]), st.integers(0, 160))


@settings(max_examples=80, deadline=None)
@given(
    place=st.sampled_from(HERE),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 3, 8]),
    size=st.sampled_from([8, 48, *SIZES]),
    left=SIDES,
    right=SIDES,
    span=st.sampled_from([0, 0, 5, 200]),
)
def test_any_shape(place: Place, lengths: list[int], kv_heads: int, ratio: int, size: int, left: int, right: int, span: int) -> None:
    check(place, lengths, ratio * kv_heads, kv_heads, size, None, (left, right), span)


@settings(max_examples=80, deadline=None)
@given(
    place=st.sampled_from(HERE),
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 2),
    ratio=st.sampled_from([1, 3]),
    size=st.sampled_from(SIZES),
    left=SIDES,
    right=SIDES,
    max_q=st.integers(1, 300),
)
def test_queries_and_keys_of_their_own(
    place: Place, lengths: list[tuple[int, int]], kv_heads: int, ratio: int, size: int, left: int, right: int, max_q: int
) -> None:
    """The first rows of the last queries of longer sequences, with keys and values in tensors of other strides."""
    queries, keys = [min(pair) for pair in lengths], [max(pair) for pair in lengths]
    heads, kv = ratio * kv_heads, kv_heads * size
    qkv = random(sum(keys), heads * size + 2 * kv, place)
    all_q, k, v = qkv.split([heads * size, kv, kv], dim=1)
    last = torch.cat([part[len(part) - n :] for part, n in zip(all_q.split(keys), queries, strict=True)])
    v = torch.cat([v, v], dim=1)[:, :kv]
    cu_q, cu_k = (reference.offsets(n, place.device) for n in (queries, keys))
    got = ops.attention_apart(last, k, v, cu_q, cu_k, max_q, heads, kv_heads, 0.1, left, right)
    want = reference.attention(qkv, keys, heads, None, kv_heads, 0.1, left, right)
    for mine, all_rows, n in zip(got.split(queries), want.split(keys), queries, strict=True):
        assert_close(mine[:max_q], all_rows[len(all_rows) - n :][:max_q], atol=max(6e-6, 4 * place.eps))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [(-1, 0), (40, 0), (-1, -1)])
@pytest.mark.parametrize("queries", [1, 3, 70])
def test_keys_lie_in_slots(place: Place, size: int, window: tuple[int, int], queries: int) -> None:
    """Each sequence's keys are the first of a slot, out of the sequences' order; behind them lies anything."""
    lengths, slots, positions, heads, kv = [150, queries, 90], [2, 0, 3], 160, 4, 2
    qkv = [random(n, (heads + 2 * kv) * size, place, seed=n) for n in lengths]
    cache = torch.full((4 * positions, 2 * kv * size), float("nan"), dtype=place.dtype, device=place.device)
    for rows, slot in zip(qkv, slots, strict=True):
        cache[slot * positions :][: len(rows)] = rows[:, heads * size :]
    q = torch.cat([rows[len(rows) - queries :, : heads * size] for rows in qkv])
    begin = torch.tensor(slots, dtype=torch.int32, device=place.device) * positions
    end = begin + torch.tensor(lengths, dtype=torch.int32, device=place.device)
    k, v = cache.split(kv * size, dim=1)
    cu = reference.offsets([queries] * 3, place.device)
    got = ops.attention_apart(q, k, v, cu, begin, queries, heads, kv, 0.1, *window, end)
    for mine, rows in zip(got.split(queries), qkv, strict=True):
        want = reference.attention(rows, [len(rows)], heads, None, kv, 0.1, *window)[len(rows) - queries :]
        assert_close(mine, want, atol=max(6e-6, 4 * place.eps))


def behind_the_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int, right: int, table: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """One head in float64: query i stands at key i, also where there is none. Zeros of those that see no key."""
    distance = torch.arange(len(k), device=q.device) - torch.arange(len(q), device=q.device)[:, None]
    seen = (distance >= (-left if left >= 0 else -len(q))) & (distance <= (right if right >= 0 else len(k)))
    scores = q.double() @ k.double().T * scale
    if table is not None:
        span = (len(table) + 1) // 2
        scores = scores + table.double()[distance.clamp(1 - span, span - 1) + span - 1]
    return scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0) @ v.double()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 40), (2, -1)], ids=str)
@pytest.mark.parametrize("keys", [0, 3, 70])
def test_queries_behind_the_last_key(place: Place, keys: int, window: tuple[int, int], size: int) -> None:
    """Tokens that attend and are not attended to: of tensors of their own, and of packed rows whose last are no keys."""
    limit = max(6e-6, 4 * place.eps)
    q, k = random(200, size, place), random(keys, size, place, seed=1)
    cu_q, cu_k = (reference.offsets([n], place.device) for n in (200, keys))
    got = ops.attention_apart(q, k, k, cu_q, cu_k, 200, 1, 1, 0.1, *window)
    assert_close(got, behind_the_keys(q, k, k, 0.1, *window), atol=limit)
    lengths = [200, keys, 33, 200]
    rows, table = random(sum(lengths), 3 * size, place, seed=2), random(1, 15, place, seed=3)
    cu = reference.offsets(lengths, place.device)
    end = cu[:-1] + torch.tensor([keys, keys, 5, 64], dtype=torch.int32, device=place.device)
    for bias in (None, table):
        got = ops.attention_apart(*rows.split(size, 1), cu, cu[:-1].contiguous(), 200, 1, 1, 0.1, *window, end, bias)
        for mine, part, n in zip(got.split(lengths), rows.split(lengths), (keys, keys, 5, 64), strict=True):
            a, b, c = part.split(size, 1)
            assert_close(mine, behind_the_keys(a, b[:n], c[:n], 0.1, *window, None if bias is None else bias[0]), atol=limit)


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("window", [(40, 40), (300, 300), (300, 0)], ids=str)
def test_many_texts_whose_queries_go_on_behind_their_keys(place: Place, window: tuple[int, int], size: int) -> None:
    """More than a GPU computes at once: the kernels of several groups of queries, of which some see no key at all."""
    texts, queries, keys = 4 if place.device == "cpu" else 80, 700, 70
    rows = random(texts * queries, 2 * 3 * size, place)
    cu = reference.offsets([queries] * texts, place.device)
    got = ops.attention_apart(*rows.split(2 * size, 1), cu, cu[:-1].contiguous(), queries, 2, 2, 0.1, *window, cu[:-1] + keys)
    for text in (0, texts // 2, texts - 1):
        first = text * queries
        for head in range(2):
            q, k, v = (part[first : first + queries, head * size : (head + 1) * size] for part in rows.split(2 * size, 1))
            want = behind_the_keys(q, k[:keys], v[:keys], 0.1, *window)
            mine = got[first : first + queries, head * size : (head + 1) * size]
            assert_close(mine, want, atol=max(6e-6, 4 * place.eps))


def test_rows_that_a_gpu_cannot_read(place: Place) -> None:
    if place.device == "cpu":
        pytest.skip("a CPU reads any")
    q, cu = random(4, 64, place), reference.offsets([4], place.device)
    for other in (random(4, 65, place)[:, :64], random(4, 72, place)[:, 1:65]):
        with pytest.raises(RuntimeError, match="16 bytes at a time"):
            ops.attention_apart(q, other, q, cu, cu, 4, 2, 2, 0.1)
    far, one = q.as_strided((1, 64), (1 << 26, 1)), reference.offsets([1], place.device)
    with pytest.raises(RuntimeError, match="26 elements apart"):
        ops.attention_apart(q[:1], far, far, one, one, 1, 2, 2, 0.1)


def test_arguments_that_do_not_fit(place: Place) -> None:
    qkv, cu = random(4, 6 * 32, place), reference.offsets([4], place.device)
    with pytest.raises(RuntimeError, match="heads a multiple of kv_heads"):
        ops.attention(qkv, cu, 4, 3, kv_heads=2)
    with pytest.raises(RuntimeError, match="left"):
        ops.attention(qkv, cu, 4, 2, left=-2)
