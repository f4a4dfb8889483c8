"""ONNX files that onnxruntime has quantised: weights in 8 bits with scales, integer products, table look-ups."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from conftest import make_bert
from onnx_models import MODELS, anonymous, export, export_nearly_bert, onnxruntime_hidden, quantise, ragged

import ftbert
from ftbert import devices
from ftbert._library import build_info
from ftbert.checkpoint import Checkpoint
from ftbert.converters import convert, onnx_check, onnx_source, open_checkpoint

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
WAYS = [
    {"kind": kind, "per_channel": per_channel, "reduce_range": reduced}
    for kind, per_channel, reduced in itertools.product(("QInt8", "QUInt8"), (False, True), (False, True))
]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(make_bert(num_hidden_layers=1), tmp_path_factory.mktemp("plain") / "m.onnx", dynamo=False)


@pytest.fixture(scope="session")
def small(plain: Path) -> Path:
    """What the tests of bad input break."""
    return quantise(plain, plain.with_name("q.onnx"), per_channel=True)


def check(path: Path) -> ftbert.Model:
    """Near onnxruntime on the file, and equal to the transformers model of what was read."""
    model = ftbert.load(path)
    ids, mask = ragged(model.config.vocab, model.config.padding_id)
    got = model(ids, attention_mask=mask).last_hidden_state
    theirs = onnxruntime_hidden(path, ids, mask) * mask[..., None]
    assert torch.nn.functional.cosine_similarity(got.flatten(1), theirs.flatten(1)).min() >= 0.98
    with torch.no_grad():
        expected = model.reference()(input_ids=ids, attention_mask=mask).last_hidden_state
    assert_close(got[mask.bool()], expected[mask.bool()], atol=2e-5, what="against transformers")
    return model


def stored(path: Path) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(integers [k, n], scale, zero point) of the products of weights in the file, in the graph's order."""
    model = onnx.load(str(path))
    values = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type == "MatMulInteger" and node.input[1] in values:
            scale = node.input[1].removesuffix("_quantized") + "_scale"
            found.append((values[node.input[1]], values[scale], values[node.input[3]]))
    return found


