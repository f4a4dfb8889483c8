"""Whether ftbert computes what a live transformers model computes: a few tokens through both.

Config and weights do not say everything: an activation, LayerNorm or attention that was replaced, a head of another
form, a hook that changes what passes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ftbert.caller import warn_caller
from ftbert.dtypes import Dtype
from ftbert.packed_model import PackedModel


def encoder_of(model: Any) -> Any:
    """The part of a transformers model that ftbert computes: without its head, of one with a decoder its encoder, of
    one with a tower for text that."""
    from transformers import PreTrainedModel

    base = getattr(model, "base_model", model)
    if isinstance(getattr(base, "decoder", None), PreTrainedModel):
        return base.get_encoder()
    tower = getattr(base, "text_model", None)
    return tower if isinstance(tower, PreTrainedModel) else base


def sample_ids(vocab: int, max_seq: int, device: torch.device) -> Tensor:
    """int64 [1, seq] of the first ids."""
    return torch.arange(min(8, max_seq), device=device)[None] % vocab


def tolerance(encoder: Any, exact: bool, device: torch.device) -> float:
    """By how much of the largest value a result of `encoder` may differ from a model's on `device`. exact: that one
    computes in fp32 or more."""
    products = encoder.info().get("products", encoder.matrix_dtype())
    if "e4m3" in products:
        return 0.3
    if "int8" in products:
        return 0.2
    if not exact or products != "fp32":  # 16-bit operands, or such as are rounded to TF32
        return 0.1
    return 1e-4 if device.type == "cpu" else 1e-3


class Differs(RuntimeError):
    """ftbert and the live model compute something else."""


def check_equal(
    ours: Tensor, theirs: Tensor, name: str, allowed: float, least: float = 0.0, rounded: Tensor | None = None
) -> None:
    """Differs where the two differ by more than rounding.

    name: of the original's class. allowed: of the largest value, at least of `least`: logits may cancel, hidden states
    do not. rounded: the original's own result in ours' type; then by more than 1.5 times as much as it, in the mean.
    """
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    largest = max(theirs.abs().max().item(), least)
    difference = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("inf")
    equal = difference <= allowed * largest
    if not equal and rounded is not None and difference < float("inf"):
        ours_off, rounded_off = ((x - theirs).double().square().mean().sqrt() for x in (ours, rounded.float().cpu()))
        equal = bool(ours_off <= 1.5 * rounded_off) and bool(rounded_off.isfinite())
    if not equal:
        raise Differs(
            f"ftbert's result differs from {name}'s own by {difference:.3g} on values up to {largest:.3g}: the model "
            "computes something that its config does not say (was a layer, activation or head replaced?). ftbert "
            "cannot compute it"
        )


def hooks_of(module: nn.Module) -> list[Any]:
    """The dicts of the forward hooks of all modules inside."""
    parts = [part for part in module.modules() if part is not module]
    return [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]


def has_hooks(hooks: list[Any]) -> bool:
    """Whether any is set. Those of transformers, with which it collects hidden states, do not count."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.")
        for each in filter(None, hooks)  # most often all are empty: 3 us before every call
        for hook in each.values()
    )


def check_loaded(model: PackedModel, live: Any) -> None:
    """Differs where `model`, a Model loaded from `live`, gives another hidden state, pooled output or other logits.

    Warns of results that only `live` itself gives: forward hooks inside, a head that is not transformers'.
    """
    name, base = type(live).__name__, encoder_of(live)
    with torch.inference_mode(False), torch.no_grad(), _in_eval_mode(live):
        try:
            _compare(model, live)
        except Differs:
            exact, rounded = in_both_types(live, model.dtype)
            if exact is None:
                raise
            _compare(model, exact, rounded)
            warn_of_rounding(name, model.dtype)
    if has_hooks(hooks_of(live)):
        warn_caller(f"ftbert does not call the forward hooks on modules inside this {name}")
    if base is not live and not is_transformers_own(live):
        warn_caller(
            f"{name} has a forward that is not transformers' own: ftbert computes its encoder"
            f"{' and the heads ' + str(model.tasks) if model.heads else ''}, and nothing else of it",
        )


def in_both_types(live: Any, dtype: Dtype) -> tuple[Any, Any]:
    """`live` in float32 and in `dtype`, for `check_equal` where it said Differs: some models have entries beside which
    16 bits hold nothing else. (None, None) where that is no type of 16 bits or there is no copy."""
    if isinstance(dtype, str) or dtype not in (torch.float16, torch.bfloat16):
        return None, None
    own = next(live.parameters()).dtype
    try:
        return (
            live if own == torch.float32 else copy.deepcopy(live).float(),
            live if own == dtype else copy.deepcopy(live).to(dtype),
        )
    except Exception:  # noqa: BLE001 - memory, or a model that is not copied
        return None, None


def _compare(model: PackedModel, live: Any, rounded: Any = None) -> None:
    """rounded: `live` in the type of `model`, and `live` then in float32."""
    parameter = next(live.parameters())
    allowed = tolerance(model.encoder, parameter.dtype in (torch.float32, torch.float64), parameter.device)
    ids = sample_ids(model.config.vocab, model.config.max_seq, parameter.device)
    name = type(live).__name__

    def asked(of: Any) -> Any:
        return None if of is None else of(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True)

    ours: Any = model(ids.to(model.device))
    theirs, near = (asked(encoder_of(of)) for of in (live, rounded))
    check_equal(
        ours.last_hidden_state, theirs.last_hidden_state, name, allowed, rounded=near and near.last_hidden_state
    )
    if model.heads and is_transformers_own(live):
        ids = ids[None] if model.tasks[0] == "multiple_choice" else ids
        theirs, near = asked(live), asked(rounded)
        ours = model(ids.to(model.device))
    for field in set(ours) & set(theirs) - {"last_hidden_state", "hidden_states"}:
        if isinstance(theirs[field], Tensor) and isinstance(ours[field], Tensor):
            check_equal(ours[field], theirs[field], name, allowed, least=1.0, rounded=near and near[field])


def warn_of_rounding(name: str, dtype: Dtype) -> None:
    """name: of the class of a live model that was compared so."""
    warn_caller(
        f"in {dtype} {name}'s own results are far from those in float32, and ftbert's are as far: whether it computes "
        "the same shows in float32 alone",
    )  # fmt: skip


def is_transformers_own(model: nn.Module) -> bool:
    """Whether the forward of its class is transformers' own."""
    return str(getattr(type(model).forward, "__module__", "")).startswith("transformers.")


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = [part for part in model.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
