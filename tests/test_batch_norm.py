"""ftbert.norm's BatchNorm against float64: values, gradients, running statistics, over layouts, dtypes and corners."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ftbert.norm import FusedBatchNorm1d, FusedBatchNorm2d, FusedBatchNorm3d, fused_batch_norm, masked_relu

OPS = torch.ops.ftbert
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS = ["none", "relu", "silu"]
# [channels] alone, eights of channels and not, planes that are short, long, and no whole eights.
SHAPES = [
    (2, 1), (5, 3), (64, 8), (33, 24), (700, 264), (300, 1), (1000, 40), (9, 2048),
    (7, 16, 5), (3, 5, 1), (2, 3, 1023),
    (4, 3, 4, 4), (2, 8, 17, 19), (3, 16, 16, 16), (1, 2, 40, 50), (6, 64, 7, 7), (2, 320, 3, 3), (2, 5, 64, 33),
    (2, 3, 4, 5, 6), (1, 8, 8, 8, 9),
]  # fmt: skip
RANDOM = 5


def layouts(shape: tuple[int, ...]) -> list[str]:
    return ["contiguous", "last"] if len(shape) > 2 else ["contiguous"]


def arranged(t: Tensor, layout: str) -> Tensor:
    if layout == "contiguous":
        return t.contiguous()
    if layout == "last":
        return t.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "odd base":  # one element behind an aligned one
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)
    wide = torch.empty(t.shape[0], *[2 * n for n in t.shape[1:]], dtype=t.dtype, device=t.device)
    return wide[(slice(None), *[slice(None, None, 2)] * (t.dim() - 1))].copy_(t)  # "strided"


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return made.to(device, dtype)


class Case:
    """One call and its gradients, ours and float64's from the same numbers."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str, layout: str = "contiguous", *,
        activation: str = "relu", training: bool = True, addend: bool = True, affine: bool = True,
        vectors: torch.dtype = torch.float32, seed: int = RANDOM,
    ) -> None:  # fmt: skip
        channels = shape[1]
        self.x = arranged(random(shape, dtype, device, seed, 2.0) + 0.75, layout)
        self.addend = arranged(random(shape, dtype, device, seed + 1), layout) if addend else None
        self.dy = arranged(random(shape, dtype, device, seed + 2), layout)
        self.weight = 1 + random((channels,), vectors, device, seed + 3, 0.3) if affine else None
        self.bias = random((channels,), vectors, device, seed + 4, 0.3) if affine else None
        self.running_mean = random((channels,), vectors, device, seed + 5, 0.2)
        self.running_var = 1 + random((channels,), vectors, device, seed + 6, 0.2).abs()
        self.activation, self.training, self.dtype = activation, training, dtype

    def inputs(self) -> list[Tensor | None]:
        return [self.x, self.addend, self.weight, self.bias]

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        given = [t if t is None else t.detach().requires_grad_() for t in self.inputs()]
        x, addend, weight, bias = given
        assert x is not None
        running = self.running_mean.clone(), self.running_var.clone()
        y = fused_batch_norm(
            x, *running, weight, bias, addend, training=self.training, activation=self.activation, momentum=0.3
        )
        self.after = running
        y.backward(self.dy)
        return y.detach(), [None if t is None else t.grad for t in given]

    def reference(self, passes: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """passes: where the gradient of relu does, which near 0 is a matter of rounding."""
        given = [t if t is None else t.detach().double().requires_grad_() for t in self.inputs()]
        x, addend, weight, bias = given
        running = self.running_mean.double(), self.running_var.double()
        z = functional.batch_norm(x, *running, weight, bias, self.training, 0.3, 1e-5)
        z = z if addend is None else z + addend
        y = {"none": z, "relu": z * passes, "silu": functional.silu(z)}[self.activation]
        self.expected_after = running
        y.backward(self.dy.double())
        return y.detach(), [None if t is None else t.grad for t in given]

    def check(self) -> None:
        y, grads = self.run()
        expected, expected_grads = self.reference(y > 0)
        assert y.dtype == self.dtype and y.shape == self.x.shape
        close("y", y, expected, 1.0)
        # dx is a difference of terms of this size, sums are of as many terms.
        dims = [0, *range(2, self.x.dim())]
        var = self.x.double().var(dims, correction=0) if self.training else self.running_var.double()
        root = (var + 1e-5).rsqrt()
        term = (root if self.weight is None else root * self.weight.double().abs()).max().item()
        sums = self.dy.double().abs().sum(dims).max().item()
        scales = {"x": term * self.dy.double().abs().max().item(), "addend": 1.0, "weight": sums, "bias": sums}
        for (name, scale), got, want, given in zip(scales.items(), grads, expected_grads, self.inputs(), strict=True):
            assert (got is None) == (want is None), name
            if got is not None and want is not None and given is not None:
                assert got.dtype == given.dtype, name
                close(name, got, want, scale)
        for got, want in zip(self.after, self.expected_after, strict=True):
            close("running", got, want, 1.0)


def close(name: str, got: Tensor, want: Tensor, scale: float) -> None:
    """Apart by few roundings of numbers as large as the largest, or as `scale` if that is more."""
    assert got.shape == want.shape, name
    if want.numel() == 0:
        return
    error = (got.double() - want).abs().max().item()
    eps = torch.finfo(got.dtype).eps
    bound = (8 if eps < 1e-6 else 2) * eps * max(scale, want.abs().max().item())
    assert error <= bound, f"{name}: {error:.3g} apart, at most {bound:.3g}"


# ---- values and gradients --------------------------------------------------------------------------------------------


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
        Case((6, 3, 4, 4), torch.float64, device, activation=activation, training=training).check()


@pytest.mark.parametrize("memory", ["x", "addend", "dy"])
def test_orders_that_differ(device: str, memory: str) -> None:
    """Each tensor in an order of its own."""
    for own, others in (("last", "contiguous"), ("contiguous", "last")):
        case = Case((3, 16, 6, 5), torch.float32, device, others, activation="silu")
        setattr(case, memory, arranged(getattr(case, memory), own))
        case.check()


def test_the_order_of_memory_stays(device: str) -> None:
    for module, shape in ((FusedBatchNorm1d, (4, 8, 5)), (FusedBatchNorm2d, (2, 8, 5, 3)), (FusedBatchNorm3d, (2, 8, 3, 5, 3))):
        x = arranged(random(shape, torch.float32, device, 1), "last").requires_grad_()
        y = module(8, device=device)(x)
        y.sum().backward()  # the gradient is one number, expanded
        assert x.grad is not None
        assert y.stride() == x.stride() == x.grad.stride()


def test_gradients_of_some(device: str) -> None:
    for wanted in itertools.product((True, False), repeat=4):
        if not any(wanted):
            continue
        for activation, training in itertools.product(ACTIVATIONS, (True, False)):
            case = Case((8, 8, 3, 3), torch.float32, device, activation=activation, training=training)
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
    x = arranged(random((8, 8, 1000, 100), torch.float32, device, 3, deviation) + mean, layout)
    got_mean, got_var = OPS.batch_norm_statistics(x)
    var, expected = torch.var_mean(x.double(), [0, 2, 3], correction=0)
    assert (got_mean - expected).abs().max() <= 2e-6 * abs(mean) + 1e-6 * deviation
    assert ((got_var - var) / var).abs().max() <= 1e-5


def test_statistics_of_few_large_among_many(device: str) -> None:
    x = random((4096, 8), torch.float32, device, 4)
    x[0] = 1e6
    var, mean = torch.var_mean(x.double(), 0, correction=0)
    got_mean, got_var = OPS.batch_norm_statistics(x)
    assert ((got_mean - mean) / mean).abs().max() <= 1e-5
    assert ((got_var - var) / var).abs().max() <= 1e-5


def test_two_runs_are_identical(device: str) -> None:
    for shape, layout in (((64, 64, 14, 14), "last"), ((8, 16, 32, 32), "contiguous"), ((64, 24, 7, 7), "contiguous")):
        case = Case(shape, torch.float32, device, layout)
        (y, grads), (again, grads_again) = case.run(), case.run()
        assert torch.equal(y, again)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


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
        x = arranged(random(shape, dtype, device, 6), layout)
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


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_masked_relu(device: str, dtype: torch.dtype) -> None:
    for shape, layout in itertools.product([(5,), (33, 7), (4, 3, 16, 5), (2, 8, 4, 4)], ["contiguous", "last", "odd base"]):
        if layout == "last" and len(shape) < 3:
            continue
        x = arranged(random(shape, dtype, device, 7), layout).requires_grad_()
        dy = random(shape, dtype, device, 8)
        y = masked_relu(x)
        y.backward(dy)
        assert torch.equal(y, torch.relu(x))
        assert torch.equal(x.grad, torch.where(x > 0, dy, 0))
        if dtype != torch.float64:
            (twice,) = torch.autograd.grad(
                torch.autograd.grad(masked_relu(x), x, (v := dy.clone().requires_grad_()), create_graph=True)[0].sum(), v
            )
            assert torch.equal(twice, (x > 0).to(dtype))
    assert torch.equal(masked_relu(random((3, 3), dtype, device, 9)), torch.relu(random((3, 3), dtype, device, 9)))


# ---- modules ---------------------------------------------------------------------------------------------------------

MODULES: list[tuple[Any, Any, tuple[int, ...]]] = [
    (FusedBatchNorm1d, nn.BatchNorm1d, (9, 5)),
    (FusedBatchNorm1d, nn.BatchNorm1d, (4, 5, 7)),
    (FusedBatchNorm2d, nn.BatchNorm2d, (3, 5, 4, 4)),
    (FusedBatchNorm3d, nn.BatchNorm3d, (2, 5, 3, 4, 4)),
]


@pytest.mark.parametrize(("ours", "theirs", "shape"), MODULES)
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_modules_keep_what_torch_keeps(
    device: str, ours: Any, theirs: Any, shape: tuple[int, ...], momentum: float | None, track: bool, affine: bool
) -> None:
    mine = ours(5, momentum=momentum, track_running_stats=track, affine=affine, activation="none", device=device)
    reference = theirs(5, momentum=momentum, track_running_stats=track, affine=affine, device=device)
    assert mine.state_dict().keys() == reference.state_dict().keys()
    reference.load_state_dict(mine.state_dict())
    for step in range(4):
        for module in (mine, reference):
            module.train(step != 2)
        x = random(shape, torch.float32, device, step, 1.0 + step) + step
        torch.testing.assert_close(mine(x), reference(x), rtol=1e-5, atol=1e-5)
        for name, want in reference.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], want, rtol=1e-5, atol=1e-6)
    assert "activation=none" in repr(mine)


