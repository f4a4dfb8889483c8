"""Shapes and dtypes of the library's ops without computing: what torch.compile and torch.export trace with."""

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
    keys: Tensor | None = None,
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


def _pack_q8_0(values: Tensor, scales: Tensor) -> Tensor:
    rows, columns = values.shape
    if values.device.type == "cpu":
        rows = (rows + 31) // 32 * 32  # of whole panels
    return values.new_empty(rows * columns * 34 // 32, dtype=torch.uint8)


# What each op makes of its arguments, which come in the order of its schema (csrc/binding/).
_FAKES: dict[str, Callable[..., Any]] = {
    "forward_batch": _forward_batch,
    "pack_q8_0": _pack_q8_0,
    "pack_weight": torch.empty_like,
    "restore_padding": lambda packed, index: packed.new_empty((index.shape[0], packed.shape[1])),
    "add_bias_act": lambda x, bias, activation, scale=None: torch.empty_like(
        x, dtype=x.dtype if scale is None else torch.float8_e4m3fn
    ),
    "max_sim": lambda queries, cu_queries, documents, cu_documents, query_of=None: queries.new_empty(
        (cu_documents.shape[0] - 1,) if query_of is not None else (cu_queries.shape[0] - 1, cu_documents.shape[0] - 1),
        dtype=torch.float32,
    ),
    "argmax": lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64),
    "pooling": lambda hidden, cu, *_: hidden.new_empty(
        (hidden.shape[0] if cu is None else cu.shape[0] - 1, hidden.shape[1]), dtype=torch.float32
    ),
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
    """Called after the library is loaded, and again by a package that is imported anew, whose fakes count then."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"ftbert::{name}", checked_op(name, fake), allow_override=True)
    register_fake_class("ftbert::Encoder", _FakeEncoder)  # type: ignore[arg-type]
