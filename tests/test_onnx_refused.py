"""ONNX files that are no encoder, hostile, broken or incomplete: each is refused by name."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_bert
from onnx_models import NEARLY_BERT, export, export_nearly_bert, same_weights

import ftbert
from ftbert.converters import onnx_source

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small export that the tests of bad input break."""
    return export(make_bert(num_hidden_layers=1), tmp_path_factory.mktemp("small") / "m.onnx", dynamo=False)


def test_no_encoder_is_refused_with_what_was_found(tmp_path: Path) -> None:
    path, layers = tmp_path / "conv.onnx", (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    torch.onnx.export(torch.nn.Sequential(*layers), (torch.zeros(1, 3, 9, 9),), str(path), dynamo=False)
    with pytest.raises(ValueError, match=r"(?s)conv.onnx: no BERT-family encoder.*no embedding.*2 Conv, 1 Relu"):
        ftbert.load(path)


def test_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()
    model.config.use_cache = False
    with pytest.raises(ValueError, match="no BERT-family encoder that ftbert can read"):
        ftbert.load(export(model, tmp_path / "gpt2.onnx", dynamo=False, attention="eager"))


def _nested_concats(graph: Any) -> None:
    """Each of six concatenates the one before 200 times."""
    reshape = next(node for node in graph.node if node.op_type == "Reshape" and "self" in node.name)
    name = reshape.input[1]
    at = next(i for i, node in enumerate(graph.node) if name in node.output) + 1
    for i in range(6):
        graph.node.insert(at + i, helper.make_node("Concat", [name] * 200, [f"c{i}"], axis=0))
        name = f"c{i}"
    reshape.input[1] = name


def _matrix_without_rows(graph: Any) -> None:
    one = next(one for one in graph.initializer if len(one.dims) == 2 and list(one.dims) == [64, 96])
    del one.dims[:]
    one.dims.extend([0, 1 << 29])
    one.ClearField("raw_data")


def _many_layers(graph: Any) -> None:
    """The last attention, and with it everything behind, many times over: nodes without weights of their own."""
    node = next(node for node in reversed(graph.node) if node.op_type == "MatMul" and "self" in node.name)
    for i in range(3000):
        graph.node.add().CopyFrom(node)
        graph.node[-1].output[0], graph.node[-1].name = f"n{i}", f"n{i}"


def _huge_expand(graph: Any) -> None:
    """A mask of 2^36 columns."""
    graph.initializer.append(numpy_helper.from_array(np.array([1 << 36]), "huge"))
    graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "zero"))
    graph.node.append(helper.make_node("Expand", ["zero", "huge"], ["expanded"]))
    graph.output.append(helper.make_tensor_value_info("expanded", 1, None))


@pytest.mark.parametrize("change", [_nested_concats, _matrix_without_rows, _many_layers, _huge_expand])
def test_small_files_neither_hang_nor_swell(small: Path, tmp_path: Path, change: Any) -> None:
    model = onnx.load(str(small))
    change(model.graph)
    onnx.save(model, str(tmp_path / "m.onnx"))
    code = (
        "import resource, sys, ftbert\n"
        "resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "try: ftbert.load(sys.argv[1])\n"
        "except ValueError as error: assert 'm.onnx' in str(error) and len(str(error)) < 10000, error\n"
        "else: raise SystemExit('loaded')"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.onnx")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])


def test_constants_are_folded(small: Path, tmp_path: Path) -> None:
    """A weight merged from LoRA's parts when the graph runs, and a shape put together from pieces."""
    model = onnx.load(str(small))
    graph = model.graph
    weight = next(one for one in graph.initializer if list(one.dims) == [64, 96])
    values = numpy_helper.to_array(weight)
    rng = np.random.default_rng(0)
    down, up = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 2), (2, 96)))
    named = {"rest": values - 0.5 * (down @ up), "down": down, "up": up, "half": np.array(0.5, np.float32)}
    name = weight.name
    graph.initializer.remove(weight)
    graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in named.items())
    nodes = [("MatMul", ["down", "up"], "product"), ("Mul", ["product", "half"], "scaled"), ("Add", ["rest", "scaled"], name)]
    for i, (kind, inputs, output) in enumerate(nodes):
        graph.node.insert(i, helper.make_node(kind, inputs, [output]))
    onnx.save(model, str(tmp_path / "m.onnx"))
    got, expected = ftbert.load(tmp_path / "m.onnx").checkpoint, ftbert.load(small).checkpoint
    for key in expected.tensors:
        torch.testing.assert_close(got.read(key), expected.read(key), atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", NEARLY_BERT)
def test_nearly_bert_is_refused(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads with the graph's numbers, or not at all."""
    path = export_nearly_bert(variant, tmp_path / "m.onnx", monkeypatch)
    with pytest.raises(ValueError, match=r"m\.onnx: (its graph c|its input 'att|no BERT-family encoder)") as refused:
        ftbert.load(path)
    if variant == "window of 60":
        assert re.search(r"differs by up to \d.*of its largest value, in a holed row of 128 columns", str(refused.value))


def _with_input(source: Path, target: Path, name: str, then: Any = None) -> Path:
    """The graph with an int64 input [batch, seq] more."""
    model = onnx.load(str(source))
    model.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "seq"]))
    if then is not None:
        then(model.graph)
    onnx.save(model, str(target))
    return target


