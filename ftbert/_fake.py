"""Shapes and dtypes of every op without computing: what torch.compile and torch.export trace with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_class_registry import FakeScriptObject, register_fake_class
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


def _forward_batch(
    encoder: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    want: list[str],
    rows: Tensor | None = None,
    shared_prefix: int = 0,
) -> list[Tensor]:
    facts = _facts(encoder)
    batch = input_ids.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = {
        "tokens": (*input_ids.shape, facts.hidden()),
        "first": (batch, facts.hidden()),
        "last": (batch, facts.hidden()),
        "pooled": (batch, facts.hidden() if facts.has_pooler() else 0),
        "hidden_states": (facts.layers() + 1, *input_ids.shape, facts.hidden()),
    }
    if rows is not None:
        shapes["rows"] = (rows.shape[0], facts.hidden())
    places = {"packed_index": input_ids.numel(), "cu_seqlens": batch + 1}
    if unknown := set(want) - {*shapes, *places, "packed_tokens"}:
        raise ValueError(f"want: {', '.join(sorted(unknown))} are none of {', '.join([*shapes, *places])}")
    if "packed_tokens" in want:
        # The number of valid tokens stands in the mask: torch.export learns it where the program runs. torch.compile
        # breaks the graph here: an op that holds an object cannot give such a size to the inductor of torch 2.13 (its
        # assertion compares with a guess).
        if not torch.compiler.is_exporting():
            raise DynamicOutputShapeException(torch.ops.ftbert.forward_batch.default)
        shapes["packed_tokens"] = (torch.library.get_ctx().new_dynamic_size(), facts.hidden())
    return [
        input_ids.new_empty(places[name], dtype=torch.int32)
        if name in places
        else input_ids.new_empty(shapes[name], dtype=DTYPES[facts.dtype()])
        for name in want
    ]


def _padding(mask: Tensor) -> tuple[Tensor, ...]:
    rows = mask.shape[0] * mask.shape[1]
    sizes = (mask.shape[0] + 1, torch.int32), (rows, torch.int64), (rows, torch.int32), (5, torch.int64)
    return tuple(mask.new_empty(size, dtype=dtype) for size, dtype in sizes)


def _pack_q8_0(values: Tensor, scales: Tensor) -> Tensor:
    rows, columns = values.shape
    if values.device.type == "cpu":
        rows = (rows + 31) // 32 * 32  # of whole panels
    return values.new_empty(rows * columns * 34 // 32, dtype=torch.uint8)


def _padding_stage(ids: Tensor, types: Any, index: Any, cu: Tensor, tokens: int, most: int, batch: int) -> Any:
    staged = ids.new_empty(most)
    return staged, torch.empty_like(staged), cu.new_empty(most), cu.new_empty(batch + 1)


def _attention(
    qkv: Tensor, cu: Tensor, max_seqlen: int, heads: int, bias: Any = None, columns: Any = None, bf16: bool = False,
    kv_heads: int = 0, scale: Any = None, left: int = -1, right: int = -1, out_scale: Any = None,
) -> Tensor:  # fmt: skip
    return _scaled((qkv.shape[0], qkv.shape[1] // (heads + 2 * (kv_heads or heads)) * heads), qkv, out_scale)


def _add_qkv_bias(
    qkv: Tensor, bias: Any, cu: Tensor, seq: int, heads: int, kv_heads: int = 0
) -> tuple[Tensor, ...]:
    shape = (cu.shape[0] - 1, heads, seq, qkv.shape[1] // (heads + 2 * (kv_heads or heads)))
    return tuple(qkv.new_empty(shape) for _ in range(3))


def _linear(a: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return a.new_empty((a.shape[0], weight.shape[0] // (2 if gated else 1)))


def _add_bias_input_layernorm(
    x: Tensor, bias: Any, residual: Any, gamma: Any, beta: Any, eps: float, kind: str = "layer", offset: float = 0,
    rounding: str = "once", total: bool = True, copy: Any = None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    absent = x.new_empty((0, x.shape[1]))
    return absent if total and copy is not None else torch.empty_like(x), torch.empty_like(x) if total else absent


def _embeddings_layernorm(
    ids: Tensor, types: Any, index: Any, positions: Tensor, word: Tensor, position: Any, token_type: Any, gamma: Any,
    beta: Any, eps: float, kind: str = "layer", offset: float = 0, rounding: str = "once", scale: float = 1,
    copy: Any = None, copy_scale: Any = None, word_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return (word if word_scale is None else word_scale).new_empty((positions.shape[0], word.shape[1]))


def _scaled(shape: tuple[int, ...], x: Tensor, scale: Any) -> Tensor:
    return x.new_empty(shape, dtype=x.dtype if scale is None else torch.float8_e4m3fn)


def _linear_norm(
    a: Tensor, weight: Any, bias: Any, residual: Tensor, gamma: Any, beta: Any, eps: float, variant: str,
    kind: str = "layer", offset: float = 0, rounding: str = "once", total: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(residual), torch.empty_like(residual) if total else a.new_empty((0, residual.shape[1]))


def _linear_norm_e4m3(
    a: Tensor, a_scale: Any, weight: Any, weight_scale: Any, bias: Any, residual: Tensor, gamma: Any, beta: Any,
    eps: float, variant: str, kind: str = "layer", offset: float = 0, rounding: str = "once", total: bool = False,
    copy_scale: Any = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    none = residual.new_empty((0, residual.shape[1]))
    copy = none.to(a.dtype) if copy_scale is None else torch.empty_like(residual, dtype=a.dtype)
    if not total:
        return torch.empty_like(residual), none, copy
    return torch.empty_like(residual) if copy_scale is None else none, torch.empty_like(residual), copy


_TURNED_DTYPE = 18  # the place of linear_turned's dtype behind a and weight

# What each op makes of its arguments, which come in the order of its schema (csrc/binding/).
_FAKES: dict[str, Callable[..., Any]] = {
    "forward_batch": _forward_batch,
    "gather_rows": lambda packed, cu, kind, rows=None: packed.new_empty(
        (cu.shape[0] - 1 if rows is None else rows.shape[0], packed.shape[1])
    ),
    "pack_q8_0": _pack_q8_0,
    "pack_weight": torch.empty_like,
    "padding": _padding,
    "padding_mask": lambda lengths, seq: lengths.new_empty((lengths.shape[0], seq), dtype=torch.uint8),
    "padding_positions": lambda ids, index, cu, tokens, *_: ids.new_empty(tokens, dtype=torch.int32),
    "padding_stage": _padding_stage,
    "remove_padding": lambda padded, index, tokens: padded.new_empty((tokens, padded.shape[1])),
    "restore_padding": lambda packed, index: packed.new_empty((index.shape[0], packed.shape[1])),
    "embeddings_layernorm": _embeddings_layernorm,
    "add_bias_input_layernorm": _add_bias_input_layernorm,
    "add_bias_act": lambda x, bias, activation, scale=None: _scaled(x.shape, x, scale),
    "add_bias_act_": lambda *_: None,
    "add_bias_gate": lambda x, bias, activation, scale=None: _scaled((x.shape[0], x.shape[1] // 2), x, scale),
    "quantise": lambda x, scale: _scaled(x.shape, x, scale),
    "byte_rows": lambda x, smooth=None: x.new_empty((x.shape[0], (x.shape[1] + 71) // 64 * 64), dtype=torch.uint8),
    "argmax": lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64),
    "attention": _attention,
    "attention_apart": lambda q, *_: q.new_empty(q.shape),
    "add_qkv_bias": _add_qkv_bias,
    "rotary": lambda qkv, *_: torch.empty_like(qkv),
    "rotary_table": lambda frequencies, amplitude, positions: frequencies.new_empty(
        (positions, frequencies.shape[0], 2), dtype=torch.float32
    ),
    "repeat_prefix": lambda *_: None,
    "store_keys_values": lambda *_: None,
    "softmax": lambda scores, cu, scale, bias, columns, dtype, *_: torch.empty_like(scores, dtype=dtype),
    "transpose": lambda x, cu, tokens: x.new_empty((tokens, x.shape[1] * x.shape[3])),
    "pooling": lambda hidden, cu, *_: hidden.new_empty(
        (hidden.shape[0] if cu is None else cu.shape[0] - 1, hidden.shape[1]), dtype=torch.float32
    ),
    "linear": lambda a, weight, bias, activation, gated=False: _linear(a, weight, gated),
    "linear_own": lambda a, weight, bias, activation, kernel, variant, gated=False, scales=None: _linear(
        a, weight, gated
    ),
    "linear_e4m3": lambda a, a_scale, weight, weight_scale, bias, dtype, activation, gated=False, out_scale=None, *_: (
        a.new_empty(
            (a.shape[0], weight.shape[0] // (2 if gated else 1)),
            dtype=dtype if out_scale is None else torch.float8_e4m3fn,
        )
    ),
    "quantize_q8_1": lambda x: (
        torch.empty_like(x, dtype=torch.int8),
        x.new_empty((x.shape[0], x.shape[1] // 32), dtype=torch.float32),
    ),
    "dequantize_q8_0": lambda values, scales, dtype: torch.empty_like(values, dtype=dtype),
    "int8_product": lambda rows, weight, scales, bias, activation, gated=False: scales.new_empty(
        (rows.shape[0], weight.shape[0] // (2 if gated else 1))
    ),
    "linear_turned": lambda a, weight, *rest: a.new_empty(
        (a.shape[0], weight.shape[0]), dtype=(rest[_TURNED_DTYPE] if len(rest) > _TURNED_DTYPE else None) or a.dtype
    ),
    "linear_few_rows": lambda a, weight, scales, bias, activation="none", gated=False, *_: _linear(a, weight, gated),
    "mul_mat_vec_q8_0": lambda a, values, scales, bias=None, activation="none", gated=False: _linear(a, values, gated),
    "rms_norm": lambda x, *_: torch.empty_like(x),
    "rope": lambda x, *_: torch.empty_like(x),
    "silu_mul": lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)),
    "linear_norm": _linear_norm,
    "linear_norm_e4m3": _linear_norm_e4m3,
}


class _FakeEncoder:
    """Stands for torch.classes.ftbert.Encoder while tracing: what shapes depend on, and nothing else.

    torch.compile asks for an attribute by each name that __obj_flatten__ (csrc/binding/ops.cpp) gives.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    @classmethod
    def __obj_unflatten__(cls, flat: Any) -> _FakeEncoder:
        return cls(dict(flat))