def test_a_step_of_training_lowers_the_loss_as_torch_does(device: str) -> None:
    class Block(nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norms = nn.ModuleList([norm(8), norm(8)])

        def forward(self, x: Tensor) -> Tensor:
            fused = isinstance(self.norms[0], FusedBatchNorm2d)
            y = self.first(x)
            if fused:
                return self.norms[1](self.second(self.norms[0](y)), y)  # type: ignore[no-any-return]
            return torch.relu(self.norms[1](self.second(torch.relu(self.norms[0](y)))) + y)

    torch.manual_seed(0)
    models = [Block(FusedBatchNorm2d).to(device), Block(nn.BatchNorm2d).to(device)]
    models[1].load_state_dict(models[0].state_dict())
    losses = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        losses.append([])
        for step in range(6):
            x = random((4, 3, 8, 8), torch.float32, device, step)
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0]


def test_nothing_is_kept_without_gradients(device: str) -> None:
    module = FusedBatchNorm2d(8, device=device).eval()
    with torch.no_grad():
        assert not module(random((2, 8, 4, 4), torch.float32, device, 1)).requires_grad


def test_autocast_leaves_dtypes_as_torch_does(device: str) -> None:
    x = random((4, 8, 3, 3), torch.float32, device, 1)
    with torch.autocast(device, torch.bfloat16):
        for t in (x, x.bfloat16()):
            mine = FusedBatchNorm2d(8, activation="none", device=device)(t)
            assert mine.dtype == nn.BatchNorm2d(8, device=device)(t).dtype == t.dtype


