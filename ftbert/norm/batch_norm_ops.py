"""What `torch.library` must know of the ops in csrc/binding/batch_norm_ops.cpp: the CPU's implementations, composed of
torch's functions, shapes and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ftbert._fake import checked_op
from ftbert._library import load_library
from ftbert.norm.composition import FLOATS, check_storage, describe, sums_type

load_library()
_OPS = torch.ops.ftbert
ACTIVATIONS = ("none", "relu", "silu")


# ---- how tensors lie -------------------------------------------------------------------------------------------------


def is_channels_last(x: Tensor) -> bool:
    """[batch, ..., channels] in memory, where that is another order than [batch, channels, ...]."""
    return x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def dense(x: Tensor) -> Tensor:
    """x itself where its elements lie densely in one of the two orders, else a contiguous copy."""
    return x if is_channels_last(x) else x.contiguous()


def in_order(t: Tensor, channels_last: bool) -> Tensor:
    """t itself where its elements lie densely in this order, else a copy."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else t.contiguous()


def _in_memory(t: Tensor) -> Tensor:
    """The elements of a dense tensor, in memory order."""
    return (t.movedim(1, -1) if is_channels_last(t) else t).reshape(-1)


# ---- masks -----------------------------------------------------------------------------------------------------------


def _words(elements: Any) -> Any:
    return (elements + 31) // 32


