"""Modules of norms for training: state, statistics and losses as torch's, and what they keep for the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from training_norms import EPS, leaves, random, same_bits

from ftbert import norm
from ftbert.norm import FusedBatchNorm1d, FusedBatchNorm2d, FusedBatchNorm3d, FusedLayerNorm

# ---- what is kept -----------------------------------------------------------------------------------------------------


def saved_by(make: Callable[[], Tensor]) -> set[int]:
    """The addresses of the tensors that autograd keeps."""
    kept: set[int] = set()

    def pack(t: Tensor) -> Tensor:
        kept.add(t.untyped_storage().data_ptr())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        make()
    return kept


def test_what_is_kept(device: str) -> None:
    w = torch.ones(64, device=device, requires_grad=True)
    leaf = random(5, 64, device=device).requires_grad_()
    for x, auto in ((leaf, False), (leaf * 2, True), (leaf.exp(), False), (leaf.tanh(), False), (leaf + leaf, True), (nn.functional.linear(leaf, leaf[:, :64].T @ leaf), True)):
        for efficient in (False, True, "auto"):
            made: list[Tensor] = []
            kept = saved_by(lambda x=x, e=efficient, made=made: made.append(norm.fused_rms_norm_affine(x, w, 64, EPS, e)))  # type: ignore[func-returns-value, arg-type]
            from_output = auto if efficient == "auto" else bool(efficient)
            places = [one.untyped_storage().data_ptr() for one in (x, made[0])]
            assert [place in kept for place in places] == [not from_output, from_output], (efficient, x.grad_fn)
    with pytest.raises(ValueError, match="memory_efficient: expected True, False or 'auto', got 'yes'"):
        norm.fused_rms_norm_affine(leaf, w, 64, EPS, "yes")


@pytest.mark.parametrize("efficient", [True, "auto"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_columns_that_the_result_has_lost(name: str, efficient: Any, device: str) -> None:
    """A weight of 0, or so near that it would count as eps: x is saved, and all gradients are those of False."""
    offset = 1.0 if "rms" in name else 0.0
    grad, weight = random(50, 64, device=device, seed=3), random(64, device=device, seed=1)
    weight[3], weight[5] = -offset, 1e-7 - offset
    made = []
    for mode in (False, efficient):
        x, r, w, b = leaves(random(50, 64, device=device), random(50, 64, device=device, seed=4), weight, random(64, device=device, seed=2))
        h = x * 2  # no leaf, for which "auto" would save it anyway
        if name == "layer_norm":
            y = norm.fused_layer_norm_affine(h, w, b, 64, EPS, mode)
        elif name == "rms_norm":
            y = norm.fused_rms_norm_affine(h, w, 64, EPS, mode, offset)
        elif name == "add_layer_norm":
            y = norm.fused_add_layer_norm(h, r, w, b, EPS, mode)[0]
        else:
            y = norm.fused_add_rms_norm(h, r, w, EPS, mode, offset)[0]
        y.backward(grad)
        assert w.grad[3] != 0
        made.append([one.grad for one in (x, r, w, b) if one.grad is not None])
    assert same_bits(*made)


def test_a_module_saves_x_where_its_weights_need_it(device: str) -> None:
    for module in (FusedLayerNorm(64, memory_efficient=True), norm.MixedFusedRMSNorm(64, memory_efficient=True, weight_offset=1.0)):
        module.to(device)
        state = {key: value.clone() for key, value in module.state_dict().items()}
        for near, from_input in ((1e-9, True), (0.5, False)):
            state["weight"][7] = near - getattr(module, "weight_offset", 0.0)
            module.load_state_dict(state)
            x, made = random(5, 64, device=device).requires_grad_() * 2, []
            kept = saved_by(lambda x=x, made=made, module=module: made.append(module(x)))  # type: ignore[func-returns-value, arg-type]
            assert [one.untyped_storage().data_ptr() in kept for one in (x, made[0])] == [from_input, not from_input]


def test_a_look_at_weights_in_shards(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = FusedLayerNorm(64, memory_efficient=True)
        with torch.no_grad():
            module.weight[7] = 1e-9
        module.weight = nn.Parameter(distribute_tensor(module.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)]))
        module.load_state_dict(module.state_dict())
        assert module.keeps_input
    finally:
        distributed.destroy_process_group()


def test_weights_near_zero_are_warned_of_where_they_are_loaded() -> None:
    class Efficient(FusedLayerNorm):
        pass

    module = Efficient(8, memory_efficient=True)
    state = module.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(state)
        state["weight"][2] = 0  # x is saved
        module.load_state_dict(state)
    state["weight"][2] = 1e-4
    with pytest.warns(UserWarning, match="Efficient: some weights are near 0. With memory_efficient=True their"):
        module.load_state_dict(state)


# ---- BatchNorm --------------------------------------------------------------------------------------------------------


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
        x = random(*shape, device=device, seed=step, scale=1.0 + step) + step
        torch.testing.assert_close(mine(x), reference(x), rtol=1e-5, atol=1e-5)
        for name, want in reference.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], want, rtol=1e-5, atol=1e-6)
    assert "activation=none" in repr(mine)


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
            x = random(4, 3, 8, 8, device=device, seed=step)
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
        assert not module(random(2, 8, 4, 4, device=device, seed=1)).requires_grad


def test_running_statistics_that_changed_before_backward(device: str) -> None:
    module = FusedBatchNorm1d(8, device=device).eval()
    x = random(4, 8, device=device, seed=1).requires_grad_()
    y = module(x)
    module.train()(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