def test_checkpointing(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    module = FusedBatchNorm2d(8, device=device)
    x, again = (random((4, 8, 3, 3), torch.float32, device, 1).requires_grad_() for _ in range(2))
    module(x, x).sum().backward()
    checkpoint(module, again, again, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_a_script_infers(device: str) -> None:
    module = FusedBatchNorm2d(8, device=device).eval()
    scripted = torch.jit.script(module)
    x = random((2, 8, 4, 4), torch.float32, device, 1)
    with torch.no_grad():
        assert torch.equal(scripted(x), module(x)) and torch.equal(scripted(x, x), module(x, x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compile_without_a_break(device: str, activation: str) -> None:
    torch._dynamo.reset()
    modules = [FusedBatchNorm2d(8, activation=activation, device=device) for _ in range(2)]
    compiled = torch.compile(modules[1], fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for _ in range(2):
        grads = []
        for call in (modules[0], compiled):
            x = random((4, 8, 5, 5), torch.float32, device, 1).to(memory_format=torch.channels_last).requires_grad_()
            addend = random((4, 8, 5, 5), torch.float32, device, 2).requires_grad_()
            y = call(x, addend)
            (y * y).sum().backward()
            grads.append([y, x.grad, addend.grad])
        for mine, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(mine, theirs)
    for name, want in modules[0].state_dict().items():
        torch.testing.assert_close(modules[1].state_dict()[name], want)


def test_opcheck(device: str) -> None:
    x, addend = (arranged(random((3, 8, 3, 3), torch.float32, device, n), "last") for n in (1, 2))
    weight, bias, mean = (random((8,), torch.float32, device, n) for n in (3, 4, 5))
    var, batches = mean.abs() + 1, torch.tensor(3, device=device)
    for momentum in (0.1, None):
        torch.library.opcheck(OPS.batch_norm_statistics, (x, mean.clone(), var.clone(), batches.clone(), momentum))
    torch.library.opcheck(OPS.batch_norm_statistics, (x,))
    for activation, training in itertools.product(ACTIVATIONS, (True, False)):
        given = [t.clone().requires_grad_() for t in (x, addend, weight, bias)]
        # A test of torch's compares gradients with those of the CPU's schema run: no more than what is differentiable.
        torch.library.opcheck(OPS.batch_norm_apply, (*given, mean, var, 1e-5, activation, training, True))
        _, mask = OPS.batch_norm_apply(x, addend, weight, bias, mean, var, 1e-5, activation, training, True)
        for wanted in ([True, True, True], [True, False, False], [False, True, True]):
            torch.library.opcheck(
                OPS.batch_norm_backward,
                (addend, x, addend, mask, weight, bias, mean, var, 1e-5, activation, training, wanted),
            )
    torch.library.opcheck(OPS.relu_with_mask, (x.clone().requires_grad_(),))
    torch.library.opcheck(OPS.relu_backward_from_mask, (x.clone().requires_grad_(), OPS.relu_with_mask(x)[1]))


# ---- what is refused, and what is empty ------------------------------------------------------------------------------


def test_refusals(device: str) -> None:
    x = random((4, 8, 3, 3), torch.float32, device, 1)
    module = FusedBatchNorm2d(8, device=device)
    with pytest.raises(ValueError, match="expected 4D input"):
        module(x[0])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        FusedBatchNorm1d(8, device=device)(x[:1, :, 0, 0])
    with pytest.raises(RuntimeError, match="more than 1 value per channel"):
        OPS.batch_norm_statistics(x[:1, :, 0, 0])
    with pytest.raises(ValueError, match="addend: expected x's shape"):
        module(x, x[:2])
    with pytest.raises(RuntimeError, match="addend: expected"):
        module(x, x.bfloat16())
    with pytest.raises(RuntimeError, match="running_mean: expected|weight: expected"):
        FusedBatchNorm2d(7, device=device)(x)
    with pytest.raises(RuntimeError, match="weight: expected"):
        fused_batch_norm(x, None, None, torch.ones(8, device=device, dtype=torch.float16), training=True)
    with pytest.raises(RuntimeError, match="eps: expected more than 0"):
        fused_batch_norm(x, None, None, training=True, eps=0.0)
    with pytest.raises(ValueError, match="activation: expected none, relu or silu"):
        fused_batch_norm(x, None, None, training=True, activation="gelu")
    with pytest.raises(ValueError, match="activation: expected none, relu or silu"):
        FusedBatchNorm2d(8, activation="tanh")
    with pytest.raises(ValueError, match="running_mean and running_var"):
        fused_batch_norm(x, None, None)
    with pytest.raises(RuntimeError, match="x: expected"):
        fused_batch_norm(x.long(), None, None, training=True)
    with pytest.raises(RuntimeError, match="mask: expected"):
        OPS.relu_backward_from_mask(x, torch.zeros(3, dtype=torch.int32, device=device))
    with pytest.raises(RuntimeError, match="momentum: expected"):
        OPS.batch_norm_statistics(x, torch.zeros(8, device=device), None, None, None)
    if device == "cuda":
        with pytest.raises(RuntimeError, match="expected .* on cuda"):
            fused_batch_norm(x, None, None, torch.ones(8), training=True)


def test_gradients_are_not_differentiated_again(device: str) -> None:
    x = random((4, 8), torch.float32, device, 1).requires_grad_()
    y = fused_batch_norm(x, None, None, training=True)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_running_statistics_that_changed_before_backward(device: str) -> None:
    module = FusedBatchNorm1d(8, device=device).eval()
    x = random((4, 8), torch.float32, device, 1).requires_grad_()
    y = module(x)
    module.train()(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("ours", "theirs", "shape"), MODULES)
def test_an_empty_batch(device: str, ours: Any, theirs: Any, shape: tuple[int, ...]) -> None:
    mine, reference = ours(5, device=device), theirs(5, device=device)
    for training in (True, False):
        x = torch.empty(0, *shape[1:], device=device, requires_grad=True)
        y = mine.train(training)(x, x)
        reference.train(training)(x)
        y.sum().backward()
        assert y.shape == x.shape == x.grad.shape
        assert not mine.weight.grad.any()
    for name, want in reference.state_dict().items():
        assert torch.equal(mine.state_dict()[name], want)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.mark.usefixtures("gpu")
def test_a_cuda_graph_trains() -> None:
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
    for mine, want in zip(got, (y, x.grad, addend.grad, module.weight.grad, module.bias.grad), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.usefixtures("gpu")
def test_another_stream() -> None:
    case = Case((64, 64, 14, 14), torch.float16, "cuda", "last")
    with torch.cuda.stream(torch.cuda.Stream()):
        case.check()


@pytest.mark.usefixtures("gpu")
def test_another_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    Case((33, 24), torch.float16, "cuda:1").check()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", ["last", "contiguous"])
def test_more_than_2_to_the_31_elements(layout: str) -> None:
    """16 channels, whose rows repeat: statistics and results are those of one repetition."""
    if torch.cuda.get_device_properties(0).total_memory < 60e9:
        pytest.skip("needs 30 GB")
    part = random((16, 16, 32, 32), torch.float16, "cuda", 1)
    dy_part = random((16, 16, 32, 32), torch.float16, "cuda", 2)
    copies = 2**31 // part.numel() + 8
    memory = torch.channels_last if layout == "last" else torch.contiguous_format
    x, dy = (t.to(memory_format=memory).repeat(copies, 1, 1, 1).to(memory_format=memory) for t in (part, dy_part))
    assert x.numel() > 2**31
    x.requires_grad_()
    y = fused_batch_norm(x, None, None, training=True)
    y.backward(dy)
    small = part.clone().requires_grad_()
    want = fused_batch_norm(small, None, None, training=True)
    want.backward(dy_part)
    assert x.grad is not None and small.grad is not None
    for at in (slice(0, 16), slice(-16, None)):
        torch.testing.assert_close(y[at], want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(x.grad[at], small.grad, rtol=5e-3, atol=5e-3)