def _method(name: str) -> Any:
    def method(self: _FakeEncoder, *arguments: Any) -> Any:
        if name not in self._facts:
            raise RuntimeError(f"the encoder's {name} cannot be traced; torch.ops.ftbert and Model.module can")
        return self._facts[name]

    return method


# torch warns of every method that is not there, each time it traces.
for _name in (
    "config", "device", "dtype", "forward", "forward_batch", "forward_packed", "has_pooler", "hidden", "info", "join",
    "layers", "matrix_dtype", "seconds_of_sum", "to", "use_cuda_graphs", "weight", "weights", "whole",
):  # fmt: skip
    setattr(_FakeEncoder, _name, _method(_name))


def word_table_of(encoder: Any) -> Tensor:
    """While torch.export traces, which takes the table into the program as a constant."""
    real = encoder.real_obj if isinstance(encoder, FakeScriptObject) else encoder
    return real.weight("embeddings.word")  # type: ignore[no-any-return]


def checked_op(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An op's implementation in Python, behind a look at what the dispatcher lets through: None in the place of a
    Tensor where another argument decides who is called, and lists of another length than the schema's. The arguments
    come in the schema's order; names reach the fake of an op which takes an Encoder."""
    expected = getattr(torch.ops.ftbert, name).default._schema.arguments

    def checked(*given: Any, **named: Any) -> Any:
        if named:
            given += tuple(named.get(one.name, one.default_value) for one in expected[len(given) :])
        for argument, value in zip(expected, given, strict=False):
            if value is None and str(argument.type) == "Tensor":
                raise RuntimeError(f"{name}: {argument.name}: expected a tensor, got None")
            if argument.N is not None and isinstance(value, list | tuple) and len(value) != argument.N:
                raise RuntimeError(f"{name}: {argument.name}: expected {argument.N} values, got {len(value)}")
        return function(*given)

    return checked


def register() -> None:
    """Called once, after the library is loaded."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"ftbert::{name}", checked_op(name, fake))
    register_fake_class("ftbert::Encoder", _FakeEncoder)  # type: ignore[arg-type]
