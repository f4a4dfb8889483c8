"""MaxSim on packed vectors: of each query and document the sum of the largest products, against float64."""

from __future__ import annotations

import os

import pytest
import reference
import torch
from compare import assert_close
from conftest import PLACES, Place, have_gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ftbert._library import load_library

load_library()
max_sim = torch.ops.ftbert.max_sim

HERE = [place.device for place in PLACES if place.device == "cpu" or have_gpu()][:1]
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]  # on both devices
NO_VECTORS = -1e9
# Around a warp's rows, a tile, a chunk of a row and a panel of the CPU's.
QUERIES, DOCUMENTS = [[32], [1, 33, 0, 70], [5, 32, 31, 64, 2]], [[1, 63, 64, 65], [0, 200, 16, 17, 128, 129]]
WIDTHS = [1, 8, 12, 48, 64, 96, 128, 136, 384, 1024, 2000]


def vectors(count: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, (count, width), generator=generator).to(dtype).to(device)
    return torch.nn.functional.normalize(torch.randn(count, width, generator=generator)).to(dtype).to(device)


def expected(queries: Tensor, of_queries: list[int], documents: Tensor, of_documents: list[int]) -> Tensor:
    """float64 [queries, documents]"""
    q, d = (rows.double().split(lengths) for rows, lengths in ((queries, of_queries), (documents, of_documents)))
    return torch.tensor(
        [[0.0 if not len(a) else float((a @ b.T).max(1).values.sum()) if len(b) else NO_VECTORS for b in d] for a in q],
        dtype=torch.float64,
    )


def check(device: str, dtype: torch.dtype, of_queries: list[int], of_documents: list[int], width: int) -> None:
    """All with all, and each document with a query of its own."""
    q, d = vectors(sum(of_queries), width, dtype, device, 0), vectors(sum(of_documents), width, dtype, device, 1)
    cu_q, cu_d = (reference.offsets(lengths, device) for lengths in (of_queries, of_documents))
    want = expected(q, of_queries, d, of_documents)
    # Sums of products in float: of integers these are exact below 2^24.
    near = {"atol": 0.0, "rtol": 3e-7} if dtype == torch.int8 else {"atol": 2e-6, "rtol": 2e-6}
    got = max_sim(q, cu_q, d, cu_d)
    assert got.dtype == torch.float32 and got.device == q.device and got.shape == (len(of_queries), len(of_documents))
    assert_close(got, want, **near)
    assert torch.equal(got, max_sim(q, cu_q, d, cu_d))
    each = torch.arange(len(of_documents)) * 7 % len(of_queries)
    alone = max_sim(q, cu_q, d, cu_d, each.int().to(device))
    assert_close(alone, want[each, torch.arange(len(of_documents))], **near)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_scores(device: str, dtype: torch.dtype, width: int) -> None:
    for of_queries in QUERIES:
        for of_documents in DOCUMENTS:
            check(device, dtype, of_queries, of_documents, width)


@settings(max_examples=60, deadline=None)
@given(
    device=st.sampled_from(HERE),
    dtype=st.sampled_from(TYPES),
    of_queries=st.lists(st.integers(0, 80), min_size=1, max_size=6),
    of_documents=st.lists(st.integers(0, 150), min_size=1, max_size=9),
    width=st.integers(1, 160),
)
def test_any_lengths(device: str, dtype: torch.dtype, of_queries: list[int], of_documents: list[int], width: int) -> None:
    check(device, dtype, of_queries, of_documents, width)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_score_is_its_documents_alone(device: str, dtype: torch.dtype) -> None:
    """The same bits whatever stands beside it, in the order of the documents."""
    lengths = [7, 64, 130, 1]
    q, d = vectors(32, 128, dtype, device, 0), vectors(sum(lengths), 128, dtype, device, 1)
    cu_q, cu_d = reference.offsets([32], device), reference.offsets(lengths, device)
    together = max_sim(q, cu_q, d, cu_d)[0]
    for place, rows in enumerate(d.split(lengths)):
        assert torch.equal(max_sim(q, cu_q, rows, reference.offsets([len(rows)], device))[0, 0], together[place])
    turned = torch.cat(d.split(lengths)[::-1])
    assert torch.equal(max_sim(q, cu_q, turned, reference.offsets(lengths[::-1], device))[0], together.flip(0))


def test_a_vector_that_is_not_a_number_reaches_its_document_alone(place: Place) -> None:
    for width in (64, 100):
        d = torch.ones(400, width).to(place.device, place.dtype)
        d[150, 3] = float("nan")
        cu_d = reference.offsets([100, 100, 200], place.device)
        got = max_sim(d[200:232], reference.offsets([32], place.device), d, cu_d)[0]
        assert got.isnan().tolist() == [False, True, False] and float(got[0]) == 32 * width


def test_large_products_of_bytes_are_exact(device: str) -> None:
    q = torch.full((3, 1024), -128, dtype=torch.int8, device=device)
    got = max_sim(q, reference.offsets([3], device), -q - 1, reference.offsets([1, 2], device))
    assert got.tolist() == [[-128 * 127 * 1024 * 3] * 2]


def test_nothing_is_scored(device: str) -> None:
    none, some = torch.empty(0, 16, device=device), torch.ones(2, 16, device=device)
    zero = reference.offsets([], device)
    assert max_sim(none, zero, some, reference.offsets([2], device)).shape == (0, 1)
    assert max_sim(some, reference.offsets([2], device), none, zero).shape == (1, 0)
    assert max_sim(none, reference.offsets([0], device), none, reference.offsets([0], device)).tolist() == [[0.0]]


def test_memory_is_not_that_of_all_products(device: str) -> None:
    """A matrix of all queries' vectors with all documents' would be of 2 GB."""
    if device == "cpu" and os.environ.get("FTBERT_TEST_DEVICE") == "cuda":
        pytest.skip("the GPU's machine")
    q, d = vectors(64 * 32, 16, torch.float32, device, 0), vectors(2048 * 128, 16, torch.float32, device, 1)
    cu_q, cu_d = reference.offsets([32] * 64, device), reference.offsets([128] * 2048, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        max_sim(q, cu_q, d, cu_d)
        assert torch.cuda.max_memory_allocated() - before < 4 << 20
        return
    with torch.profiler.profile(profile_memory=True) as profile:
        max_sim(q[: 2 * 32], cu_q[:3], d, cu_d)
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) < 4 << 20


def test_arguments_that_do_not_fit(device: str) -> None:
    q, cu = torch.ones(4, 16, device=device), reference.offsets([4], device)
    for words, arguments in (
        ("documents: expected Float .*like the queries", (q, cu, q.half(), cu)),
        ("documents: expected Float .*16", (q, cu, q[:, :8].contiguous(), cu)),
        ("queries: expected float32", (q.long(), cu, q.long(), cu)),
        ("queries: expected a contiguous tensor of rank 2", (q[0], cu, q, cu)),
        ("query_of: expected contiguous Int", (q, cu, q, cu, cu)),
        ("width", (q[:, :0].contiguous(), cu, q[:, :0].contiguous(), cu)),
    ):
        with pytest.raises(RuntimeError, match=words):
            max_sim(*arguments)
    if device == "cpu":
        with pytest.raises(RuntimeError, match="query_of"):
            max_sim(q, cu, q, cu, torch.tensor([1], dtype=torch.int32))
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            max_sim(q, reference.offsets([5]), q, cu)