def _without_mask(graph: Any) -> None:
    """As exporters leave it that saw a mask of ones: the input is there, and its shape alone is read."""
    named = numpy_helper.from_array(np.array([1], np.int64))
    nodes = [helper.make_node("Shape", ["attention_mask"], ["its shape"]),
             helper.make_node("ConstantOfShape", ["its shape"], ["ones"], value=named)]  # fmt: skip
    for node in graph.node:
        node.input[:] = ["ones" if name == "attention_mask" else name for name in node.input]
    for i, node in enumerate(nodes):
        graph.node.insert(i, node)


@pytest.mark.parametrize("how", ["unread", "its shape alone", "times 0", "dynamo"])
def test_a_mask_without_effect_is_refused_by_name(small: Path, tmp_path: Path, how: str) -> None:
    path = tmp_path / "m.onnx"
    if how == "dynamo":
        export(make_bert(num_hidden_layers=1), path, dynamo=True, mask=torch.ones_like)
    elif how == "times 0":
        export(make_bert(num_hidden_layers=1), path, dynamo=False, mask=lambda mask: mask * 0 + 1)
    elif how == "unread":
        export(make_bert(num_hidden_layers=1), path, dynamo=False, mask=lambda _: None)
        model = onnx.load(str(path))
        assert [one.name for one in model.graph.input] == ["input_ids"]  # this exporter drops what is not read
        with pytest.warns(UserWarning, match="takes no mask and attends to padding"):
            assert ftbert.load(path).config.depth == 1
        _with_input(path, path, "attention_mask")
    else:
        model = onnx.load(str(small))
        _without_mask(model.graph)
        onnx.save(model, str(path))
    with pytest.raises(ValueError, match=r"m\.onnx: its input 'attention_mask' has no effect"):
        ftbert.load(path)


@pytest.mark.parametrize("name", ["token_type_ids", "segment_ids", "position_ids", "extra"])
def test_another_input_without_effect_counts_as_absent(small: Path, tmp_path: Path, name: str) -> None:
    path = _with_input(small, tmp_path / "m.onnx", name)
    same_weights(ftbert.load(path), small)


def test_an_input_of_no_known_meaning_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    def second_mask(graph: Any) -> None:
        for node in graph.node:
            node.input[:] = ["both" if name == "attention_mask" else name for name in node.input]
        graph.node.insert(0, helper.make_node("Mul", ["attention_mask", "extra"], ["both"]))

    path = _with_input(small, tmp_path / "m.onnx", "extra", second_mask)
    with pytest.raises(ValueError, match=r"its input 'extra' changes the result, and is neither token ids nor"):
        ftbert.load(path)


def test_position_ids_that_are_used_are_refused(tmp_path: Path) -> None:
    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_bert(num_hidden_layers=1)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return self.model(input_ids, attention_mask, position_ids=position_ids)[0]

    ids = torch.randint(5, 90, (2, 9))
    names = ["input_ids", "attention_mask", "position_ids"]
    torch.onnx.export(
        Positions().eval(), (ids, torch.ones_like(ids), torch.arange(9).repeat(2, 1)), str(tmp_path / "m.onnx"),
        dynamo=False, input_names=names, dynamic_axes={name: {0: "batch", 1: "seq"} for name in names}, opset_version=17,
    )  # fmt: skip
    with pytest.raises(ValueError, match="position ids are an input of this model; export it without them"):
        ftbert.load(tmp_path / "m.onnx")


def test_missing_external_data_is_listed_at_once(tmp_path: Path) -> None:
    model = onnx.load(str(export(make_bert(), tmp_path / "m.onnx", dynamo=False)))
    onnx.save(model, str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.bin", size_threshold=0)
    assert ftbert.load(tmp_path / "e.onnx").config.depth == 2
    data = (tmp_path / "e.bin").read_bytes()
    (tmp_path / "e.bin").unlink()
    with pytest.raises(ValueError, match=r"(?s)e.onnx: constants cannot be read.*word_emb.*no such file.*position_emb"):
        ftbert.load(tmp_path / "e.onnx")
    (tmp_path / "e.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"(?s)constants cannot be read.*is it complete\?.*is it complete\?"):
        ftbert.load(tmp_path / "e.onnx")
    onnx.save(model, str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.bin", size_threshold=0)
    outside = (tmp_path / "e.onnx").read_bytes().replace(b"e.bin", b"../ee")
    (tmp_path / "e.onnx").write_bytes(outside)
    with pytest.raises(ValueError, match="outside the model's folder"):
        ftbert.load(tmp_path / "e.onnx")


def test_name_that_is_no_text(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small.read_bytes().replace(b"hidden", b"hid\xffen"))
    with pytest.raises(ValueError, match=r"m\.onnx: not a complete ONNX file \(a name in it is no text"):
        ftbert.load(path)


def test_truncated_files_and_noise_are_refused(small: Path, tmp_path: Path) -> None:
    data, path, rng = small.read_bytes(), tmp_path / "broken.onnx", random.Random(0)
    broken = [data[:n] for n in [0, 1, 2, 3, 7, 100, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))]]
    broken += [rng.randbytes(size) for size in (1, 10, 1000, 100_000) for _ in range(3)]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"broken\.onnx"):
            onnx_source.open_onnx(path)
