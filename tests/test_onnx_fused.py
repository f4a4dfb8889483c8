"""ONNX graphs that onnxruntime's optimisers have fused, against the model that was exported."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from conftest import make_bert
from families import make_model
from onnx_models import export, quantise

import ftbert

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(
    tuple(map(int, runtime.__version__.split(".")[:2])) < (1, 31), reason="onnxruntime before 1.31 leaves this graph as it is"
)
helper = onnx.helper
# How a graph was fused, and operators that it then has.
FUSED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "lengths": ({}, {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"}),
    "raw mask": ({"raw_mask": True}, {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"}),
    "gelu by tanh": ({"enable_gelu_approximation": True}, {"FastGelu"}),
    "heads apart": ({"use_multi_head_attention": True, "raw_mask": True}, {"MultiHeadAttention"}),
    "no embeddings": ({"enable_embed_layer_norm": False, "raw_mask": True}, {"Attention", "SkipLayerNormalization"}),
    "offline": ({"offline": True}, {"FusedMatMul", "BiasGelu", "FusedGemm"}),
}


@cache
def model_of(family: str) -> Any:
    return make_bert() if family == "bert" else make_model(family, "encoder", 0)


def fused(family: str, how: dict[str, Any], folder: Path, types: bool = True) -> Path:
    model, options = model_of(family), dict(how)
    plain = export(model, folder / "plain.onnx", dynamo=False, types=types, attention="eager", pooler=True)
    path = folder / "model.onnx"
    if options.pop("offline", False):
        session = runtime.SessionOptions()
        session.log_severity_level, session.optimized_model_filepath = 4, str(path)
        session.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        runtime.InferenceSession(str(plain), session, providers=["CPUExecutionProvider"])
        return path
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    from onnxruntime.transformers.fusion_options import FusionOptions

    wanted = FusionOptions("bert")
    if options.pop("raw_mask", False):
        wanted.use_raw_attention_mask(True)
    for key, value in options.items():
        setattr(wanted, key, value)
    sizes = {"num_heads": model.config.num_attention_heads, "hidden_size": model.config.hidden_size}
    found = optimizer.optimize_model(str(plain), model_type="bert", optimization_options=wanted, opt_level=0, **sizes)
    found.save_model_to_file(str(path))
    return path


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def same(found: ftbert.Model, model: Any, limit: float) -> None:
    """Under any mask: also where the graph itself counts tokens."""
    ids = torch.randint(5, 90, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:], mask[2, :4], mask[3, ::3] = 0, 0, 0
    live = ftbert.load(model)
    kept = mask.bool()
    assert_close(found(ids, mask).last_hidden_state[kept], live(ids, mask).last_hidden_state[kept], atol=limit)
    assert_close(found(ids, mask).pooler_output, live(ids, mask).pooler_output, atol=limit)


@pytest.mark.parametrize("what", FUSED)
def test_what_was_fused_is_taken_apart(what: str, tmp_path: Path) -> None:
    how, wanted = FUSED[what]
    path = fused("bert", how, tmp_path)
    assert wanted <= operators(path)
    same(ftbert.load(path), model_of("bert"), 6e-4 if what == "gelu by tanh" else 1e-6)


def test_a_fused_roberta(tmp_path: Path) -> None:
    path = fused("roberta", {"raw_mask": True}, tmp_path, types=False)
    assert {"Attention", "SkipLayerNormalization"} <= operators(path)
    same(ftbert.load(path), model_of("roberta"), 1e-6)


@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_fused_and_in_8_bits(kind: str, tmp_path: Path) -> None:
    path = quantise(fused("bert", {}, tmp_path), tmp_path / "q.onnx", kind=kind, extra_options={"DefaultTensorType": 1})
    assert {"QAttention", "QEmbedLayerNormalization", "SkipLayerNormalization"} <= operators(path)
    found, live = ftbert.load(path), ftbert.load(model_of("bert"))
    ids = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    got, wanted = found(ids).last_hidden_state, live(ids).last_hidden_state
    assert torch.nn.functional.cosine_similarity(got, wanted, dim=-1).min() > 0.99
    graph = onnx.load(path).graph
    stored = next(one for one in graph.initializer if one.name.endswith("qkv_weight_quantized"))
    scale = next(one for one in graph.initializer if one.name == stored.name.removesuffix("_quantized") + "_scale")
    zero = next(one for one in graph.initializer if one.name == stored.name.removesuffix("_quantized") + "_zero_point")
    values = [onnx.numpy_helper.to_array(one).astype(np.float32) for one in (stored, zero, scale)]
    weight = torch.from_numpy((values[0] - values[1]) * values[2]).t()
    assert_close(found.checkpoint.read("layers.0.attention.qkv.weight"), weight, atol=1e-7)


def _attribute(name: str, value: Any, kind: str = "Attention") -> Any:
    def change(graph: Any) -> None:
        node = next(node for node in graph.node if node.op_type == kind)
        node.attribute.append(helper.make_attribute(name, value))

    return change


def _rename(kind: str, other: str, domain: str = "com.microsoft") -> Any:
    def change(graph: Any) -> None:
        node = next(node for node in graph.node if node.op_type == kind)
        node.op_type, node.domain = other, domain

    return change


def _past(graph: Any) -> None:
    node = next(node for node in graph.node if node.op_type == "Attention")
    node.input.extend([""] * (5 - len(node.input)))
    node.input[4] = node.input[0]


WRONG: dict[str, tuple[Any, str]] = {
    "causal": (_attribute("unidirectional", 1), "Attention '.*': unidirectional 1 is not supported"),
    "rotary": (_attribute("do_rotary", 1), "do_rotary 1 is not supported"),
    "widths": (_attribute("qkv_hidden_sizes", [64, 64, 64]), "query, key and value not of one width, is not supported"),
    "past": (_past, "an input of past keys is not supported"),
    "an operator of another domain": (_rename("BiasGelu", "BiasGelu", "org.someone"), "operator 'BiasGelu' of the domain 'org.someone' is none that ftbert knows"),
    "an unknown operator": (_rename("BiasGelu", "BiasMish"), "operator 'BiasMish' of the domain 'com.microsoft' is none that ftbert knows"),
    "another scale": (_attribute("scale", 0.5), "its graph computes something else than the encoder that was read"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fused("bert", {}, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_computed_is_refused(what: str, whole: Path, tmp_path: Path) -> None:
    change, words = WRONG[what]
    model = onnx.load(whole)
    change(model.graph)
    if what == "an operator of another domain":
        model.opset_import.append(helper.make_opsetid("org.someone", 1))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=f"m.onnx: .*{words}"):
        ftbert.load(tmp_path / "m.onnx")
