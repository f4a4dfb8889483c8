"""Models whose norms ftbert computes: patch and unpatch, and training with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import make_bert
from torch import Tensor, nn
from training_norms import BF16, F32, random, same_bits, unit
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ftbert.norm import FusedLayerNorm, FusedRMSNorm, patch, unpatch


class Unlike(LlamaRMSNorm):
    """By its name one of transformers', by what it computes none."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


def mixed_model(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    kinds = [nn.LayerNorm(64), nn.Linear(64, 64), nn.RMSNorm(64), nn.LayerNorm(64, bias=False), nn.LayerNorm(64, elementwise_affine=False)]
    model = nn.Sequential(*kinds, LlamaRMSNorm(64), nn.Linear(64, 64), Qwen3RMSNorm(64), Gemma3RMSNorm(64), Unlike(64)).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def gradients(module: nn.Module, x: Tensor) -> list[Any]:
    x = x.detach().clone().requires_grad_()
    module(x).square().mean().backward()
    made = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return made


@pytest.mark.parametrize("efficient", [False, True, "auto"])
def test_patch_changes_speed_alone(device: str, efficient: Any) -> None:
    model = mixed_model(device)
    kinds, state = [type(m) for m in model], model.state_dict()
    x = random(11, 64, device=device)
    wanted = gradients(model, x)
    assert patch(model, efficient) is model
    assert [isinstance(m, kind) for m, kind in zip(model, kinds, strict=True)] == [True] * len(kinds)
    assert [type(m) is kind for m, kind in zip(model, kinds, strict=True)] == [kind in (nn.Linear, Unlike) for kind in kinds]
    assert state.keys() == model.state_dict().keys() and all(a.data_ptr() == b.data_ptr() for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for one, true in zip(gradients(other, x), wanted, strict=True):
            assert_close(one, true, atol=2e-5 * (10 if efficient else 1))
    patch(model, False)
    assert all(m.memory_efficient is False for m in model if hasattr(m, "memory_efficient"))
    assert unpatch(model) is model and [type(m) for m in model] == kinds
    assert same_bits(gradients(model, x), wanted)
    assert not any("memory_efficient" in vars(m) or "weight_offset" in vars(m) for m in model)


def test_patch_keeps_the_types_of_transformers(device: str) -> None:
    for kind in (LlamaRMSNorm, Gemma3RMSNorm):
        for weights in (F32, BF16):
            module = nn.Sequential(kind(64)).to(device, weights)
            for dtype in (F32, BF16):
                x = random(3, 64, device=device, dtype=dtype)
                wanted = module(x)
                got = patch(module)(x)
                unpatch(module)
                assert got.dtype == wanted.dtype
                assert_close(got, wanted, atol=2 * unit(dtype, weights), rtol=2 * unit(dtype, weights))


def test_patched_norms_are_called_as_torchs_are() -> None:
    """By the names of torch's arguments; one whose forward a wrapper has replaced stays as it is."""
    x, model = random(3, 8, device="cpu"), nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8), nn.LayerNorm(8)])
    inner = model[2].forward
    model[2].forward = lambda x: inner(x) + 1
    wanted = [model[0](input=x), model[1](x=x), model[2](x)]
    patch(model)
    assert [type(one) for one in model] == [FusedLayerNorm, FusedRMSNorm, nn.LayerNorm]
    for got, want in zip([model[0](input=x), model[1](x=x), model[2](x)], wanted, strict=True):
        assert_close(got, want, atol=1e-6)
    meta = patch(nn.Sequential(nn.LayerNorm(8, device="meta")))
    assert meta(x.to("meta")).shape == (3, 8)


def test_patch_and_weights_of_zero() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.RMSNorm(8))
    with torch.no_grad():
        model[1].weight[3], model[2].weight[3] = 0, 1e-4
    patch(model)
    assert [m.memory_efficient for m in model] == ["auto", False, False]
    with pytest.warns(UserWarning, match="patch: 2 have weights near 0"):
        patch(model, True)
    assert [m.memory_efficient for m in model] == [True, False, True]


def test_patch_leaves_ftberts_own_and_refuses_what_has_no_norm() -> None:
    with pytest.raises(ValueError, match="model: expected one with nn.LayerNorm"):
        patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="memory_efficient: expected"):
        patch(nn.LayerNorm(2), "always")
    own = nn.Sequential(FusedRMSNorm(8, weight_offset=1.0), nn.LayerNorm(8))
    assert not own[0].weight.any()
    unpatch(patch(own))
    assert type(own[0]) is FusedRMSNorm and own[0].weight_offset == 1.0


# ---- models -----------------------------------------------------------------------------------------------------------


def tiny_llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2))


def losses(model: nn.Module, ids: Tensor, steps: int = 8) -> list[float]:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
    return curve


def test_a_model_is_tuned_alike_and_keeps_less(device: str) -> None:
    model = tiny_llama().to(device)
    ids = torch.randint(0, 60, (4, 32), generator=torch.Generator().manual_seed(1)).to(device)
    wanted = losses(model, ids)
    patch(model)
    assert losses(model, ids) == pytest.approx(wanted, rel=2e-4) and wanted[-1] < wanted[0]

    def kept() -> int:
        """Bytes of activations."""
        sizes: dict[int, int] = {}
        held = []

        def pack(t: Tensor) -> Tensor:
            held.append(t)
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=ids).logits.sum()
        return sum(sizes.values())

    patch(model, False)
    plain = kept()
    for efficient in (True, "auto"):
        patch(model, efficient)
        norms = 2 * 3 + 1
        assert plain - kept() == pytest.approx(norms * ids.numel() * 64 * 4, rel=0.02)


def test_a_model_under_autocast(device: str) -> None:
    model = make_bert().to(device).train()
    ids = torch.randint(5, 100, (4, 20), generator=torch.Generator().manual_seed(1)).to(device)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0

    def run() -> list[Tensor]:
        model.zero_grad()
        with torch.autocast(device, BF16):
            out = model(input_ids=ids).last_hidden_state
        out.float().square().mean().backward()
        return [out.detach().float(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    model.config._attn_implementation = "eager"
    wanted = run()
    patch(model)
    got = run()
    assert len(got) == len(wanted)
    for one, true in zip(got, wanted, strict=True):
        assert (one - true).norm() <= 0.05 * true.norm() + 1e-4
