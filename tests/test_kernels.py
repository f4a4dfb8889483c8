"""Every kernel against its float64 reference, on every device and dtype."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from compare import ONE_SUM, assert_close
from conftest import Place
from own_kernels import VARIANTS, WORDS, have_warpgroups, supports

from ftbert._library import load_library
from ftbert.checkpoint import activations
from ftbert.text.pooling_settings import POOLINGS
from ftbert.tuning import WITH_LAYERNORM, WITH_NORM, WITH_PRENORM, Product

load_library()
ops = torch.ops.ftbert
ACTIVATIONS = sorted(set(activations().values()))
KERNEL_POOLINGS = [mode for mode in POOLINGS if mode != "weightedmean"]

RAGGED = [[1], [5, 1, 0, 17, 64, 2], [33, 128, 7], [65, 127, 63], [16] * 9, [0, 0], [], [130, 1, 129], [300, 511]]


def copies_for(place: Place, copies: int) -> int:
    """Those that fill a GPU; a CPU does one sequence after another, of a few as of many."""
    return copies if place.device == "cuda" else min(copies, 3)


def random(*shape: int, place: Place, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(place.dtype).to(place.device)


@pytest.mark.parametrize("cols", [1, 7, 26, 64, 312, 384, 768, 1024, 1028, 4096, 5000])
@pytest.mark.parametrize("rows", [0, 1, 3, 130])
@pytest.mark.parametrize("parts", ["all", "no bias", "no input", "neither", "no beta", "no norm"])
def test_add_bias_input_layernorm(place: Place, rows: int, cols: int, parts: str) -> None:
    x, residual = random(rows, cols, place=place), random(rows, cols, place=place, seed=1)
    bias = random(cols, place=place, seed=2)
    gamma, beta = 1 + 0.2 * random(cols, place=place, seed=3), random(cols, place=place, seed=4)
    bias = None if parts in ("no bias", "neither") else bias
    residual = None if parts in ("no input", "neither") else residual
    beta = None if parts in ("no beta", "no norm") else beta
    gamma = None if parts == "no norm" else gamma
    out, total = ops.add_bias_input_layernorm(x, bias, residual, gamma, beta, 1e-5)
    expected = x.double() + (0 if bias is None else bias.double()) + (0 if residual is None else residual.double())
    assert_close(total, expected, atol=place.eps, rtol=place.eps, what="sum")
    if gamma is not None:
        expected = reference.layernorm(expected, gamma.double(), 0 if beta is None else beta.double(), 1e-5)
    assert_close(out, expected, atol=8 * ONE_SUM * place.eps, rtol=2 * place.eps)


def test_layernorm_is_exact_far_from_zero(place: Place) -> None:
    """A one-pass variance (E[x^2] - E[x]^2) loses everything here."""
    x = random(4, 768, place=place) * 8 + 256
    ones, zeros = torch.ones_like(x[0]), torch.zeros_like(x[0])
    out, _ = ops.add_bias_input_layernorm(x, None, None, ones, zeros, 1e-12)
    assert_close(out, reference.layernorm(x.double(), ones.double(), zeros.double(), 1e-12), atol=1e-4 + 8 * place.eps)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows,cols", [(0, 64), (1, 1), (3, 77), (65, 1536), (2, 3072)])
def test_add_bias_act(place: Place, rows: int, cols: int, activation: str) -> None:
    x, bias = random(rows, cols, place=place, scale=3.0), random(cols, place=place, seed=1)
    for b in (bias, None):
        expected = reference.activation(x.double() + (0 if b is None else b.double()), activation)
        assert_close(ops.add_bias_act(x, b, activation), expected, atol=max(2e-6, place.eps / 4), rtol=place.eps)


def test_activations_over_their_whole_range(place: Place) -> None:
    x = (
        torch.cat([torch.linspace(-30, 30, 6001), torch.linspace(-0.3, 0.3, 2001)])[None]
        .to(place.dtype)
        .to(place.device)
    )
    for activation in ACTIVATIONS:
        got = ops.add_bias_act(x, None, activation)
        # The last term: the approximations' own error, absolute, next to 1 at most.
        assert_close(
            got, reference.activation(x.double(), activation), atol=1e-6, rtol=place.eps * 1.5, what=activation
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_what_is_no_number(place: Place, activation: str) -> None:
    x = torch.tensor([[math.nan, math.inf, 65504.0, 1.0] * 8], dtype=place.dtype, device=place.device)
    got = ops.add_bias_act(x, None, activation)[0].tolist()
    assert all(map(math.isnan, got[0::4]))
    assert got[1] == (1.0 if activation == "tanh" else math.inf)
    assert got[2] == (1.0 if activation == "tanh" else x[0, 2].item())


@pytest.mark.parametrize(
    "lengths",
    [*RAGGED, [16, 1, 9, 0], [32, 17, 0], [64, 5, 0], [193, 1, 64, 0], [700, 65, 3, 0], [129, 256, 255, 0], [449, 0]],
    ids=str,
)
@pytest.mark.parametrize(  # a GPU has room for all blocks of queries at once, or with 24 copies not
    "heads,head_size,copies",
    [(2, 32, 1), (2, 32, 24), (3, 64, 1), (3, 64, 24), (2, 128, 1), (3, 128, 24), (2, 26, 1), (2, 80, 1), (3, 96, 24), (1, 256, 24), (2, 17, 1)],
)
def test_attention(place: Place, lengths: list[int], heads: int, head_size: int, copies: int) -> None:
    if place.device == "cuda" and head_size not in reference.FUSED_SIZES:
        pytest.skip("no fused kernel on CUDA")
    lengths = copies_for(place, copies) * lengths
    qkv = random(sum(lengths), 3 * heads * head_size, place=place)
    cu, expected = reference.offsets(lengths, place.device), reference.attention(qkv, lengths, heads)
    least = 3e-6 if head_size > 80 and copies > 1 else 2e-6  # the largest error of more and longer sums
    for slack in (0, 70):  # max_seqlen is an upper bound
        longest = max(lengths, default=0) + slack
        out = ops.attention(qkv, cu, longest, heads)
        assert_close(out, expected, atol=max(least, 2 * place.eps), what=f"slack {slack}")
        assert torch.equal(out, ops.attention(qkv, cu, longest, heads))


def test_attention_of_more_than_a_cache_holds(place: Place) -> None:
    """A GPU then reads offsets in another way; what a sequence gets is the same as among a few."""
    few, heads, head_size = [128, 100, 1, 64, 65], 16, 64
    lengths, tokens = 28 * few, sum(few)
    qkv = random(28 * tokens, 3 * heads * head_size, place=place)
    all_at_once = ops.attention(qkv, reference.offsets(lengths, place.device), max(few), heads)
    cu = reference.offsets(few, place.device)
    for i, (part, got) in enumerate(zip(qkv.split(tokens), all_at_once.split(tokens), strict=True)):
        assert torch.equal(got, ops.attention(part.contiguous(), cu, max(few), heads)), f"part {i}"


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize(  # mostly padding, or not, up to 128 keys and more
    "few", [[330, 1, 65, 0, 97, 129, 64, 33, 32, 31], [200, 193, 160, 161, 200], [128, 1, 65, 0, 97, 33, 32, 64], [128, 97]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("heads,head_size", [(6, 32), (6, 64), (6, 128)])
def test_attention_of_many(place: Place, heads: int, head_size: int, few: list[int], scale: float) -> None:
    """More than eight blocks of queries for each of a GPU's multiprocessors; what the same sequences get is the same."""
    copies, tokens = copies_for(place, 1500 // (len(few) * heads * -(-max(few) // 64))), sum(few)
    scale *= (64 / max(head_size, 64)) ** 0.25  # scores of larger heads are no larger
    qkv, cu = random(copies * tokens, 3 * heads * head_size, place=place, scale=scale), reference.offsets(copies * few, place.device)
    out = ops.attention(qkv, cu, max(few), heads)
    limit = max(2e-6, 2 * place.eps) if scale <= 1 else max(5e-4, 40 * place.eps)
    assert_close(out, reference.attention(qkv, copies * few, heads), atol=limit)
    for i, got in enumerate(ops.attention(qkv[:tokens].repeat(copies, 1), cu, max(few), heads).split(tokens)):
        assert torch.equal(got, out[:tokens]), f"part {i}"


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("head_size", [26, 32, 64, 96, 128, 256])
@pytest.mark.parametrize("lengths", [[40, 1, 130, 9], [17, 60], [300]], ids=str)
def test_attention_with_relative_bias(place: Place, head_size: int, gaps: bool, lengths: list[int]) -> None:
    if place.device == "cuda" and head_size == 26:
        pytest.skip("no fused kernel on CUDA")
    heads, span = 3, 400
    qkv = random(sum(lengths), 3 * heads * head_size, place=place)
    table = random(heads, 2 * span - 1, place=place, seed=1)
    columns = torch.cat([torch.randperm(n + 50 * gaps)[:n].sort().values for n in lengths]).int()
    parts = columns.long().split(lengths)
    biases = [table.cpu().double()[:, part[None] - part[:, None] + span - 1] for part in parts]
    expected = reference.attention(qkv.cpu(), lengths, heads, biases)
    cu = reference.offsets(lengths, place.device)
    for given in (columns.to(place.device), None) if not gaps else (columns.to(place.device),):
        out = ops.attention(qkv, cu, max(lengths), heads, table, given)
        limit = max(4e-6, 2 * place.eps)
        assert_close(out.cpu(), expected, atol=limit, what=f"columns given: {given is not None}")


@pytest.mark.parametrize("copies", [1, 150])  # a GPU has room for all blocks of queries at once, or not
@pytest.mark.parametrize("length", [31, 100, 190, 200, 300])
@pytest.mark.parametrize("head_size", [32, 64, 80, 128, 256])
def test_attention_with_large_scores(place: Place, head_size: int, length: int, copies: int) -> None:
    """The running maximum moves from tile to tile and e^x must not overflow. A query with large scores changes no other
    query."""
    copies = copies_for(place, copies)
    lengths = copies * [length]
    cu = reference.offsets(lengths, place.device)
    qkv = random(length, 3 * head_size, place=place, scale=6.0 * (64 / head_size) ** 0.25)
    large = ops.attention(qkv.repeat(copies, 1), cu, length, 1)
    expected = reference.attention(qkv, [length], 1).repeat(copies, 1)
    assert_close(large, expected, atol=max(5e-4, 40 * place.eps))  # scores near 100: e^x magnifies their rounding

    qkv[:, :head_size] /= 32  # exact, and scores of single digits
    qkv[5::16, :head_size] *= 32
    few = ops.attention(qkv.repeat(copies, 1), cu, length, 1)
    expected = reference.attention(qkv, [length], 1).repeat(copies, 1)
    assert_close(few, expected, atol=max(5e-4, 40 * place.eps))
    assert torch.equal(few[5:length:16], large[5:length:16])
    qkv[5::16, :head_size] /= 32
    none = ops.attention(qkv.repeat(copies, 1), cu, length, 1)
    rest = [row for row in range(length) if row % 16 != 5]
    assert torch.equal(few[rest], none[rest])


@pytest.mark.parametrize("others", [1, 140])
@pytest.mark.parametrize(  # tiles of 64 keys: whole or not, fewer than the longest could have, all resident or not
    "length,longest", [(1, 128), (50, 60), (50, 128), (64, 64), (64, 128), (70, 70), (128, 128), (150, 150), (300, 300), (450, 450)]
)
@pytest.mark.parametrize("heads,head_size", [(4, 32), (2, 64), (1, 96), (1, 128), (1, 256)])
def test_attention_neighbours_do_not_matter(
    place: Place, heads: int, head_size: int, length: int, longest: int, others: int
) -> None:
    end = 20 + length
    qkv = random(end + 60 * others, 3 * heads * head_size, place=place)
    cu = reference.offsets([20, length, *others * [60]], place.device)
    alone = ops.attention(qkv, cu, longest, heads)[20:end]
    qkv[:20], qkv[end:] = float("nan"), float("inf")
    assert torch.equal(alone, ops.attention(qkv, cu, longest, heads)[20:end])
    alone = ops.attention(qkv[20:end].contiguous(), reference.offsets([length], place.device), longest, heads)
    among = ops.attention(qkv, cu, longest, heads)[20:end]
    # With and without room for all blocks at once, or with much padding, a GPU adds in another order.
    assert_close(among, alone, atol=0 if place.device == "cpu" else 2 * place.eps)


@pytest.mark.parametrize("lengths", RAGGED, ids=str)
@pytest.mark.parametrize("heads,head_size", [(3, 26), (2, 64), (1, 80)])
def test_general_attention_path(place: Place, lengths: list[int], heads: int, head_size: int) -> None:
    """add_qkv_bias, GEMM, softmax, GEMM, transpose: what one does wrong, at padding too, is wrong at the end."""
    tokens, hidden = sum(lengths), heads * head_size
    seq = max(lengths, default=0) + 1
    qkv, bias = random(tokens, 3 * hidden, place=place), random(3 * hidden, place=place, seed=1)
    cu = reference.offsets(lengths, place.device)
    q, k, v = ops.add_qkv_bias(qkv, bias, cu, seq, heads)
    scores = (q.float() @ k.float().transpose(-1, -2)).contiguous()
    probabilities = ops.softmax(scores, cu, 1 / math.sqrt(head_size), None, None, place.dtype)
    out = ops.transpose((probabilities.float() @ v.float()).to(place.dtype).contiguous(), cu, tokens)
    assert_close(out, reference.attention(qkv + bias, lengths, heads), atol=max(5e-6, 4 * place.eps))


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("seq", [1, 9, 40, 700, 5000])
def test_softmax_with_relative_bias(place: Place, seq: int, cap: float) -> None:
    batch, heads, span = 2, 2, 6000
    lengths = [seq, max(0, seq - 3)]
    if seq > 1000:
        batch, heads, lengths = 1, 1, [seq]
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(batch, heads, seq, seq, generator=generator).to(place.device)
    bias = random(heads, 2 * span - 1, place=place)
    # Columns as a mask with holes leaves them.
    columns = torch.cat([torch.arange(n) + (torch.arange(n) > n // 2) * 7 for n in lengths]).int().to(place.device)
    cu = reference.offsets(lengths, place.device)
    got = ops.softmax(scores, cu, 0.5, bias, columns, place.dtype, soft_cap=cap)
    for b, (length, column) in enumerate(zip(lengths, columns.split(lengths), strict=True)):
        for first in range(0, length, 250):  # all at once would not fit caches
            rows = slice(first, min(first + 250, length))
            distance = (column[None, :] - column[rows, None] + span - 1).long()
            capped = scores[b, :, rows, :length].double() * 0.5
            capped = cap * torch.tanh(capped / cap) if cap else capped
            expected = torch.softmax(capped + bias.double()[:, distance], -1)
            assert_close(got[b, :, rows, :length], expected, atol=max(4e-7, place.eps), what=f"sequence {b}")


@pytest.mark.parametrize("length", [5, 16, 37, 64])  # of a vector's lanes: fewer, all, several and some, several
def test_softmax_of_extreme_scores(place: Place, length: int) -> None:
    """What is too small for a float weighs exactly nothing, an infinity below nothing too, and one NaN is the row's."""
    scores = random(1, 2, length, length, place=Place(place.device, torch.float32), scale=3.0)
    scores[..., 0] = 4.0
    scores[..., 1], scores[..., 2], scores[..., 3], scores[..., -1] = -float("inf"), -1e30, -84.0, -300.0
    scores[0, 1, 2, 4] = float("nan")
    cu = reference.offsets([length], place.device)
    expected = torch.softmax(scores.double(), -1)
    got = ops.softmax(scores, cu, 1.0, None, None, place.dtype)
    assert got[0, 1, 2].isnan().all() and int(got.isnan().any(-1).sum()) == 1
    assert not got[0, 0][:, [1, 2, -1]].any()
    assert_close(got, expected, atol=max(4e-7, place.eps))


@pytest.mark.parametrize("mode", KERNEL_POOLINGS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cols", [5, 312, 768])
def test_pooling(place: Place, mode: str, normalize: bool, cols: int) -> None:
    for lengths in RAGGED:
        hidden = random(sum(lengths), cols, place=place)
        got = ops.pooling(hidden, reference.offsets(lengths, place.device), mode, normalize)
        assert got.dtype == torch.float32
        assert_close(got, reference.pooling(hidden, lengths, mode, normalize), atol=2e-6, rtol=2e-6, what=str(lengths))
        alone = reference.offsets([1] * len(hidden), place.device)  # a row a sequence, which need not be said
        assert torch.equal(ops.pooling(hidden, None, mode, normalize), ops.pooling(hidden, alone, mode, normalize))


@pytest.mark.parametrize("cols", [1, 26, 312, 384, 768, 1024, 4100])
def test_embeddings_layernorm(place: Place, cols: int) -> None:
    vocab, positions, types, tokens = 50, 40, 3, 70
    generator = torch.Generator().manual_seed(0)
    word, position = random(vocab, cols, place=place), random(positions, cols, place=place, seed=1)
    token_type = random(types, cols, place=place, seed=2)
    gamma, beta = 1 + 0.2 * random(cols, place=place, seed=3), random(cols, place=place, seed=4)
    ids = torch.randint(0, vocab, (tokens,), generator=generator).to(place.device)
    kinds = torch.randint(0, types, (tokens,), generator=generator).to(place.device)
    index = torch.randperm(tokens, generator=generator)[:33].to(place.device)
    places = torch.randint(0, positions, (tokens,), generator=generator).int().to(place.device)

    def expected(chosen: torch.Tensor, p: torch.Tensor, with_types: bool, with_norm: bool) -> torch.Tensor:
        x = word.double()[ids[chosen]] + position.double()[p.long()]
        x = x + token_type.double()[kinds[chosen] if with_types else 0]
        return reference.layernorm(x, gamma.double(), beta.double(), 1e-12) if with_norm else x

    everything = torch.arange(tokens, device=place.device)
    tolerance = {"atol": 12 * ONE_SUM * place.eps, "rtol": 2 * place.eps}
    got = ops.embeddings_layernorm(ids, kinds, None, places, word, position, token_type, gamma, beta, 1e-12)
    if cols > 1:
        assert_close(got, expected(everything, places, True, True), **tolerance, what="packed")
        got = ops.embeddings_layernorm(ids, None, index, places[:33], word, position, token_type, gamma, beta, 1e-12)
        assert_close(got, expected(index, places[:33], False, True), **tolerance, what="gathered")
    got = ops.embeddings_layernorm(ids, kinds, None, places, word, position, token_type, None, None, 1e-12)
    assert_close(got, expected(everything, places, True, False), **tolerance, what="no norm")
    got = ops.embeddings_layernorm(ids, None, None, places, word, None, None, None, None, 1e-12)
    assert_close(got, word[ids], atol=0, what="word alone")


@pytest.mark.parametrize(
    "m,n,k", [(0, 8, 8), (1, 64, 64), (7, 33, 20), (128, 768, 768), (65, 3, 130), (300, 1152, 384)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear(place: Place, m: int, n: int, k: int, activation: str) -> None:
    if m == 0 and place.device == "cpu":
        pytest.skip("the CPU's GEMM is not called for 0 rows")
    a, weight = random(m, k, place=place), random(n, k, place=place, scale=1 / math.sqrt(k), seed=1)
    bias = random(n, place=place, seed=2)
    for b in (bias, None):
        expected = reference.activation(a.double() @ weight.double().T + (0 if b is None else b.double()), activation)
        # 16-bit GEMMs whose activation is a separate pass round twice.
        assert_close(ops.product(a, weight, b, activation), expected, atol=max(1e-5, 4 * place.eps), rtol=2 * place.eps)


def sixteen_bit(place: Place) -> None:
    if place.device == "cpu" or place.dtype == torch.float32:
        pytest.skip("for 16-bit elements on a GPU")


@pytest.mark.parametrize(
    "m,n,k",
    [(1, 64, 64), (16, 384, 384), (31, 1152, 384), (128, 768, 3072), (200, 128, 512), (513, 256, 192), (1000, 200, 72),
     (4100, 3072, 768), (2200, 3072, 768), (2300, 1032, 200), (70, 136, 64)],
)  # fmt: skip
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_linear_own(place: Place, m: int, n: int, k: int, activation: str, gated: bool) -> None:
    sixteen_bit(place)
    a, weight = random(m, k, place=place), random(n, k, place=place, scale=1 / math.sqrt(k), seed=1)
    bias = random(n, place=place, seed=2)
    product = a.double() @ weight.double().T
    own = [(kernel, variant) for kernel in VARIANTS for variant in VARIANTS[kernel]]
    atol = (8 if gated else 3) * place.eps  # a gate multiplies what was rounded
    for (kernel, variant), b in itertools.product(own, (bias, None)):
        call = (a, weight, b, activation, kernel, variant, gated)
        asked = Product(WORDS[place.dtype], n, k, b is not None, activation, gated=gated)
        if not supports(kernel, variant, asked, m):
            with pytest.raises(RuntimeError, match="cannot do"):
                ops.linear_own(*call)
            continue
        sums = product + (0 if b is None else b.double())
        expected = reference.gate(sums, activation) if gated else reference.activation(sums, activation)
        got = ops.linear_own(*call)
        assert_close(got, expected, atol=atol, rtol=3 * place.eps, what=f"{kernel} {variant}")
        assert torch.equal(got, ops.linear_own(*call)), (kernel, variant)


def test_what_own_kernels_support(place: Place) -> None:
    """Among those for one product there are always some on Hopper; for fp32 and mixed types there are none."""
    sixteen_bit(place)
    word, all_of_them = WORDS[place.dtype], [(kernel, variant) for kernel in VARIANTS for variant in VARIANTS[kernel]]
    hopper = have_warpgroups()
    for m, kernel in ((64, "wgmma_tile"), (8192, "wgmma_persistent"), (8192, WITH_LAYERNORM), (8192, WITH_PRENORM)):
        norm = {"layernorm": kernel == WITH_LAYERNORM, "prenorm": kernel == WITH_PRENORM}
        asked = Product(word, 768, 768, True, **norm)
        assert any(supports(kernel, variant, asked, m) for variant in VARIANTS[kernel]) == hopper
        gated = Product(word, 768, 768, True, "silu", gated=True)
        assert any(supports(kernel, variant, gated, m) for variant in VARIANTS[kernel]) == (hopper and kernel not in WITH_NORM)
    for dtype, (kernel, variant) in itertools.product(("fp32", "int8", f"{word} e4m3 {word}"), all_of_them):
        norm = {"layernorm": kernel == WITH_LAYERNORM, "prenorm": kernel == WITH_PRENORM}
        assert not supports(kernel, variant, Product(dtype, 768, 768, **norm), 64)


def hopper(place: Place) -> None:
    sixteen_bit(place)
    if not have_warpgroups():
        pytest.skip("for Hopper")


def test_linear_own_refuses_operands_that_are_not_aligned(place: Place) -> None:
    hopper(place)
    a = random(16 * 64 + 1, place=place)[1:].view(16, 64)
    with pytest.raises(RuntimeError, match="aligned to 16 bytes"):
        ops.linear_own(a, random(64, 64, place=place), None, "none", "wgmma_tile", "64x64 half")
