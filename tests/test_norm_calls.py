"""Norms of training under torch's machinery: opcheck, compile, checkpointing, autocast, scripts, second derivatives."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_norms import ACTIVATIONS, BF16, EPS, F16, F32, F64, arranged, leaves, random, same_bits, vectors

from ftbert import norm
from ftbert.norm import (
    FusedBatchNorm1d,
    FusedBatchNorm2d,
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)

OPS = torch.ops.ftbert


# ---- opcheck ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("efficient", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_opcheck_of_rows(device: str, kind: str, efficient: bool, residual: bool) -> None:
    x, r = random(3, 4, 64, device=device).requires_grad_(), random(3, 4, 64, device=device, seed=1).requires_grad_()
    w, b = (one if one is None else one.requires_grad_() for one in vectors(64, kind, device, F32))
    for dtype in (F32, BF16):
        arguments = (x, r if residual else None, w, b, [64], EPS, kind, 0.0, dtype, efficient)
        # With a gradient of what is normalised alone: that of a gradient is refused.
        torch.library.opcheck(OPS.norm_forward.default, arguments)
    y, total, mean, rstd = (one.detach() for one in OPS.norm_forward(*arguments[:8], F32, efficient))
    saved = y if efficient else total if residual else x.detach()
    arguments = (y, total if residual else None, saved, efficient, mean, rstd, w.detach(), None if b is None else b.detach(), [64], EPS, kind, 0.0, F32, True, b is not None)
    torch.library.opcheck(OPS.norm_backward.default, arguments)


def test_opcheck_of_batch_norm(device: str) -> None:
    x, addend = (arranged(random(3, 8, 3, 3, device=device, seed=n), "last") for n in (1, 2))
    weight, bias, mean = (random(8, device=device, seed=n) for n in (3, 4, 5))
    var, batches = mean.abs() + 1, torch.tensor(3, device=device)
    for momentum in (0.1, None):
        torch.library.opcheck(OPS.batch_norm_statistics, (x, mean.clone(), var.clone(), batches.clone(), momentum))
    torch.library.opcheck(OPS.batch_norm_statistics, (x,))
    for activation, training in itertools.product(ACTIVATIONS, (True, False)):
        given = [t.clone().requires_grad_() for t in (x, addend, weight, bias)]
        # A test of torch's compares gradients with those of the CPU's schema run: no more than what is differentiable.
        torch.library.opcheck(OPS.batch_norm_apply, (*given, mean, var, 1e-5, activation, training, True))
        _, mask = OPS.batch_norm_apply(x, addend, weight, bias, mean, var, 1e-5, activation, training, True)
        some = ([True, False, False], [False, True, True]) if activation == "relu" and training else ()
        for wanted in ([True, True, True], *some):
            arguments = (addend, x, addend, mask, weight, bias, mean, var, 1e-5, activation, training, wanted)
            torch.library.opcheck(OPS.batch_norm_backward, arguments)
    torch.library.opcheck(OPS.relu_with_mask, (x.clone().requires_grad_(),))
    torch.library.opcheck(OPS.relu_backward_from_mask, (x.clone().requires_grad_(), OPS.relu_with_mask(x)[1]))


# ---- compile and checkpointing ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm, with the sum in the norm."""

    def __init__(self, efficient: Any = False) -> None:
        super().__init__()
        self.first = FusedLayerNorm(64, memory_efficient=efficient)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.weight = nn.Parameter(torch.ones(64))
        self.efficient = efficient

    def forward(self, x: Tensor) -> Tensor:
        y, total = norm.fused_add_rms_norm(self.down(self.up(self.first(x)).relu()), x, self.weight, 1e-6, self.efficient)
        return y * total.tanh()


def gradients(module: nn.Module, run: Callable[..., Tensor], *inputs: Tensor) -> list[Any]:
    """The result, and gradients of inputs and parameters."""
    given = leaves(*inputs)
    y = run(*given)
    y.square().mean().backward()
    made = [y.detach(), *(t.grad for t in (*given, *module.parameters()))]
    module.zero_grad()
    return made