def floats(integers: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    return (integers.astype(np.int32) - zero).astype(np.float32) * scale


def expect_stored(model: ftbert.Model, path: Path) -> None:
    for got, one in zip(parts(model.checkpoint), stored(path), strict=True):
        assert np.array_equal(got.numpy(), floats(*one).T)


def expect_int8(plain: Checkpoint, path: Path) -> None:
    """The file's integers where they fit less their zero points, else the nearest ones, with a warning."""
    expected = [(integers.astype(np.int32) - zero, scale) for integers, scale, zero in stored(path)]
    fits = all(one.min() >= -128 and one.max() <= 127 for one, _ in expected)
    assert plain.in_int8 is not None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = plain.in_int8()
    assert fits != any("rounded once more, by up to 0." in str(one.message) for one in said)
    values, scales = parts(made, dtype=torch.int8), parts(made, "weight.scale")
    for got, factors, (one, scale) in zip(values, scales, expected, strict=True):
        if one.min() >= -128 and one.max() <= 127:
            assert np.array_equal(got.numpy(), one.T)
            assert np.array_equal(factors.numpy(), np.broadcast_to(scale, len(factors)))
        else:
            error = got.double().numpy() * factors.double().numpy()[:, None] - (one * scale.astype(np.float64)).T
            assert (np.abs(error) <= 0.50001 * factors.double().numpy()[:, None]).all()
    assert all(spec.stored for spec in made.config.encoder.weight_specs() if spec.matrix)
    assert all(bool((made.read(name) == 1).all()) for name in made.tensors if name.endswith(".input.smooth"))


def parts(checkpoint: Checkpoint, what: str = "weight", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of the matrices of the layers, [n, k], in the order in which a graph multiplies by them."""
    found: list[torch.Tensor] = []
    for i in range(checkpoint.config.encoder.depth):
        for name in ("attention.qkv", "attention.out", "ffn.up", "ffn.down"):
            whole = checkpoint.read(f"layers.{i}.{name}.{what}", dtype)
            found += whole.chunk(3) if name == "attention.qkv" else [whole]
    return found


@pytest.mark.parametrize("how", WAYS)
def test_weights_are_the_integers_times_their_scales(how: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    path = quantise(plain, tmp_path / "q.onnx", **how)
    model = check(path)
    expect_stored(model, path)
    expect_int8(model.checkpoint, path)
    values = {one.name: numpy_helper.to_array(one) for one in onnx.load(str(path)).graph.initializer}
    names = [f"model.embeddings.word_embeddings.weight_{what}" for what in ("quantized", "scale", "zero_point")]
    assert np.array_equal(model.checkpoint.read("embeddings.word"), floats(*(values[name] for name in names)))


@pytest.mark.parametrize("name", ["roberta", "distilbert", "mpnet", "albert", "megatron-bert"])
def test_families(name: str, tmp_path: Path) -> None:
    """mpnet moves its table of distances before it dequantises it. Of weights that layers share, ALBERT's, the quantiser
    leaves all but the first as they are: its layers are then different ones, as ELECTRA has them."""
    reference = MODELS[name]()
    path = quantise(export(reference, tmp_path / "m.onnx", dynamo=False), tmp_path / "q.onnx", kind="QUInt8", per_channel=True)
    model = check(path)
    assert model.checkpoint.config.architecture == ("electra" if name == "albert" else reference.config.model_type)
    with pytest.warns(UserWarning, match="rounded once more"):
        made = model.checkpoint.in_int8()
    first = {spec.name for spec in made.config.encoder.weight_specs() if spec.matrix and spec.stored == "int8"}
    assert all(one.startswith("layers.0") for one in first) == (name == "albert")


def test_names_do_not_matter(small: Path, tmp_path: Path) -> None:
    same_parts(check(anonymous(small, tmp_path / "a.onnx")), small)


def test_dynamo_exports(tmp_path: Path) -> None:
    check(quantise(export(make_bert(), tmp_path / "m.onnx", dynamo=True), tmp_path / "q.onnx", per_channel=True))


def test_products_of_two_activations_may_be_of_integers_too(plain: Path, small: Path, tmp_path: Path) -> None:
    everything = {"per_channel": True, "extra_options": {"MatMulConstBOnly": False}}
    path = quantise(plain, tmp_path / "q.onnx", **everything)
    assert sum(node.op_type == "MatMulInteger" for node in onnx.load(str(path)).graph.node) == 6 + 2
    same_parts(check(path), small)


def same_parts(model: ftbert.Model, path: Path) -> None:
    for got, expected in zip(parts(model.checkpoint), parts(open_checkpoint(path)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("level", ["ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED"])
def test_what_onnxruntime_fuses_of_integer_products(level: str, small: Path, tmp_path: Path) -> None:
    options = runtime.SessionOptions()
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "o.onnx"), 4
    others = ["SkipLayerNormFusion", "BiasGeluFusion", "GeluFusionL1", "GeluFusionL2", "MatMulScaleFusion"]
    runtime.InferenceSession(str(small), options, providers=["CPUExecutionProvider"], disabled_optimizers=others)
    kinds = {node.op_type for node in onnx.load(str(tmp_path / "o.onnx")).graph.node}
    fused = {"MatMulIntegerToFloat", "DynamicQuantizeMatMul"}
    assert kinds & (fused | {"MatMulInteger"}) == (fused if level == "ORT_ENABLE_EXTENDED" else {"MatMulInteger"})
    same_parts(check(tmp_path / "o.onnx"), small)


@pytest.mark.parametrize("how", [WAYS[0], WAYS[2], WAYS[6]])
def test_real_file(how: dict[str, Any], real_onnx: Path, tmp_path: Path) -> None:
    path = quantise(real_onnx, tmp_path / "q.onnx", **how)
    model = check(path)
    expect_stored(model, path)
    expect_int8(model.checkpoint, path)


def test_convert_keeps_the_integers(small: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(small)
    assert plain.in_int8 is not None
    expected, whole = plain.in_int8(), open_checkpoint(convert(small, tmp_path / "whole"))
    assert whole.config.encoder == expected.config.encoder and whole.config.encoder.has_8_bits
    for (name, got), (other, one) in zip(sorted(whole.stored_items()), sorted(expected.stored_items()), strict=True):
        assert name == other and got.dtype == one.dtype and torch.equal(got, one)
    floats = open_checkpoint(convert(small, tmp_path / "floats", dtype=torch.float32))
    assert floats.config.encoder == plain.config.encoder and not floats.config.encoder.has_8_bits
    assert all(torch.equal(floats.read(name), plain.read(name)) for name in plain.tensors)


@pytest.mark.skipif(build_info()["cpu_int8"] == "none", reason="this CPU has no instructions for int8")
def test_load_multiplies_by_the_integers(small: Path, tmp_path: Path) -> None:
    """Nearer to the products of floats than onnxruntime is, whose range of what is multiplied is a whole batch's."""
    exact, model = ftbert.load(small), ftbert.load(small, dtype="int8")
    assert (exact.dtype, model.dtype) == (torch.float32, torch.int8) and model.config.eight_bits == "int8"
    ids, mask = ragged(model.config.vocab, model.config.padding_id)
    expected, got = (one(ids, attention_mask=mask).last_hidden_state for one in (exact, model))
    theirs = onnxruntime_hidden(small, ids, mask)
    assert 0 < (got - expected).norm() < (theirs * mask[..., None] - expected).norm()
    for again in (ftbert.load(small, dtype="auto"), ftbert.load(convert(small, tmp_path / "whole"), dtype="int8")):
        assert torch.equal(again(ids, attention_mask=mask).last_hidden_state, got)


def test_auto_is_float32_where_int8_does_not_run(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "build_info", lambda: build_info() | {"cpu_int8": "none"})
    assert ftbert.load(small, dtype="auto").dtype == torch.float32
    with pytest.raises(ValueError, match="int8: this CPU has no instructions"):
        ftbert.load(small, dtype="int8")


def test_a_matrix_with_few_columns_stays_as_floats(tmp_path: Path) -> None:
    path = export(make_bert(num_hidden_layers=1, intermediate_size=8), tmp_path / "m.onnx", dynamo=False)
    plain = open_checkpoint(quantise(path, tmp_path / "q.onnx", per_channel=True))
    assert plain.in_int8 is not None
    layer = plain.in_int8().config.encoder.layers[0]
    assert (layer.attention.qkv_type, layer.ffn.up_type, layer.ffn.down_type) == ("int8", "int8", "model")


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["LoRA not merged", "scale", "mask unused"])
def test_nearly_bert_is_refused(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of plain graphs: rounding what is multiplied is left out of the comparison."""
    path = export_nearly_bert(variant, tmp_path / "m.onnx", monkeypatch)
    with pytest.raises(ValueError, match=r"q\.onnx: (its graph c|its input 'att|no BERT-family encoder)"):
        ftbert.load(quantise(path, tmp_path / "q.onnx"))


def test_the_graph_is_compared_as_it_is_written_too(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_check, "_NEAR", 1.01)
    with pytest.raises(ValueError, match=r"q\.onnx: its graph in 8 bits is far from its weights in floats: .*cosine is "):
        ftbert.load(small)


def _product(graph: Any) -> Any:
    return next(node for node in graph.node if node.op_type == "MatMulInteger")


def _constant(graph: Any, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    one = next(one for one in graph.initializer if one.name == name)
    one.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(one)), name))


def _scale(graph: Any) -> str:
    return str(_product(graph).input[1].removesuffix("_quantized") + "_scale")


def _scale_with(value: float) -> Callable[[Any], None]:
    return lambda graph: _constant(graph, _scale(graph), lambda old: np.where(np.arange(old.size) == 3, np.float32(value), old))


def _computed_scale(graph: Any) -> None:
    name = _scale(graph)
    for node in graph.node:
        node.input[:] = ["computed" if one == name else one for one in node.input]
    graph.node.insert(0, helper.make_node("Abs", [name], ["computed"]))


def _scale_that_fits_nothing(graph: Any) -> None:
    _constant(graph, _scale(graph), lambda old: old[:-1])


def _no_cast(graph: Any) -> None:
    result = _product(graph).output[0]
    next(node for node in graph.node if result in node.input).op_type = "Neg"


def _twice_the_scale(graph: Any) -> None:
    """Of the operand, and none of the weights."""
    name = _scale(graph)
    node = next(node for node in graph.node if name in node.input)
    node.input[list(node.input).index(name)] = next(one for one in node.input if one != name)


def _other_zero_point(graph: Any) -> None:
    """Of what is multiplied: not that by which DynamicQuantizeLinear has moved it."""
    graph.initializer.append(numpy_helper.from_array(np.array(7, np.uint8), "seven"))
    _product(graph).input[2] = "seven"


def _zero_points_that_fit_nothing(graph: Any) -> None:
    _constant(graph, _product(graph).input[3], lambda old: old[:5])


def _weights_of_16_bits(graph: Any) -> None:
    _constant(graph, _product(graph).input[1], lambda old: old.astype(np.int32))


def _renamed(kind: str) -> Callable[[Any], None]:
    def change(graph: Any) -> None:
        _product(graph).op_type = kind

    return change


_REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "NaN scale": (_scale_with(np.nan), "DequantizeLinear '.*_scale: scales are finite and above 0"),
    "infinite scale": (_scale_with(np.inf), "DequantizeLinear '.*_scale: scales are finite and above 0"),
    "scale of 0": (_scale_with(0), "DequantizeLinear '.*_scale: scales are finite and above 0"),
    "computed scale": (_computed_scale, "MatMulInteger '.*query.*the scale or the zero point of .* is no constant"),
    "short scale": (_scale_that_fits_nothing, r"DequantizeLinear '.*_scale is \[63\], and .* \[64, 64\]"),
    "no cast": (_no_cast, "MatMulInteger '.*query.*: its result goes to Neg, expected Cast"),
    "scale of the weights absent": (_twice_the_scale, "MatMulInteger '.*query.*is no constant"),
    "other zero point": (_other_zero_point, "MatMulInteger '.*query.*made by DynamicQuantizeLinear"),
    "short zero points": (_zero_points_that_fit_nothing, r"DequantizeLinear '.*_zero_point is \[5\], and .* \[64, 64\]"),
    "int32": (_weights_of_16_bits, "DequantizeLinear '.*expected uint8 or int8, its zero point of the same type"),
    "QAttention": (_renamed("QAttention"), "quantised with .*QAttention.*give the plain export, or what onnxruntime"),
    "QLinearMatMul": (_renamed("QLinearMatMul"), "quantised with .*QLinearMatMul"),
    "MatMulNBits": (_renamed("MatMulNBits"), "quantised with .*MatMulNBits"),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_what_is_not_as_it_should_be_is_refused_by_name(what: str, small: Path, tmp_path: Path) -> None:
    model = onnx.load(str(small))
    change, said = _REFUSED[what]
    change(model.graph)
    onnx.save(model, str(tmp_path / "broken.onnx"))
    with pytest.raises(ValueError, match=f"(?s)broken.onnx: .*{said}"):
        ftbert.load(tmp_path / "broken.onnx")


def test_truncated_files_and_noise_are_refused(small: Path, tmp_path: Path) -> None:
    data, path, rng = small.read_bytes(), tmp_path / "broken.onnx", random.Random(0)
    for size in [len(data) - 1, *(rng.randrange(len(data)) for _ in range(40))]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"broken\.onnx"):
            onnx_source.open_onnx(path)
