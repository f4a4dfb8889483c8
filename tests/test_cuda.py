"""What only a GPU can show: graphs, synchronisation, memory, big tensors, bad devices."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from calls import packed, profiled
from compare import assert_close
from conftest import gpu_memory_left, have_gpu, make_bert
from families import FAMILIES, SIZES, make_batch, make_model

import ftbert
from ftbert.tuning import Bench, Product

pytestmark = pytest.mark.skipif(not have_gpu(), reason="no GPU")

HALF = torch.float16


@pytest.fixture
def model() -> ftbert.Model:
    return ftbert.load(make_bert(), device="cuda", dtype=HALF)


def launches_before_the_wait(profile: torch.profiler.profile) -> int:
    events = sorted(profile.events(), key=lambda e: e.time_range.start)
    names = [e.name for e in events]
    return sum(name.startswith(("cudaLaunchKernel", "cudaGraphLaunch")) for name in names[: names.index("cudaEventSynchronize")])


@pytest.mark.parametrize("own_graphs", [False, True])
@pytest.mark.parametrize("attention", ["auto", "general"])
def test_graph_replays_to_identical_bits(attention: str, own_graphs: bool) -> None:
    model = ftbert.load(make_bert(), device="cuda", dtype=HALF, attention=attention)
    model.use_cuda_graphs(own_graphs)
    first, second = packed([17, 64, 3]), packed([30, 50, 4], seed=1)
    expected = [model.forward_packed(ids, cu, 64) for ids, cu, _ in (first, second)]
    ids, cu = first[0].clone(), first[1].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model.forward_packed(ids, cu, 64)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.forward_packed(ids, cu, 64)
    for (new_ids, new_cu, _), want in ((second, expected[1]), (first, expected[0]), (second, expected[1])):
        ids.copy_(new_ids)
        cu.copy_(new_cu)
        graph.replay()
        assert torch.equal(out, want)


def test_packed_and_a_mask_on_the_cpu_never_synchronise(model: ftbert.Model) -> None:
    calls = [packed(lengths) for lengths in ([5, 9], [1], [100, 1, 60])]
    ids, mask = torch.randint(0, 120, (4, 20)).cuda(), torch.randint(0, 2, (4, 20))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            model.forward_packed(*call)
        model(ids, mask)
        model(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_padded_with_mask_on_the_gpu_synchronises_once(model: ftbert.Model) -> None:
    ids = torch.randint(0, 120, (4, 20)).cuda()
    mask = torch.randint(0, 2, (4, 20)).cuda()
    model(ids, mask)
    with profiled() as p:
        model(ids, mask)
    names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    counts = {e.key: e.count for e in p.key_averages() if e.key in names}
    # The profiler itself ends with one cudaDeviceSynchronize.
    counts.pop("cudaDeviceSynchronize", None)
    assert sum(counts.values()) == 1, counts


def test_tokens_counted_before_and_after_the_launch(model: ftbert.Model) -> None:
    """A large batch waits for the count of its mask first, a small one is launched for all of its rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 120, (2400, 128), generator=generator).cuda()
    mask = torch.randint(0, 2, ids.shape, generator=generator).cuda()
    mask[7] = 0
    with profiled() as p:
        whole = model(ids, mask).last_hidden_state
    assert launches_before_the_wait(p) <= 4  # those of the mask and the ids
    for rows in (slice(0, 3), slice(7, 8), slice(2390, 2400)):
        with profiled() as p:
            part = model(ids[rows], mask[rows]).last_hidden_state
        assert launches_before_the_wait(p) >= 10
        assert_close(part, whole[rows], atol=16 * torch.finfo(HALF).eps, what=str(rows))
        assert not part[mask[rows] == 0].any()


