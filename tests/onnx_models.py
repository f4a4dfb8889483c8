"""Random models exported to ONNX, and broken copies of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bert
from families import make_model

import ftbert
from ftbert.converters import open_checkpoint

MODELS: dict[str, Callable[[], Any]] = {
    "bert": make_bert,
    "bert tanh, odd heads": partial(make_model, "bert", "encoder", 1, type_vocab_size=3),
    "roberta": partial(make_model, "roberta", "encoder", 0, hidden_act="relu"),
    "roberta-prelayernorm": partial(make_model, "roberta-prelayernorm", "encoder", 0, hidden_act="silu"),
    **{
        family: partial(make_model, family, "encoder", 0)
        for family in ("distilbert", "mpnet", "electra", "albert", "rembert", "megatron-bert")
    },
}


class _Around(torch.nn.Module):
    """A module whose result goes through `change`, with its first argument."""

    def __init__(self, inner: torch.nn.Module, change: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.inner, x)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


_DOWN, _UP, _SCALE = _noise(64, 2), 0.1 * _noise(2, 64), 1 + 0.1 * _noise(64)


def _distance(scores: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(scores.shape[-1])
    return (columns[None] - columns[:, None]).abs()


# Graphs with the structure of BERT that compute something else: what happens in a module, to the scores, to the mask.
_IN_MODULE: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "LoRA not merged": ("query", lambda inner, x: inner(x) + x @ _DOWN @ _UP),
    "positions plus 2": ("position_embeddings", lambda inner, x: inner(x + 2)),
    "positions times 2": ("position_embeddings", lambda inner, x: inner(x * 2)),
    "query times a vector": ("query", lambda inner, x: inner(x) * _SCALE),
    "key clipped": ("key", lambda inner, x: inner(x).clamp(-0.5, 0.5)),
    "bias computed": ("value", lambda inner, x: x @ inner.weight.t() + inner.bias * x.mean(-1, keepdim=True)),
}
_TO_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ALiBi": lambda scores: scores - 0.1 * _distance(scores),
    "window": lambda scores: scores.masked_fill(_distance(scores) > 3, -1e9),
    "window of 60": lambda scores: scores.masked_fill(_distance(scores) > 60, -1e9),
    "diagonal added": lambda scores: scores + (_distance(scores) == 0) * 0.5,
    "causal": lambda scores: scores + torch.full_like(scores[0, 0], -1e9).triu(1),
    "scale": lambda scores: scores * 1.01,
}
_TO_MASK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask inverted": lambda mask: 1 - mask,
    "mask unused": lambda mask: mask * 0 + 1,
    "mask shifted": lambda mask: torch.cat([mask[:, 1:], mask[:, :1]], 1),
}
NEARLY_BERT = [*_IN_MODULE, *_TO_SCORES, *_TO_MASK]


def export_nearly_bert(variant: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = make_bert()
    if variant in _IN_MODULE:
        name, change = _IN_MODULE[variant]
        parts = [part for part in model.modules() if hasattr(part, name)]
        for part in parts:
            setattr(part, name, _Around(getattr(part, name), change))
    elif variant in _TO_SCORES:
        softmax = torch.nn.functional.softmax
        monkeypatch.setattr(
            torch.nn.functional, "softmax", lambda x, *args, **named: softmax(_TO_SCORES[variant](x), *args, **named)
        )
    return export(model, path, dynamo=False, attention="eager", mask=_TO_MASK.get(variant))


class _Hidden(torch.nn.Module):
    """Plain arguments and outputs for the exporters; the names get a prefix."""

    def __init__(self, model: Any, pooler: bool, mask: Callable[[torch.Tensor], torch.Tensor | None] | None) -> None:
        super().__init__()
        self.model, self.pooler, self.mask = model, pooler, mask

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> Any:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        if self.mask is not None:
            attention_mask = self.mask(attention_mask)
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return (out[0], out[1]) if self.pooler else out[0]


def export(
    model: Any, path: Path, *, dynamo: bool, types: bool = False, attention: str = "sdpa", fixed: bool = False,
    opset: int | None = None, pooler: bool = False, mask: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
) -> Path:  # fmt: skip
    """types: with token_type_ids as an input. fixed: for a single shape, so that the exporter folds constants. mask:
    how the graph changes the mask before use."""
    if dynamo:
        pytest.importorskip("onnxscript", reason="torch.onnx's dynamo exporter needs onnxscript")
    model.set_attn_implementation(attention)
    ids = torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {"token_type_ids": torch.zeros_like(ids)} if types else {}
    wrapped = _Hidden(model, pooler, mask).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            dims = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}
            torch.onnx.export(
                wrapped, (), str(path), kwargs=inputs, dynamo=True, dynamic_shapes=None if fixed else dims,
                opset_version=opset, verbose=False,
            )  # fmt: skip
        else:
            axes = {name: {0: "batch", 1: "seq"} for name in inputs}
            torch.onnx.export(
                wrapped, tuple(inputs.values()), str(path), dynamo=False, input_names=list(inputs),
                output_names=["hidden"], dynamic_axes={} if fixed else axes, opset_version=opset or 17,
            )  # fmt: skip
    return path


def quantise(source: Path, target: Path, **how: Any) -> Path:
    """As onnxruntime does it for vector databases: weights in 8 bits, what they multiply when the graph runs."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    kind = getattr(quantization.QuantType, how.pop("kind", "QInt8"))
    quantization.quantize_dynamic(str(source), str(target), weight_type=kind, **how)
    return target


def ragged(vocab: int, padding_id: int, batch: int = 7, seq: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask), int64 [batch, seq], right padded with the padding id."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocab, (batch, seq), generator=generator)
    lengths = torch.randint(1, seq + 1, (batch, 1), generator=generator)
    mask = (torch.arange(seq)[None] < lengths).long()
    return torch.where(mask.bool(), ids, padding_id), mask


def onnxruntime_hidden(path: Path, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What onnxruntime computes from the file: its first output with three dimensions."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    outputs = session.run(None, {one.name: feed[one.name].numpy() for one in session.get_inputs()})
    return torch.from_numpy(next(one for one in outputs if one.ndim == 3))


def anonymous(path: Path, target: Path) -> Path:
    """The same graph with every name replaced by a number, constants in one file."""
    import onnx

    model = onnx.load(str(path))
    names: dict[str, str] = {"": ""}
    keep = {one.name for one in (*model.graph.input, *model.graph.output)}

    def new(name: str) -> str:
        return names.setdefault(name, name if name in keep else f"v{len(names)}")

    for constant in model.graph.initializer:
        constant.name = new(constant.name)
    for node in model.graph.node:
        node.name = ""
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
        del node.metadata_props[:]
    del model.graph.value_info[:]
    onnx.save(model, str(target))
    return target


def same_weights(model: ftbert.Model, source: Any) -> None:
    """Bit for bit what the exported model had."""
    expected = open_checkpoint(source)
    for name in model.checkpoint.tensors:
        assert torch.equal(model.checkpoint.read(name), expected.read(name)), name
