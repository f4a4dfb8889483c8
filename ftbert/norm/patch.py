"""patch and unpatch: the norms of a model, computed by ftbert, in place."""

from __future__ import annotations

import copy
import inspect
import warnings
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ftbert.norm.functional import norm
from ftbert.norm.lost_columns import look
from ftbert.norm.modules import FusedLayerNorm, FusedRMSNorm, eps_for

M = TypeVar("M", bound=nn.Module)
_TORCHS = {nn.LayerNorm: FusedLayerNorm, nn.RMSNorm: FusedRMSNorm}
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")  # of transformers' RMSNorms


def patch(model: M, memory_efficient: bool | str = "auto") -> M:
    """Lets ftbert compute every nn.LayerNorm, nn.RMSNorm and transformers' *RMSNorm in `model`, in place, and returns
    it. Classes become subclasses of what they were; parameters, state_dict, hooks and `isinstance` stay, and patched
    models can be copied and pickled. Patching again changes `memory_efficient`, which functional.py explains. Training,
    inference, torch.compile and checkpointing work as before; unpatch before torch.jit.script.

    A class of transformers is patched where a trial on a copy shows what it computes: RMSNorm times weight or times
    1 + weight. Others stay as they are, and so do subclasses of nn.LayerNorm, which may compute something else, and
    modules whose `forward` was replaced.

    What differs: under autocast norms give its type, not float32; of Llama's norms in 16 bits the last bit, since rows
    are not rounded before they are multiplied by the weight.

    From the result, columns whose weight is 0 or near it get no right gradient: "auto" saves x where a weight is below
    a thousandth of the largest; True where one is nearer to 0 than eps, and warns of the former. This waits once a norm
    for the GPU. ValueError where there is no norm to patch."""
    if memory_efficient not in (True, False, "auto"):
        raise ValueError(f"memory_efficient: expected True, False or 'auto', got {memory_efficient!r}")
    inexact, found = [], 0
    for name, module in model.named_modules():
        if not (_is_patched(module) or _patch_one(module)):
            continue
        found += 1
        module.keeps_input, module.memory_efficient = False, memory_efficient  # type: ignore[assignment]
        if memory_efficient is False:
            continue
        weights = look(module.weight, getattr(module, "weight_offset", 0.0))  # type: ignore[arg-type]
        if weights.lost(_eps_of(module), memory_efficient):
            module.memory_efficient = False  # type: ignore[assignment]
        elif weights.near_0:
            inexact.append(name)
    if not found:
        raise ValueError("model: expected one with nn.LayerNorm, nn.RMSNorm or transformers' RMSNorm in it, got none")
    if inexact:
        warnings.warn(
            f"patch: {', '.join(inexact)} have weights near 0, whose gradients are inexact: made of the result, which "
            "hardly shows x there. memory_efficient='auto' saves x",
            stacklevel=2,
        )
    return model


def unpatch(model: M) -> M:
    """Takes `patch` back; modules that were made as ftbert's own stay."""
    for module in model.modules():
        if _is_patched(module):
            for name in _ADDED:
                module.__dict__.pop(name, None)
            module.__class__ = next(kind for kind in type(module).__mro__[1:] if not issubclass(kind, _OURS))  # type: ignore[assignment]
    return model


_ADDED = ("memory_efficient", "keeps_input", "weight_offset", "_ftbert_patched", "_ftbert_eps", "_ftbert_promotes")


def _eps_of(module: nn.Module) -> float:
    eps: float | None = module._ftbert_eps if "_ftbert_eps" in module.__dict__ else module.eps  # type: ignore[assignment]
    return eps if module.weight is None else eps_for(eps, module.weight.dtype)  # type: ignore[arg-type, return-value]


def _is_patched(module: nn.Module) -> bool:
    return "_ftbert_patched" in module.__dict__


def _patch_one(module: nn.Module) -> bool:
    kind = type(module)
    if "forward" in module.__dict__:  # a wrapper's, which would go on calling the class that it wrapped
        return False
    if kind in _TORCHS:
        module.__class__ = _TORCHS[kind]
        if kind is nn.RMSNorm:
            module.weight_offset = 0.0  # type: ignore[assignment]
    elif (found := _facts(module)) is not None:
        module.__class__ = _fused_class(kind)  # type: ignore[arg-type]
        module.weight_offset, module._ftbert_eps, module._ftbert_promotes = found  # type: ignore[assignment]
    else:
        return False
    module._ftbert_patched = True  # type: ignore[assignment]
    return True


class _FusedRMSNorm(nn.Module):
    """What is put before the forward of a class of transformers."""

    weight: Tensor
    memory_efficient: bool | str
    weight_offset: float
    _ftbert_eps: float
    _ftbert_promotes: bool  # to the weight's type, where that is wider

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        if self._ftbert_promotes:
            dtype = torch.promote_types(dtype, self.weight.dtype)
        return norm(
            hidden_states, None, self.weight, None, self.weight.shape, self._ftbert_eps, "rms", self.memory_efficient,
            self.weight_offset, dtype,
        )[0]  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class was made here: pickle is told of the one that it was made of."""
        return _made_again, (type(self).__mro__[2],), self.__dict__


_OURS = (_FusedRMSNorm, FusedLayerNorm, FusedRMSNorm)


@cache
def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_FusedRMSNorm, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _made_again(kind: type[nn.Module]) -> nn.Module:
    fused = _fused_class(kind)  # type: ignore[arg-type]
    return fused.__new__(fused)  # type: ignore[no-any-return]


def _facts(module: nn.Module) -> tuple[float, float, bool] | None:
    """Of a norm of transformers: what is added to the weight, eps, and whether the result takes the weight's type where
    that is wider. None: it is none, or computes something else."""
    kind = type(module)
    if not kind.__name__.endswith("RMSNorm") or issubclass(kind, nn.RMSNorm):
        return None
    names = [name for name, _ in module.named_parameters()]
    eps = next((getattr(module, name) for name in _EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    required = [p for p in inspect.signature(kind.forward).parameters.values() if p.kind != p.VAR_KEYWORD]
    if names != ["weight"] or module.weight.dim() != 1 or eps is None or len(required) != 2:  # type: ignore[operator, union-attr]
        return None
    trial = _on_cpu(module)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(trial.weight.shape, generator=generator)  # type: ignore[arg-type]
    x = torch.randn(3, weight.numel(), generator=generator)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        trial.weight.copy_(weight)  # type: ignore[operator]
        got, in_16_bits = trial(x), trial(x.bfloat16())
        row = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        for offset in (0.0, 1.0):
            if torch.allclose(got, row * (weight + offset), rtol=1e-4, atol=1e-5):
                return offset, eps, in_16_bits.dtype == torch.float32
    return None


def _on_cpu(module: nn.Module) -> nn.Module:
    """A copy with other weights: those of a large model on a GPU, or on meta, need not be copied."""
    bare = copy.copy(module)
    bare._parameters = {"weight": nn.Parameter(torch.empty(module.weight.shape), requires_grad=False)}  # type: ignore[arg-type]
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        setattr(bare, hooks, type(getattr(module, hooks))())
    return bare
