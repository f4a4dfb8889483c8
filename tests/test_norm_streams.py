"""Norms of training run after run, from several threads, on several streams and GPUs, and in CUDA graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import have_gpu
from torch import Tensor, nn
from training_norms import BF16, EPS, F16, F32, Case, any_norm, check_gradients, leaves, random, same_bits

from ftbert import norm
from ftbert.norm import FusedBatchNorm2d, FusedLayerNorm, FusedRMSNorm


@pytest.fixture
def gpu() -> None:
    if not have_gpu():
        pytest.skip("no GPU")


@pytest.fixture
def second_gpu(gpu: None) -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    return "cuda:1"


@pytest.mark.parametrize("kind,efficient,residual", [("layer", False, False), ("rms", True, False), ("layer", True, True)])
def test_two_runs_over_rows_are_the_same_bits(device: str, kind: str, efficient: bool, residual: bool) -> None:
    def run() -> list[Tensor]:
        x, r, dy = (random(3000, 768, device=device, dtype=BF16, seed=seed) for seed in (0, 1, 2))
        x, r, w = leaves(x, r if residual else None, random(768, device=device, dtype=BF16, seed=3))
        y, total = any_norm(x, r, w, None, kind, efficient)
        y.backward(dy)
        return [y, total, x.grad, w.grad]

    assert same_bits(run(), run())


def test_two_runs_of_batch_norm_are_the_same_bits(device: str) -> None:
    for shape, layout in (((64, 64, 14, 14), "last"), ((8, 16, 32, 32), "contiguous"), ((64, 24, 7, 7), "contiguous")):
        case = Case(shape, F32, device, layout)
        (y, grads), (again, grads_again) = case.run(), case.run()
        assert same_bits([y, *grads], [again, *grads_again])


SHARED: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [  # a module, the shape of x on a CPU and on a GPU
    (lambda: FusedLayerNorm(768, memory_efficient=True), (40, 768), (3000, 768)),
    (lambda: FusedRMSNorm(768), (40, 768), (3000, 768)),
    (lambda: FusedBatchNorm2d(16, track_running_stats=False), (8, 16, 12, 12), (64, 16, 24, 24)),
]


@pytest.mark.parametrize("at", range(len(SHARED)), ids=["layer", "rms", "batch"])
def test_one_module_from_several_threads_and_streams(device: str, at: int) -> None:
    make, small, large = SHARED[at]
    module: nn.Module = make().to(device)
    shape = small if device == "cpu" else large
    inputs = [random(*shape, device=device, seed=seed) for seed in range(4)]

    def run(x: Tensor) -> list[Tensor]:
        (x,) = leaves(x)
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], y.detach())]

    alone = [run(x) for x in inputs]
    if device == "cuda":
        torch.cuda.synchronize()

    def many(x: Tensor) -> list[list[Tensor]]:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            made = [run(x) for _ in range(10)]
        if stream:
            stream.synchronize()
        return made

    with ThreadPoolExecutor(len(inputs)) as pool:
        for want, made in zip(alone, pool.map(many, inputs), strict=True):
            assert all(same_bits(got, want) for got in made)


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_a_graph_of_rows() -> None:
    x, grad = (random(4096, 768, device="cuda", dtype=BF16, seed=seed) for seed in (0, 1))
    x, w = leaves(x, torch.ones(768, device="cuda", dtype=BF16))
    true = torch.autograd.grad(norm.fused_rms_norm_affine(x, w, 768, EPS, True), (x, w), grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm.fused_rms_norm_affine(x, w, 768, EPS, True)
        grads = torch.autograd.grad(y, (x, w), grad)
    for _ in range(3):
        graph.replay()
    assert same_bits(grads, true)


@pytest.mark.usefixtures("gpu")
def test_a_graph_trains_with_batch_norm() -> None:
    torch.manual_seed(0)
    module = FusedBatchNorm2d(16, momentum=None, device="cuda")
    x = torch.randn(4, 16, 9, 9, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    addend = torch.randn_like(x).requires_grad_()

    def step() -> Tensor:
        x.grad = addend.grad = module.weight.grad = module.bias.grad = None
        y = module(x, addend)
        y.backward(x.detach())
        return y  # type: ignore[no-any-return]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which fills the module's tensors, its count among them
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    graph.replay()
    torch.cuda.synchronize()
    assert module.num_batches_tracked == 4
    got = [t.clone() for t in (y, x.grad, addend.grad, module.weight.grad, module.bias.grad)]
    y = step()
    assert same_bits(got, (y, x.grad, addend.grad, module.weight.grad, module.bias.grad))


# ---- another GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("efficient", [False, True])
def test_rows_on_a_second_gpu(second_gpu: str, efficient: bool) -> None:
    for kind, residual in (("layer", None), ("rms", BF16)):
        check_gradients(second_gpu, (BF16, BF16, None), 100, 768, kind, efficient, residual=residual)
    assert torch.cuda.current_device() == 0


def test_batch_norm_on_a_second_gpu(second_gpu: str) -> None:
    for shape in ((33, 24), (4, 3, 4, 4)):
        Case(shape, F16, second_gpu).check()
    assert torch.cuda.current_device() == 0
