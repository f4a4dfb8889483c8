"""BatchNorm of training against float64: values, gradients, statistics and masks, over layouts, dtypes and corners."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from training_norms import ACTIVATIONS, BF16, F16, F32, F64, Case, arranged, layouts, random, same_bits

from ftbert.norm import FusedBatchNorm1d, FusedBatchNorm2d, FusedBatchNorm3d, fused_batch_norm, masked_relu

OPS = torch.ops.ftbert
DTYPES = [F32, F16, BF16]

# [channels] alone, eights of channels and not, planes that are short, long, and no whole eights.
SHAPES = [
    (2, 1), (5, 3), (64, 8), (33, 24), (700, 264), (300, 1), (1000, 40), (9, 2048),
    (7, 16, 5), (3, 5, 1), (2, 3, 1023),
    (4, 3, 4, 4), (2, 8, 17, 19), (3, 16, 16, 16), (1, 2, 40, 50), (6, 64, 7, 7), (2, 320, 3, 3), (2, 5, 64, 33),
    (2, 3, 4, 5, 6), (1, 8, 8, 8, 9),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_equals_float64(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for layout, activation in itertools.product(layouts(shape), ACTIVATIONS):
        Case(shape, dtype, device, layout, activation=activation).check()


@pytest.mark.parametrize("shape", [(33, 24), (4, 3, 4, 4), (3, 16, 16, 16), (2, 5, 64, 33)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_combinations_equal_float64(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for layout, activation, training, addend, affine in itertools.product(
        layouts(shape), ACTIVATIONS, (True, False), (True, False), (True, False)
    ):
        Case(shape, dtype, device, layout, activation=activation, training=training, addend=addend, affine=affine).check()


@pytest.mark.parametrize("layout", ["odd base", "strided"])
@pytest.mark.parametrize("shape", [(33, 24), (64, 3), (3, 16, 16, 16), (2, 5, 31, 33)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_base_and_strides(device: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    for activation in ACTIVATIONS:
        Case(shape, dtype, device, layout, activation=activation).check()
        Case(shape, dtype, device, layout, activation=activation, training=False).check()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_vectors_of_16_bits(device: str, dtype: torch.dtype) -> None:
    for shape, training in itertools.product([(33, 24), (4, 3, 4, 4)], (True, False)):
        Case(shape, dtype, device, vectors=dtype, training=training, activation="silu").check()


def test_float64_is_taken(device: str) -> None:
    for activation, training in itertools.product(ACTIVATIONS, (True, False)):
        Case((6, 3, 4, 4), F64, device, activation=activation, training=training).check()


@pytest.mark.parametrize("memory", ["x", "addend", "dy"])
def test_orders_that_differ(device: str, memory: str) -> None:
    """Each tensor in an order of its own."""
    for own, others in (("last", "contiguous"), ("contiguous", "last")):
        case = Case((3, 16, 6, 5), F32, device, others, activation="silu")
        setattr(case, memory, arranged(getattr(case, memory), own))
        case.check()


def test_the_order_of_memory_stays(device: str) -> None:
    for module, shape in ((FusedBatchNorm1d, (4, 8, 5)), (FusedBatchNorm2d, (2, 8, 5, 3)), (FusedBatchNorm3d, (2, 8, 3, 5, 3))):
        x = arranged(random(*shape, device=device, seed=1), "last").requires_grad_()
        y = module(8, device=device)(x)
        y.sum().backward()  # the gradient is one number, expanded
        assert x.grad is not None
        assert y.stride() == x.stride() == x.grad.stride()


def test_gradients_of_some(device: str) -> None:
    for wanted in itertools.product((True, False), repeat=4):
        if not any(wanted):
            continue
        for activation, training in itertools.product(ACTIVATIONS, (True, False)):
            case = Case((8, 8, 3, 3), F32, device, activation=activation, training=training)
            y, all_grads = case.run()
            given = [t.detach().requires_grad_(one) for t, one in zip(case.inputs(), wanted, strict=True) if t is not None]
            x, addend, weight, bias = given
            again = fused_batch_norm(
                x, case.running_mean, case.running_var, weight, bias, addend, training=training, activation=activation
            )
            assert torch.equal(again, y)
            again.backward(case.dy)
            for t, one, grad in zip(given, wanted, all_grads, strict=True):
                assert (t.grad is None) == (not one)
                assert not one or (grad is not None and t.grad is not None and torch.equal(t.grad, grad))


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (100.0, 0.1), (-3e4, 10.0)])
@pytest.mark.parametrize("layout", ["contiguous", "last"])
def test_statistics_of_many_elements(device: str, mean: float, deviation: float, layout: str) -> None:
    """800,000 a channel: no square cancels, no sum loses its small terms."""
    x = arranged(random(8, 8, 1000, 100, device=device, seed=3, scale=deviation) + mean, layout)
    got_mean, got_var = OPS.batch_norm_statistics(x)
    var, expected = torch.var_mean(x.double(), [0, 2, 3], correction=0)
    assert (got_mean - expected).abs().max() <= 2e-6 * abs(mean) + 1e-6 * deviation
    assert ((got_var - var) / var).abs().max() <= 1e-5


def test_statistics_of_few_large_among_many(device: str) -> None:
    x = random(4096, 8, device=device, seed=4)
    x[0] = 1e6
    var, mean = torch.var_mean(x.double(), 0, correction=0)
    got_mean, got_var = OPS.batch_norm_statistics(x)
    assert ((got_mean - mean) / mean).abs().max() <= 1e-5
    assert ((got_var - var) / var).abs().max() <= 1e-5


@pytest.mark.parametrize("channels", [5, 8, 24])
def test_rows_behind_the_tokens_do_not_count(device: str, channels: int) -> None:
    """Packed tokens lie in a larger buffer, whose other rows hold anything: padding, or numbers that are none."""
    case = Case((37, channels), F32, device)
    (y, grads), want = case.run(), case.after
    for behind in (0.0, float("nan")):
        x, addend = (torch.cat([t, torch.full((11, channels), behind, device=device)]).requires_grad_() for t in (case.x, case.addend))
        running = case.running_mean.clone(), case.running_var.clone()
        got = fused_batch_norm(x[:37], *running, case.weight, case.bias, addend[:37], training=True, momentum=0.3)
        got.backward(case.dy)
        assert same_bits([got, *running, x.grad[:37], addend.grad[:37]], [y, *want, *grads[:2]])
        assert not x.grad[37:].any() and not addend.grad[37:].any()


# ---- the mask --------------------------------------------------------------------------------------------------------


def bits_of(mask: Tensor, count: int) -> Tensor:
    """Bit i % 32 of word i / 32."""
    words = mask.cpu().tolist()
    bits = [words[i // 32] >> (i % 32) & 1 for i in range(count)]
    assert len(words) == (count + 31) // 32
    assert not any(words[i // 32] >> (i % 32) & 1 for i in range(count, 32 * len(words)))
    return torch.tensor(bits, dtype=torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (9, 8), (4, 3, 4, 4), (3, 16, 16, 16), (1, 1, 5, 13)], ids=str)
def test_a_bit_for_each_element_in_memory_order(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for layout in [*layouts(shape), "odd base"]:
        x = arranged(random(*shape, device=device, dtype=dtype, seed=6), layout)
        memory = (x.movedim(1, -1) if layout == "last" else x).flatten().cpu()
        y, mask = OPS.relu_with_mask(x)
        assert torch.equal(y, torch.relu(x)) and y.stride() == x.stride()
        assert torch.equal(bits_of(mask, x.numel()), memory > 0)
        assert torch.equal(OPS.relu_backward_from_mask(x, mask), torch.relu(x))
        zeros = torch.zeros(shape[1], device=device)
        _, mask = OPS.batch_norm_apply(x, None, None, None, zeros, zeros + 1, 1e-5, "relu", False, True)
        assert torch.equal(bits_of(mask, x.numel()), memory > 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_pass_as_through_relu(device: str, dtype: torch.dtype) -> None:
    special = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0] * 8)
    x = special.view(8, 8).t().contiguous().to(device, dtype)
    for shape in ((8, 8), (64, 1), (1, 1, 64), (16, 4)):
        ours, theirs = (x.view(shape).clone().requires_grad_() for _ in range(2))
        zeros = torch.zeros(shape[1], device=device)
        y = fused_batch_norm(ours, zeros, zeros + 1, eps=1e-12)
        expected = torch.relu(theirs)
        y.backward(torch.ones_like(y))
        expected.backward(torch.ones_like(expected))
        torch.testing.assert_close(y, expected, equal_nan=True)
        torch.testing.assert_close(ours.grad, theirs.grad)
        again = x.view(shape).clone().requires_grad_()
        masked_relu(again).backward(torch.ones_like(y))
        torch.testing.assert_close(again.grad, theirs.grad)
    for activation in ACTIVATIONS:
        y = fused_batch_norm(x, None, None, training=True, activation=activation)
        assert y.isnan().all()  # each channel has one


@pytest.mark.parametrize("dtype", [*DTYPES, F64], ids=str)
def test_masked_relu(device: str, dtype: torch.dtype) -> None:
    for shape, layout in itertools.product([(5,), (33, 7), (4, 3, 16, 5), (2, 8, 4, 4)], ["contiguous", "last", "odd base"]):
        if layout == "last" and len(shape) < 3:
            continue
        x = arranged(random(*shape, device=device, dtype=dtype, seed=7), layout).requires_grad_()
        dy = random(*shape, device=device, dtype=dtype, seed=8)
        y = masked_relu(x)
        y.backward(dy)
        assert torch.equal(y, torch.relu(x))
        assert torch.equal(x.grad, torch.where(x > 0, dy, 0))
        if dtype != F64:
            (twice,) = torch.autograd.grad(
                torch.autograd.grad(masked_relu(x), x, (v := dy.clone().requires_grad_()), create_graph=True)[0].sum(), v
            )
            assert torch.equal(twice, (x > 0).to(dtype))
    assert torch.equal(masked_relu(random(3, 3, device=device, dtype=dtype, seed=9)), torch.relu(random(3, 3, device=device, dtype=dtype, seed=9)))
