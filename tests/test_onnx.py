"""ONNX files: real, exported here by both of torch's exporters, and broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import make_bert
from families import make_model
from onnx_models import MODELS, anonymous, export, export_nearly_bert, onnxruntime_hidden, ragged, same_weights

import ftbert
from ftbert.checkpoint import ModelConfig
from ftbert.converters import convert
from ftbert.files.embed import _model_identity

onnx = pytest.importorskip("onnx")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
EXPORTERS = {"torchscript": False, "dynamo": True}


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small export that the tests of bad input break."""
    return export(make_bert(num_hidden_layers=1), tmp_path_factory.mktemp("small") / "m.onnx", dynamo=False)


def check(path: Path, limit: float = 2e-5) -> ftbert.Model:
    """Against onnxruntime on the file, and against the transformers model built from what was read."""
    model = ftbert.load(path)
    ids, mask = ragged(model.config.vocab, model.config.padding_id)
    kept = mask.bool()
    got = model(ids, attention_mask=mask).last_hidden_state[kept]
    assert_close(got, onnxruntime_hidden(path, ids, mask)[kept], atol=limit, what="against onnxruntime")
    with torch.no_grad():
        theirs = model.reference()(input_ids=ids, attention_mask=mask).last_hidden_state
    assert_close(got, theirs[kept], atol=limit, what="against transformers")
    return model


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("modernbert", "its positions are rotary"), ("roformer", "its positions are rotary"),
        ("t5", "biases by distance"), ("umt5", "biases by distance"), ("alibi_bert", "biases by distance"),
        ("deberta", "products with a table of positions"), ("deberta-v2", "products with a table of positions"),
        ("esm", "scaled by the share of masked tokens"),
    ],
)  # fmt: skip
def test_families_that_no_graph_is_read_of(family: str, reason: str, small: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(small.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ValueError, match=f"'{family}' is read from its own weights, not from an ONNX graph: .*{reason}"):
        ftbert.load(tmp_path)


@pytest.mark.parametrize("family", ["t5", "deberta-v2", "esm", "modernbert"])
def test_graphs_of_such_families_are_refused_without_a_config(family: str, tmp_path: Path) -> None:
    """By what the graph has; nothing is read of it that would compute something else."""
    path = export(make_model(family, "encoder", 0), tmp_path / "m.onnx", dynamo=False, attention="eager")
    with pytest.raises(ValueError, match="m.onnx: no BERT-family encoder that ftbert can read"):
        ftbert.load(path)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("family", ["clip_text_model", "siglip_text_model"])
def test_texts_of_clip_and_siglip(family: str, exporter: str, tmp_path: Path) -> None:
    """Whether each token sees those before it alone is in the config, its own or that of both towers."""
    reference = make_model(family, "encoder", 1)
    path = export(reference, tmp_path / "model.onnx", dynamo=EXPORTERS[exporter])
    reference.config.save_pretrained(tmp_path)
    model = check(path)
    same_weights(model, reference)
    assert model.checkpoint.config.architecture == family
    towers = {"model_type": family.partition("_")[0], "text_config": reference.config.to_dict(), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(towers))
    same_weights(ftbert.load(path), reference)
    (tmp_path / "config.json").unlink()
    if family == "clip_text_model":
        with pytest.raises(ValueError, match="its graph computes something else than the encoder"):
            ftbert.load(path)
    else:  # layers as Megatron-BERT's
        same_weights(ftbert.load(path), reference)


def test_real_file(real_onnx: Path, tmp_path: Path) -> None:
    model = check(real_onnx)
    config = model.config
    norm = {"eps": 1e-12}
    assert config == ModelConfig.from_json({
        "vocab": 30522, "hidden": 384, "embedding": 384, "positions": {"kind": "absolute", "rows": 512}, "token_types": 2,
        "embedding_norm": norm, "pooler": config.pooler,
        "layer": {
            "attention": {"heads": 12, "head_size": 32}, "attention_norm": norm,
            "ffn": {"inter": 1536, "activation": "gelu"}, "ffn_norm": norm,
        },
        "layers": [{"repeat": 3}],
    })  # fmt: skip
    same_weights(ftbert.load(anonymous(real_onnx, tmp_path / "a.onnx")), real_onnx)


def test_the_current_folder_runs_nothing(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is evaluated in a child, whose modules come from where ours came from."""
    for name in ("pathlib", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    ftbert.load(small)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, exporter: str, tmp_path: Path) -> None:
    reference = MODELS[name]()
    path = export(reference, tmp_path / "m.onnx", dynamo=EXPORTERS[exporter], pooler=name == "rembert")
    model = check(path)
    same_weights(model, reference)
    assert model.checkpoint.config.architecture == reference.config.model_type
    same_weights(ftbert.load(anonymous(path, tmp_path / "anonymous.onnx")), reference)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("how", [{"types": True}, {"attention": "eager"}, {"pooler": True}, {"opset": 14}, {"opset": 23}])
def test_ways_to_export(how: dict[str, Any], exporter: str, tmp_path: Path) -> None:
    dynamo = EXPORTERS[exporter]
    if (dynamo and how.get("opset") == 14) or (not dynamo and how.get("opset") == 23):
        pytest.skip("not an opset of this exporter")
    reference = make_bert(num_hidden_layers=1)
    model = check(export(reference, tmp_path / "m.onnx", dynamo=dynamo, **how))
    assert model.config.pooler == bool(how.get("pooler"))
    same_weights(model, reference)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_export_for_one_shape(exporter: str, tmp_path: Path) -> None:
    """Folded look-ups: what the file does not hold cannot come back, the rest must be right."""
    path = export(make_bert(), tmp_path / "m.onnx", dynamo=EXPORTERS[exporter], fixed=True)
    model = ftbert.load(path)
    ids, _ = ragged(120, 0, batch=2, seq=9)
    ids = ids.clamp_min(2)
    mask = torch.ones_like(ids)
    got = model(ids, attention_mask=mask).last_hidden_state
    assert_close(got, onnxruntime_hidden(path, ids, mask), atol=2e-5, what="against onnxruntime")


def test_folder_with_config_and_tokenizer(tiny_bert: Any, tmp_path: Path) -> None:
    folder = tiny_bert(tmp_path)
    model = ftbert.load(folder)
    expected = model.encode(["word1 word2", "a b c"])
    (folder / "onnx").mkdir()
    export(model.reference(), folder / "onnx" / "model.onnx", dynamo=False, pooler=True)
    (folder / "model.safetensors").unlink()
    for source in (folder, folder / "onnx" / "model.onnx"):
        again = ftbert.load(source)
        assert again.folder == folder and again.checkpoint.config.huggingface["architectures"] == ["BertModel"]
        assert abs(again.encode(["word1 word2", "a b c"]) - expected).max() < 1e-6
    # Finished work of `embed` is of these weights alone.
    before = _model_identity(again)
    data = bytearray((folder / "onnx" / "model.onnx").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "onnx" / "model.onnx").write_bytes(data)
    assert _model_identity(again) != before
    data[len(data) // 2] ^= 1
    (folder / "onnx" / "model.onnx").write_bytes(data)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "layer_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match=r"(?s)does not fit the graph.*heads: the config says 4, the graph 2.*eps"):
        ftbert.load(folder)


def test_convert(small: Path, tmp_path: Path) -> None:
    target = convert(small, tmp_path / "out")
    assert {one.name for one in target.iterdir()} == {"config.json", "model.safetensors"}
    same_weights(ftbert.load(target), small)


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_without_the_onnx_package(small: Path, tiny_bert: Any, tmp_path: Path) -> None:
    """It is asked for by an .onnx file alone, with what to type."""
    (tmp_path / "onnx.py").write_text("raise ImportError('not installed')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "import ftbert\n"
        "model = ftbert.load(sys.argv[1]); model.encode(['word1']); assert 'onnx' not in sys.modules\n"
        "try: ftbert.load(sys.argv[2])\n"
        "except ImportError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tiny_bert(tmp_path)), str(small), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "m.onnx: an ONNX file needs the package onnx. Type: pip install onnx, or install ftbert[onnx]" in done.stdout


def test_without_onnxruntime(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnx.reference evaluates instead, and sees the same."""
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not installed')")
    wrong = export_nearly_bert("ALiBi", tmp_path / "m.onnx", monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    same_weights(ftbert.load(small), small)
    with pytest.raises(ValueError, match="computes something else"):
        ftbert.load(wrong)


def test_half_precision_is_held_to_the_same_limit(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(source: Path) -> Path:
        model = onnx.load(str(source))
        for one in model.graph.initializer:
            if one.data_type == onnx.TensorProto.FLOAT:
                one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one).astype("float16"), one.name))
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                    attribute.i = onnx.TensorProto.FLOAT16
                if attribute.type == attribute.TENSOR and attribute.t.data_type == onnx.TensorProto.FLOAT:
                    value = numpy_helper.to_array(attribute.t).astype("float32").clip(-65504, 65504)
                    attribute.t.CopyFrom(numpy_helper.from_array(value.astype("float16")))
        for value in model.graph.output:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
        del model.graph.value_info[:]
        onnx.save(model, str(tmp_path / "half.onnx"))
        return tmp_path / "half.onnx"

    model = ftbert.load(half(small))
    assert model.checkpoint.stored_dtype == torch.float16
    with pytest.raises(ValueError, match="computes something else"):
        ftbert.load(half(export_nearly_bert("ALiBi", tmp_path / "m.onnx", monkeypatch)))