def _pack(bits: Tensor) -> Tensor:
    """bool [n] -> int32 [ceil(n / 32)], bit i % 32 of word i / 32"""
    padded = functional.pad(bits.long(), (0, -bits.numel() % 32)).view(-1, 32)
    words = (padded << torch.arange(32, device=bits.device)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _unpack(mask: Tensor, like: Tensor) -> Tensor:
    """A dense tensor's bits, in its shape and order."""
    bits = (mask.long()[:, None] >> torch.arange(32, device=mask.device) & 1).bool().reshape(-1)[: like.numel()]
    made = torch.empty_like(like, dtype=torch.bool)
    last = is_channels_last(like)
    (made.movedim(1, -1) if last else made).copy_(bits.view((made.movedim(1, -1) if last else made).shape))
    return made


# ---- checks, as those of the C++ ops ---------------------------------------------------------------------------------


def _check_element(name: str, x: Tensor) -> None:
    check_storage(name, x)
    if x.dtype not in FLOATS:
        raise RuntimeError(f"{name}: expected floating-point elements, got {describe(x)}")


def _check_rank(x: Tensor) -> None:
    if x.dim() < 2:
        raise RuntimeError(f"x: expected [batch, channels, ...], got {describe(x)}")


def _check(x: Tensor, activation: str = "none", eps: float = 1.0, **vectors: Tensor | None) -> None:
    _check_element("x", x)
    _check_rank(x)
    if activation not in ACTIVATIONS:
        raise RuntimeError(f"activation: expected none, relu or silu, got {activation}")
    if not eps > 0:
        raise RuntimeError(f"eps: expected more than 0, got {eps}")
    for name, t in vectors.items():
        if t is None:
            continue
        if t.shape != x.shape[1:2] or t.dtype not in (torch.float32, x.dtype) or t.device != x.device:
            expected = f"float32 or x's dtype, [{x.shape[1]}] on {x.device}"
            raise RuntimeError(f"{name}: expected {expected}, got {describe(t)}")
        check_storage(name, t)


def _check_alike(name: str, t: Tensor | None, x: Tensor) -> None:
    if t is None:
        return
    if t.shape != x.shape or t.dtype != x.dtype or t.device != x.device:
        raise RuntimeError(f"{name}: expected {describe(x)} as x is, got {describe(t)}")
    check_storage(name, t)


def _check_mask(mask: Tensor | None, x: Tensor) -> None:
    if mask is None or mask.shape != (_words(x.numel()),) or mask.dtype != torch.int32 or mask.device != x.device:
        raise RuntimeError(
            f"mask: expected int32 [{_words(x.numel())}], a bit for each element of {describe(x)}, got "
            f"{None if mask is None else describe(mask)}"
        )
    check_storage("mask", mask)


# ---- the CPU's implementations ---------------------------------------------------------------------------------------


def _float(t: Tensor) -> Tensor:
    return t.to(sums_type(t.dtype))


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _over(vector: Tensor, x: Tensor) -> Tensor:
    """[channels] -> [channels, 1, ...], in the type that is computed in."""
    return vector.to(sums_type(x.dtype)).view(-1, *[1] * (x.dim() - 2))


def _statistics(
    x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None, momentum: float | None = 0.1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(x, running_mean=running_mean, running_var=running_var)
    tracks = running_mean is not None or running_var is not None
    if momentum is None and num_batches_tracked is None and tracks:
        raise RuntimeError("momentum: expected a number, or num_batches_tracked for the mean over all batches")
    count = x.numel() // max(x.shape[1], 1)
    if x.numel() > 0 and count == 1:
        raise RuntimeError(f"x: expected more than 1 value per channel when training, got {describe(x)}")
    if num_batches_tracked is not None:
        if num_batches_tracked.numel() != 1 or num_batches_tracked.dtype != torch.int64:
            raise RuntimeError(f"num_batches_tracked: expected one int64, got {describe(num_batches_tracked)}")
        check_storage("num_batches_tracked", num_batches_tracked)
        num_batches_tracked.add_(1)
    wide = _float(x)
    if x.numel() == 0:
        return wide.new_zeros(x.shape[1]), wide.new_zeros(x.shape[1])
    var, mean = torch.var_mean(wide, _dims(x), correction=0)
    share = 1 / float(num_batches_tracked) if momentum is None and num_batches_tracked is not None else momentum or 0.0
    for running, now in (running_mean, mean), (running_var, var * (count / (count - 1))):
        if running is not None:
            running.copy_(running.to(now.dtype) * (1 - share) + now * share)
    return mean, var


def _normalised(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return (_float(x) - _over(mean, x)) * torch.rsqrt(_over(var, x) + eps)


def _sum(normalised: Tensor, x: Tensor, addend: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = normalised if weight is None else normalised * _over(weight, x)
    z = z if bias is None else z + _over(bias, x)
    return z if addend is None else z + addend


def _apply(
    x: Tensor, addend: Tensor | None, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
    eps: float, activation: str, training: bool, mask: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(x, activation, eps, weight=weight, bias=bias, mean=mean, var=var)
    _check_alike("addend", addend, x)
    x = dense(x)
    z = torch.empty_like(x, dtype=sums_type(x.dtype))
    z.copy_(_sum(_normalised(x, mean, var, eps), x, addend, weight, bias))
    bits = _pack(~(_in_memory(z) <= 0)) if mask and activation == "relu" else x.new_empty(0, dtype=torch.int32)
    act = {"none": lambda t: t, "relu": torch.relu, "silu": functional.silu}[activation]
    return torch.empty_like(x).copy_(act(z)), bits


def _backward(
    dy: Tensor, x: Tensor, addend: Tensor | None, mask: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor, var: Tensor, eps: float, activation: str, training: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check(x, activation, eps, weight=weight, bias=bias, mean=mean, var=var)
    _check_alike("dy", dy, x)
    _check_alike("addend", addend, x)
    x = dense(x)
    normalised, root = _normalised(x, mean, var, eps), torch.rsqrt(_over(var, x) + eps)
    dz = _float(dy)
    if activation == "relu":
        _check_mask(mask, x)
        assert mask is not None
        dz = torch.where(_unpack(mask, x), dz, 0.0)
    elif activation == "silu":
        z = _sum(normalised, x, addend, weight, bias)
        s = torch.sigmoid(z)
        dz = dz * s * (1 + z * (1 - s))
    d_bias, d_weight = dz.sum(_dims(x)), (dz * normalised).sum(_dims(x))
    dx = dz
    if training:
        count = max(x.numel() // max(x.shape[1], 1), 1)
        dx = dz - (_over(d_bias, x) + normalised * _over(d_weight, x)) / count
    dx = dx * (root if weight is None else root * _over(weight, x))

    def made(one: bool, t: Tensor, like: Tensor) -> Tensor:
        return torch.empty_like(like).copy_(t) if one else like.new_empty(0)

    of_weight, of_bias = (mean if one is None else one for one in (weight, bias))
    return (
        made(wanted[0], dx, x),
        made(wanted[1], dz, x),
        made(wanted[2] and weight is not None, d_weight, of_weight),
        made(wanted[2] and bias is not None, d_bias, of_bias),
    )


def _relu(x: Tensor) -> tuple[Tensor, Tensor]:
    _check_element("x", x)
    x = dense(x)
    return torch.empty_like(x).copy_(torch.relu(x)), _pack(~(_in_memory(x) <= 0))


def _relu_backward(dy: Tensor, mask: Tensor) -> Tensor:
    _check_element("dy", dy)
    _check_mask(mask, dy)
    dy = dense(dy)
    return torch.empty_like(dy).copy_(torch.where(_unpack(mask, dy), dy, 0.0))


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _fake_statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    _check_rank(x)
    dtype = sums_type(x.dtype)
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _fake_apply(
    x: Tensor, addend: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: Any, activation: str, training: Any,
    mask: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    words = _words(x.numel()) if mask and activation == "relu" else 0
    return torch.empty_like(dense(x)), x.new_empty(words, dtype=torch.int32)


def _fake_backward(
    dy: Any, x: Tensor, addend: Any, mask: Any, weight: Any, bias: Any, mean: Tensor, var: Any, eps: Any,
    activation: Any, training: Any, wanted: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    likes = dense(x), dense(x), mean if weight is None else weight, mean if bias is None else bias
    made = wanted[0], wanted[1], wanted[2] and weight is not None, wanted[2] and bias is not None
    return tuple(torch.empty_like(t) if one else t.new_empty(0) for t, one in zip(likes, made, strict=True))


# ---- gradients -------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, addend, weight, bias, mean, var, ctx.eps, ctx.activation, ctx.training, _ = inputs
    ctx.set_materialize_grads(False)
    read_again = addend if ctx.activation == "silu" else None
    ctx.save_for_backward(x, read_again, output[1] if ctx.activation == "relu" else None, weight, bias, mean, var)


def _gradients(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    none = (None,) * 6
    if dy is None:
        return (None,) * 4 + none
    x, addend, mask, weight, bias, mean, var = ctx.saved_tensors
    needs = ctx.needs_input_grad
    wanted = [needs[0], needs[1] and ctx.activation != "none", needs[2] or needs[3]]
    d_addend = dy if needs[1] else None  # where nothing stands between them
    if not any(wanted):
        return (None, d_addend, None, None, *none)
    dx, dz, d_weight, d_bias = _OPS.batch_norm_backward(
        dy, x, addend, mask, weight, bias, mean, var, ctx.eps, ctx.activation, ctx.training, wanted
    )
    made = dx, dz if wanted[1] else d_addend, d_weight, d_bias
    return (*(t if need else None for t, need in zip(made, needs[:4], strict=True)), *none)


def _refuse_twice(ctx: Any, *_: Any) -> None:
    raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")


def _save_mask(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])
    ctx.channels_last = is_channels_last(output[0])


def _relu_gradient(ctx: Any, dy: Tensor | None, _: Any) -> Tensor | None:
    return None if dy is None else _OPS.relu_backward_from_mask(in_order(dy, ctx.channels_last), *ctx.saved_tensors)


def _save_mask_again(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.channels_last = is_channels_last(output)


def _relu_gradient_again(ctx: Any, ddx: Tensor) -> tuple[Tensor, None]:
    return _OPS.relu_backward_from_mask(in_order(ddx, ctx.channels_last), *ctx.saved_tensors), None


for _name, _on_cpu, _fake in (
    ("batch_norm_statistics", _statistics, _fake_statistics),
    ("batch_norm_apply", _apply, _fake_apply),
    ("batch_norm_backward", _backward, _fake_backward),
    ("relu_with_mask", _relu, lambda x: _fake_apply(x, *(None,) * 6, "relu", False, True)),
    ("relu_backward_from_mask", _relu_backward, lambda dy, mask: torch.empty_like(dense(dy))),
):
    torch.library.register_kernel(f"ftbert::{_name}", "cpu", checked_op(_name, _on_cpu))
    torch.library.register_fake(f"ftbert::{_name}", checked_op(_name, _fake))
for _name, _formula, _setup in (
    ("batch_norm_apply", _gradients, _save),
    ("batch_norm_backward", _refuse_twice, lambda ctx, inputs, output: None),
    ("relu_with_mask", _relu_gradient, _save_mask),
    ("relu_backward_from_mask", _relu_gradient_again, _save_mask_again),
):
    torch.library.register_autograd(f"ftbert::{_name}", _formula, setup_context=_setup)  # type: ignore[arg-type]