def compiled(module: nn.Module, device: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")


@pytest.mark.parametrize("efficient", [False, True, "auto"])
def test_rows_are_compiled_without_a_break(device: str, efficient: Any) -> None:
    torch.manual_seed(0)
    block = Block(efficient).to(device)
    fast = compiled(block, device)
    for rows in (7, 12, 20):  # then of any size
        x = random(rows, 64, device=device)
        for one, other in zip(gradients(block, fast, x), gradients(block, block, x), strict=True):
            assert_close(one, other, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_norm_is_compiled_without_a_break(device: str, activation: str) -> None:
    modules = [FusedBatchNorm2d(8, activation=activation, device=device) for _ in range(2)]
    fast = compiled(modules[1], device)
    x, addend = arranged(random(4, 8, 5, 5, device=device, seed=1), "last"), random(4, 8, 5, 5, device=device, seed=2)
    for _ in range(2):
        for one, other in zip(gradients(modules[1], fast, x, addend), gradients(modules[0], modules[0], x, addend), strict=True):
            torch.testing.assert_close(one, other)
    for name, want in modules[0].state_dict().items():
        torch.testing.assert_close(modules[1].state_dict()[name], want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("efficient", [False, True, "auto"])
def test_checkpointing_of_rows(device: str, reentrant: bool, efficient: Any) -> None:
    block, x = Block(efficient).to(device), random(9, 64, device=device)
    got = gradients(block, lambda x: checkpoint(block, x, use_reentrant=reentrant), x)
    assert same_bits(got, gradients(block, block, x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_batch_norm(device: str, reentrant: bool) -> None:
    """The second forward pass counts in running statistics, as it does in torch's."""
    ours, torchs = FusedBatchNorm2d(8, device=device), nn.BatchNorm2d(8, device=device)
    given = [random(4, 8, 3, 3, device=device, seed=seed) for seed in (1, 2)]
    want = gradients(ours, ours, *given)
    ours.reset_running_stats()
    got = gradients(ours, lambda *given: checkpoint(ours, *given, use_reentrant=reentrant), *given)
    gradients(torchs, lambda x: checkpoint(torchs, x, use_reentrant=reentrant), given[0])
    assert same_bits(got, want) and ours.num_batches_tracked == 2
    for name, buffer in torchs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer)


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given,result", [(F32, BF16), (BF16, BF16), (F16, BF16), (F64, F64)], ids=str)
def test_autocast_gives_its_type_as_apex_does(device: str, given: torch.dtype, result: torch.dtype) -> None:
    x = random(4, 64, device=device, dtype=given).requires_grad_()
    for module in (FusedLayerNorm(64), FusedRMSNorm(64), MixedFusedLayerNorm(64), MixedFusedRMSNorm(64)):
        module.to(device, F64 if given == F64 else F32)
        with torch.autocast(device, BF16):
            y = module(x)
            y2, total = norm.fused_add_rms_norm(x, x, module.weight)
        assert y.dtype == y2.dtype == result and total.dtype == given
        y.float().sum().backward()
        assert x.grad is not None and x.grad.dtype == given and module.weight.grad.dtype == module.weight.dtype
        outside = module(x)
        assert outside.dtype == (module.weight.dtype if "Mixed" in type(module).__name__ else given)


def test_autocast_leaves_batch_norm_as_torch_does(device: str) -> None:
    x = random(4, 8, 3, 3, device=device, seed=1)
    with torch.autocast(device, BF16):
        for t in (x, x.bfloat16()):
            mine = FusedBatchNorm2d(8, activation="none", device=device)(t)
            assert mine.dtype == nn.BatchNorm2d(8, device=device)(t).dtype == t.dtype


# ---- scripts ---------------------------------------------------------------------------------------------------------

LOADS = """
import sys, torch
import ftbert.norm
with torch.no_grad():
    torch.save([torch.jit.load(path)(*inputs) for path, inputs in torch.load(sys.argv[1])], sys.argv[2])
"""


@torch.no_grad()
def test_scripts_infer_here_and_in_a_fresh_process(device: str, tmp_path: Path) -> None:
    rows = [kind(64) for kind in (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm)]
    rows += [FusedRMSNorm(64, eps=None), MixedFusedRMSNorm(64, eps=None), FusedRMSNorm(64, weight_offset=1.0)]
    rows += [FusedLayerNorm(64, bias=False), FusedLayerNorm(64, elementwise_affine=False)]
    short, images = random(3, 64, device=device), random(2, 8, 4, 4, device=device, seed=1)
    calls: list[tuple[nn.Module, tuple[Tensor, ...]]] = [(one, (x,)) for one in rows for x in (short, short.bfloat16())]
    calls += [(FusedBatchNorm1d(64), (short,)), (FusedBatchNorm2d(8), (images,)), (FusedBatchNorm2d(8, activation="silu"), (images, images))]
    stored, wanted = [], []
    for at, (module, inputs) in enumerate(calls):
        for t in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            t.copy_(1 + 0.3 * random(*t.shape, device="cpu", seed=at).clamp(-2, 2))
        wanted.append(module.to(device).eval()(*inputs))
        scripted = torch.jit.script(module)
        assert torch.equal(scripted(*inputs), wanted[-1])
        stored.append((str(tmp_path / f"{at}.pt"), inputs))
        scripted.save(stored[-1][0])
    torch.save(stored, tmp_path / "given")
    done = subprocess.run([sys.executable, "-c", LOADS, tmp_path / "given", tmp_path / "made"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same_bits(torch.load(tmp_path / "made"), wanted)


# ---- second derivatives ----------------------------------------------------------------------------------------------

ONCE: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: norm.fused_layer_norm_affine(x, w, w, 64),
    lambda x, w: norm.fused_rms_norm_affine(x, w, 64, memory_efficient=True),
    lambda x, w: sum(norm.fused_add_layer_norm(x, x, w)),
    lambda x, w: norm.fused_batch_norm(x, None, None, w, training=True),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(ONCE)))
def test_twice_is_refused(device: str, at: int) -> None:
    x, w = leaves(random(3, 64, device=device), torch.ones(64, device=device))
    for leaf in (x, w):
        (grad,) = torch.autograd.grad(ONCE[at](x, w).square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="trying to differentiate .*twice"):
            grad.sum().backward()
