"""CUDA graphs inside the engine: what is recorded gives what a direct run gives, whatever comes in between."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from calls import check_on_threads, packed
from compare import assert_close
from conftest import first_of, have_gpu
from families import make_model

import ftbert

pytestmark = pytest.mark.skipif(not have_gpu(), reason="no GPU")

HALF = torch.float16
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "bert, head size 26": ("bert", {"hidden_size": 52}),
    "roberta": ("roberta", {}),
    "mpnet": ("mpnet", {}),
    "electra, projected": ("electra", {"embedding_size": 40}),
}


def load(kind: str, dtype: torch.dtype = HALF) -> ftbert.Model:
    family, overrides = KINDS[kind]
    sizes = {"vocab_size": 120, "intermediate_size": 96, "max_position_embeddings": 160}
    return ftbert.load(make_model(family, "encoder", 2, **sizes, **overrides), device="cuda", dtype=dtype)


def direct(model: ftbert.Model) -> ftbert.Model:
    """A copy that never records."""
    other = model.to()
    other.use_cuda_graphs(False)
    return other


def recorded(model: ftbert.Model) -> int:
    found = re.search(r"(\d+) recorded so far$", model.info()["cuda_graphs"])
    assert found, model.info()["cuda_graphs"]
    return int(found.group(1))


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recordings_agree_with_direct_runs(kind: str, dtype: torch.dtype) -> None:
    """Calls of many shapes in any order, padded and packed; the first, second and later ones of a size agree bit by bit."""
    model = load(kind, dtype)
    plain = direct(model)
    draw = random.Random(0)
    batches = []
    for i in range(6):
        batch, seq = draw.randint(1, 7), draw.randint(1, 90)
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(2, 120, (batch, seq), generator=generator).cuda()
        mask = torch.randint(0, 2, (batch, seq), generator=generator)
        mask[0] = 1
        batches.append((ids, mask))
    seen: dict[int, list[torch.Tensor]] = {}
    for turn in range(4):
        for i in draw.sample(range(6), 6):
            ids, mask = batches[i]
            out = model(ids, mask)
            cu = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int().cuda()
            tokens = ids[mask.bool().cuda()]
            results = [out.last_hidden_state, model.forward_packed(tokens, cu, ids.shape[1])]
            results += [] if out.pooler_output is None else [out.pooler_output]
            if i not in seen:
                want = plain(ids, mask)
                tolerance = 64 * torch.finfo(dtype).eps
                assert_close(results[0], want.last_hidden_state, atol=tolerance, what=f"{i}, padded")
                assert_close(
                    results[1], plain.forward_packed(tokens, cu, ids.shape[1]), atol=tolerance, what=f"{i}, packed"
                )
                if want.pooler_output is not None:
                    assert_close(results[2], want.pooler_output, atol=tolerance, what=f"{i}, pooled")
                seen[i] = [r.clone() for r in results]
            for got, first in zip(results, seen[i], strict=True):
                assert torch.equal(got, first), f"batch {i} in turn {turn}"
    assert recorded(model) > 0 and plain.info()["cuda_graphs"] == "off"


def test_neighbours_in_the_buffers_do_not_leak() -> None:
    """A short call after a long one of the same recording, and after NaN in the long one."""
    model = load("bert")
    long, short = packed([33, 60]), packed([31, 52], seed=1)  # both in 96 tokens
    want = [model.forward_packed(*short).clone() for _ in range(3)][-1]
    for _ in range(2):
        model.forward_packed(*long)
        assert torch.equal(model.forward_packed(*short), want)
    bad = (long[0].clone(), *long[1:])
    bad[0][90:] = 10**9  # outside the vocabulary: rows of NaN
    assert model.forward_packed(*bad).isnan().any()
    assert torch.equal(model.forward_packed(*short), want)


def test_sizes_come_and_go() -> None:
    """More sizes than are kept, growing buffers in between: results stay, memory is bounded."""
    model = load("bert")
    calls = [packed([1 + i % 32] * (1 + i), seed=i) for i in range(200)]  # 193 sizes, 128 are kept
    want = [direct(model).forward_packed(*call) for call in calls]
    used = []
    for _ in range(3):
        for call, expected in zip(calls, want, strict=True):
            for _ in range(2):
                got = model.forward_packed(*call)
                assert_close(got, expected, atol=64 * torch.finfo(HALF).eps, what=str(call[1].tolist()[-1]))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[2]


def test_threads_and_streams() -> None:
    model = load("bert")
    check_on_threads(model, [packed([i + 3, 2 * i + 1], seed=i) for i in range(8)], threads=6, rounds=150)


def test_another_stream_waits_for_the_buffers() -> None:
    """Two streams that use one slot in turn: the second must not overwrite what the first still reads."""
    model = load("bert")
    one, two = packed([40, 50]), packed([41, 49], seed=1)
    want = [model.forward_packed(*call).clone() for call in (one, two)]
    streams = [torch.cuda.Stream() for _ in range(6)]  # more than there are slots
    torch.cuda.synchronize()
    results = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 6]):
            if i % 7 == 0:
                torch.cuda._sleep(2_000_000)
            results.append(model.forward_packed(*(one, two)[i % 2]))
    torch.cuda.synchronize()
    for i, got in enumerate(results):
        assert torch.equal(got, want[i % 2]), i


def test_inside_a_compiled_module_that_records_too() -> None:
    model = load("bert")

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.module

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.encoder(ids)[0].mean(1) * 2 + 1

    compiled = torch.compile(Pooled(), mode="reduce-overhead")
    ids = torch.randint(0, 120, (3, 40), device="cuda")
    want = Pooled()(ids).clone()
    for _ in range(4):
        assert_close(compiled(ids), want, atol=64 * torch.finfo(HALF).eps)


def test_switching_off_and_on() -> None:
    model = load("bert")
    call = packed([20, 30])
    want = [model.forward_packed(*call) for _ in range(3)][-1]
    assert recorded(model) == 1
    model.use_cuda_graphs(False)
    assert model.info()["cuda_graphs"] == "off"
    assert_close(model.forward_packed(*call), want, atol=64 * torch.finfo(HALF).eps)
    assert model.to().info()["cuda_graphs"] == "off"
    model.use_cuda_graphs(True)
    assert all(torch.equal(model.forward_packed(*call), want) for _ in range(3))


def test_large_calls_run_directly() -> None:
    model = load("bert")
    for _ in range(3):
        model(torch.zeros(70, 128, dtype=torch.int64, device="cuda"))
    assert recorded(model) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_recorded_apart(kind: str) -> None:
    """Calls for all tokens, first, last or any, of one size and in turns, do not run each other's recording."""
    model = load(kind)
    ids, cu, longest = packed([20, 1, 33, 7])
    cu = torch.cat([cu[:2], cu[1:], cu[-1:]])  # an empty sequence in the middle and one at the end
    plain, limit = direct(model), 64 * torch.finfo(HALF).eps
    whole, first = plain.forward_packed(ids, cu, longest), plain.forward_packed(ids, cu, longest, want="first")
    assert_close(first, torch.ops.ftbert.gather_rows(whole, cu, "first"), atol=limit)
    padded = torch.randint(2, 120, (5, 30), device="cuda")
    mask = torch.ones_like(padded).tril(12)
    mask[3] = 0
    want = first_of(plain.module, padded, mask)
    for _ in range(4):
        assert_close(model.forward_packed(ids, cu, longest), whole, atol=limit)
        assert_close(model.forward_packed(ids, cu, longest, want="first"), first, atol=limit)
        last = model.forward_packed(ids, cu, longest, want="last")
        assert_close(last, torch.ops.ftbert.gather_rows(whole, cu, "last"), atol=limit)
        # Of up to 8 rows there is one recording; what it read in an earlier call does not show.
        for rows in (torch.tensor([60, 3, 3, 0, 20, 21], device="cuda"), torch.tensor([7], device="cuda")):
            got = model.forward_packed(ids, cu, longest, want="rows", rows=rows)
            assert_close(got, whole[rows], atol=limit)
        for got, expected in zip(first_of(model.module, padded, mask), want, strict=True):
            assert_close(got, expected, atol=limit)
            assert not got[3].any()
    assert recorded(model) == 5