@pytest.mark.parametrize("own_graphs", [False, True])
def test_what_is_wrong_is_said_after_the_launch(model: ftbert.Model, own_graphs: bool) -> None:
    model.use_cuda_graphs(own_graphs)
    ids, mask = torch.randint(0, 120, (4, 20)).cuda(), torch.ones(4, 20, dtype=torch.int64).cuda()
    mask[2, 5:] = 0
    expected = model(ids, mask).last_hidden_state
    bad_ids, bad_mask = ids.clone(), mask.clone()
    bad_ids[2, 3], bad_mask[1, 7] = 1 << 40, 2
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"input_ids: .* got 1099511627776 at \[2, 3\]"):
            model(bad_ids, mask)
        with pytest.raises(RuntimeError, match=r"attention_mask: .* at \[1, 7\]"):
            model(ids, bad_mask)
        assert torch.equal(model(ids, mask).last_hidden_state, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_mask_cannot_be_recorded(model: ftbert.Model, device: str) -> None:
    ids, mask = torch.randint(0, 120, (4, 20)).cuda(), torch.ones(4, 20, device=device)
    expected = model(ids, mask).last_hidden_state
    counted = pytest.raises(RuntimeError, match="attention_mask: its ones must be counted.*call forward_packed")
    with counted, torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(ids, mask)
    assert torch.equal(model(ids, mask).last_hidden_state, expected)


@pytest.mark.parametrize("other_thread", [False, True])
@pytest.mark.parametrize("what", ["model", "tuner"])
def test_may_go_while_somebody_records(what: str, other_thread: bool) -> None:
    """As when Python's collector takes it."""
    if what == "model":
        owned: Any = ftbert.load(make_bert(), device="cuda", dtype=HALF)
        for _ in range(3):
            owned.forward_packed(*packed([17, 30]))
        assert owned.info()["cuda_graphs"].endswith("1 recorded so far")
    else:
        bench = Bench(Product("fp16", 64, 64, bias=True), 16)
        owned = bench.record(bench.heuristics(1)[0])
        assert owned.microseconds() > 0
        del bench
    gone, x, graph = weakref.ref(owned), torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    kept = [owned]
    del owned
    gc.collect()  # what else is left
    bytes_before = torch.cuda.memory_allocated()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        y = x + 1
        if other_thread:
            pool.submit(kept.clear).result()
        kept.clear()
        assert gone() is None
        assert what != "model" or torch.cuda.memory_allocated() < bytes_before
        y += 1
    graph.replay()
    assert y.tolist() == [2] * 8


def test_runs_on_the_callers_stream(model: ftbert.Model) -> None:
    ids, cu, longest = packed([40, 50])
    expected = model.forward_packed(ids, cu, longest)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(ids)
        late.copy_(ids)  # only a kernel on this stream sees the ids
        out = model.forward_packed(late, cu, longest)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_more_than_2_31_elements_in_one_activation() -> None:
    """inter 4096 x 600,000 tokens: the activation after the first FFN matrix has 2.46e9 elements."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of GPU memory")
    reference = make_bert(intermediate_size=4096, num_hidden_layers=1)
    model = ftbert.load(reference, device="cuda", dtype=HALF)
    batch, seq = 4700, 128
    ids = torch.randint(0, 120, (batch, seq), device="cuda")
    assert batch * seq * 4096 > 2**31
    out = model(ids).last_hidden_state
    for rows in (slice(0, 2), slice(4094, 4098), slice(batch - 2, batch)):
        assert_close(out[rows], model(ids[rows]).last_hidden_state, atol=16 * torch.finfo(HALF).eps, what=str(rows))
    padded = model(ids, (torch.arange(seq, device="cuda")[None] < 127).expand(batch, seq)).last_hidden_state
    assert not padded[:, -1].any() and padded[:, -2].any(-1).all()


def test_out_of_memory_leaves_the_model_usable(model: ftbert.Model) -> None:
    ids, cu, longest = packed([40, 50])
    expected = model.forward_packed(ids, cu, longest)
    with gpu_memory_left(300 << 20):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            model(torch.zeros(20000, 128, dtype=torch.int64, device="cuda"))
        assert torch.equal(model.forward_packed(ids, cu, longest), expected)


def test_peak_memory_of_base_32x512() -> None:
    """Weights and at most 12 buffers of [tokens, hidden]."""
    sizes: dict[str, Any] = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    model = ftbert.load(make_bert(num_hidden_layers=12, max_position_embeddings=512, **sizes), device="cuda", dtype=HALF)
    ids = torch.randint(0, 120, (32, 512), device="cuda")
    model(ids)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(ids)
    buffers = (torch.cuda.max_memory_allocated() - before) / (32 * 512 * 768 * 2)
    print(f"peak of 32x512: {buffers:.2f} buffers of [tokens, hidden]")
    assert buffers <= 12


def test_other_device(model: ftbert.Model) -> None:
    with pytest.raises(RuntimeError, match="there are"):
        ftbert.load(make_bert(), device="cuda:99")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs for the rest")
    other = ftbert.load(make_bert(), device="cuda:1", dtype=HALF)
    ids, cu, longest = packed([40, 50])
    out = other.forward_packed(ids.to("cuda:1"), cu.to("cuda:1"), longest)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.cpu(), model.forward_packed(ids, cu, longest).cpu())


@pytest.mark.parametrize("family", FAMILIES)
def test_load_beside_a_busy_current_device(family: str) -> None:
    """What load computes is launched on the model's GPU: on the current one it would come late here, and unnoticed."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    reference = make_model(family, "encoder", SIZES[-1])
    batch = make_batch(reference, "encoder", "right")
    results = []
    for device in ("cuda:0", "cuda:1"):
        torch.cuda._sleep(300_000_000)
        fast = ftbert.load(reference, device, HALF)
        results.append(fast(**{name: value.to(device) for name, value in batch.items()}).last_hidden_state.cpu())
    assert torch.cuda.current_device() == 0 and torch.equal(*results)


def test_launch_failure_names_kernel_file_and_line(model: ftbert.Model) -> None:
    """More CTAs than a launch can have is the one launch error that valid pointers can give."""
    cu = torch.zeros(70_000_000, dtype=torch.int32, device="cuda")
    qkv = torch.zeros(512, 3 * 64 * 12, dtype=HALF, device="cuda")
    with pytest.raises(RuntimeError, match="attention: .* blocks are more than one launch can have"):
        torch.ops.ftbert.attention(qkv, cu, 512, 12)


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    """What a test says of float32 products is taken back."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def say_by_fp32_precision(tf32: bool) -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"


SAYS = {
    "allow_tf32": lambda tf32: setattr(torch.backends.cuda.matmul, "allow_tf32", tf32),
    "set_float32_matmul_precision": lambda tf32: torch.set_float32_matmul_precision("high" if tf32 else "highest"),
    "fp32_precision": say_by_fp32_precision,
}


@pytest.mark.parametrize("say", SAYS)
@pytest.mark.parametrize("attention", ["fused", "general"])
def test_fp32_products_follow_torch_into_tf32_and_back(say: str, attention: str, matmul_precision: None) -> None:
    live = make_bert(hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    exact = ftbert.load(live, attention=attention)
    model = ftbert.load(live, device="cuda", attention=attention)
    ids, cu, longest = packed([40, 3, 64, 21])
    want = exact.forward_packed(ids.cpu(), cu.cpu(), longest)
    results = []
    for tf32 in (False, True, False, True):
        SAYS[say](tf32)
        assert model.info().get("products") == ("tf32" if tf32 else None)
        calls = [model.forward_packed(ids, cu, longest).cpu() for _ in range(4)]  # plain, recorded, repeated
        assert all(torch.equal(call, calls[0]) for call in calls)
        results.append(calls[0])
    SAYS[say](False)
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])
    errors = [(result - want).abs().max().item() for result in results[:2]]
    assert errors[0] <= 5e-5 and 2 * errors[0] < errors[1] <= 2e-2, errors


def test_a_live_model_whose_products_are_tf32_is_loaded(matmul_precision: None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    live = make_bert().cuda()
    assert ftbert.load(live, device="cuda").info()["products"] == "tf32"
    assert ftbert.optimize(live) is live
