"""Shapes and dtypes of every op without computing: what torch.compile and torch.export trace with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_class_registry import register_fake_class
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from ftbert.dtypes import DTYPES


def _facts(encoder: Any) -> Any:
    """The stand-in of the encoder while something is traced. A real one has none: tensors without data came by hand."""
    if isinstance(encoder, torch._C.ScriptObject):
        raise RuntimeError(
            "expected tensors with data, on the model's device, got one on meta; shapes alone are computed where "
            "torch.compile or torch.export traces"
        )
    return encoder.wrapped_obj


def forward_batch(
    encoder: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    want: list[str],
) -> list[Tensor]:
    facts = _facts(encoder)
    batch = input_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = {
        "tokens": (*input_ids.shape, facts.hidden()),
        "first": (batch, facts.hidden()),
        "pooled": (batch, facts.hidden() if facts.has_pooler() else 0),
        "hidden_states": (facts.layers() + 1, *input_ids.shape, facts.hidden()),
    }
    # The number of valid tokens of padded ids stands in the mask, and an op that holds an object cannot give such a
    # size to the inductor of torch 2.13 (its assertion compares with a guess): torch.compile breaks the graph here.
    if unknown := set(want) - {*shapes, "packed_tokens", "packed_index", "cu_seqlens"}:
        raise ValueError(f"want: {', '.join(sorted(unknown))} are none of {', '.join(shapes)}")
    if not shapes.keys() >= set(want):
        raise DynamicOutputShapeException(torch.ops.ftbert.forward_batch.default)
    return [input_ids.new_empty(shapes[name], dtype=facts.dtype()) for name in want]


def first_rows(packed: Tensor, cu_seqlens: Tensor) -> Tensor:
    return packed.new_empty((cu_seqlens.shape[0] - 1, packed.shape[1]))


def pack_weight(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def padding(mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = mask.shape[0] * mask.shape[1]
    return (
        mask.new_empty(mask.shape[0] + 1, dtype=torch.int32),
        mask.new_empty(rows, dtype=torch.int64),
        mask.new_empty(rows, dtype=torch.int32),
        mask.new_empty(5, dtype=torch.int64),
    )


def padding_mask(lengths: Tensor, seq: int) -> Tensor:
    return lengths.new_empty((lengths.shape[0], seq), dtype=torch.uint8)


def padding_positions(
    input_ids: Tensor, token_index: Tensor | None, cu_seqlens: Tensor, tokens: int, kind: str, padding_id: int
) -> Tensor:
    return input_ids.new_empty(tokens, dtype=torch.int32)


def padding_stage(
    input_ids: Tensor, types: Any, token_index: Any, cu_seqlens: Tensor, tokens: int, most_tokens: int, most_batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = input_ids.new_empty(most_tokens)
    return ids, torch.empty_like(ids), cu_seqlens.new_empty(most_tokens), cu_seqlens.new_empty(most_batch + 1)


def remove_padding(padded: Tensor, token_index: Tensor, tokens: int) -> Tensor:
    return padded.new_empty((tokens, padded.shape[1]))


def restore_padding(packed: Tensor, packed_index: Tensor) -> Tensor:
    return packed.new_empty((packed_index.shape[0], packed.shape[1]))


def embeddings_layernorm(
    input_ids: Tensor, types: Any, token_index: Any, positions: Tensor, word: Tensor, *rest: Any
) -> Tensor:
    return word.new_empty((positions.shape[0], word.shape[1]))


def add_bias_input_layernorm(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def add_bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return torch.empty_like(x)


def add_bias_act_(x: Tensor, bias: Any, activation: str) -> None:
    return None


def attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    heads: int,
    relative_bias: Any = None,
    columns: Any = None,
    bf16: bool = False,
) -> Tensor:
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // 3))


def add_qkv_bias(
    qkv: Tensor, bias: Tensor | None, cu_seqlens: Tensor, seq: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (cu_seqlens.shape[0] - 1, heads, seq, qkv.shape[1] // 3 // heads)
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


def softmax(scores: Tensor, cu_seqlens: Tensor, scale: float, bias: Any, columns: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(scores, dtype=dtype)


def transpose(x: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    return x.new_empty((tokens, x.shape[1] * x.shape[3]))


def pooling(hidden: Tensor, cu_seqlens: Tensor, mode: str, normalize: bool) -> Tensor:
    return hidden.new_empty((cu_seqlens.shape[0] - 1, hidden.shape[1]), dtype=torch.float32)


def linear(a: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return a.new_empty((a.shape[0], weight.shape[0]))


def linear_own(a: Tensor, weight: Tensor, bias: Tensor | None, activation: str, kernel: str, variant: str) -> Tensor:
    return a.new_empty((a.shape[0], weight.shape[0]))


def linear_layernorm(
    a: Tensor, weight: Tensor, bias: Any, input: Tensor, gamma: Tensor, beta: Tensor, eps: float, variant: str
) -> Tensor:
    return torch.empty_like(input)


_FAKES: tuple[Callable[..., Any], ...] = (
    forward_batch, first_rows, pack_weight, padding, padding_mask, padding_positions, padding_stage, remove_padding,
    restore_padding, embeddings_layernorm, add_bias_input_layernorm, add_bias_act, add_bias_act_, attention,
    add_qkv_bias, softmax, transpose, pooling, linear, linear_own, linear_layernorm,
)  # fmt: skip


class _FakeEncoder:
    """Stands for torch.classes.ftbert.Encoder while tracing: what shapes depend on, and nothing else.

    torch.compile asks for an attribute by each name that __obj_flatten__ (csrc/binding/ops.cpp) gives.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    @classmethod
    def __obj_unflatten__(cls, flat: Any) -> _FakeEncoder:
        return cls(dict(flat))

    def hidden(self) -> int:
        return int(self._facts["hidden"])

    def layers(self) -> int:
        return int(self._facts["layers"])

    def has_pooler(self) -> bool:
        return bool(self._facts["has_pooler"])

    def dtype(self) -> torch.dtype:
        return DTYPES[self._facts["dtype"]]

    def device(self) -> torch.device:
        return self._facts["device"]  # type: ignore[no-any-return]


def _not_traced(name: str) -> Any:
    def method(self: _FakeEncoder, *arguments: Any) -> Any:
        raise RuntimeError(f"the encoder's {name} cannot be traced; torch.ops.ftbert and Model.module can")

    return method


# torch warns of every method that is not there, each time it traces.
for _name in (
    "config", "forward", "forward_batch", "forward_packed", "info", "matrix_dtype", "to", "use_cuda_graphs", "weight",
    "weights",
):  # fmt: skip
    setattr(_FakeEncoder, _name, _not_traced(_name))


def _refuse_none(fake: Callable[..., Any]) -> Callable[..., Any]:
    """None in the place of a Tensor reaches a fake where another argument is on meta."""
    names = list(inspect.signature(fake).parameters)
    tensors = {name for name, kind in fake.__annotations__.items() if kind == "Tensor"}

    @functools.wraps(fake)
    def checked(*arguments: Any, **named: Any) -> Any:
        for name, value in [*zip(names, arguments, strict=False), *named.items()]:
            if value is None and name in tensors:
                raise ValueError(f"{fake.__name__}: {name}: expected a tensor, got None")
        return fake(*arguments, **named)

    return checked


def register() -> None:
    """Called once, after the library is loaded."""
    for fake in _FAKES:
        torch.library.register_fake(f"ftbert::{fake.__name__}", _refuse_none(fake))
    register_fake_class("ftbert::Encoder", _FakeEncoder)  # type: ignore[arg-type]
