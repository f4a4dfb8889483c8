"""ONNX files: real, exported here by both of torch's exporters, and broken."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from conftest import make_bert, randomise
from onnx_models import MODELS, anonymous, export, onnxruntime_hidden, ragged

import ftbert
from ftbert.checkpoint import open_checkpoint
from ftbert.converters import from_onnx
from ftbert.converters.onnx_file import read_onnx

EXPORTERS = {"torchscript": False, "dynamo": True}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def real_file() -> Path:
    path = os.environ.get("FTBERT_TEST_ONNX")
    if not path or not Path(path).is_file():
        pytest.skip("FTBERT_TEST_ONNX does not name the real paraphrase-MiniLM-L3-v2.onnx")
    return Path(path)


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


def same_weights(model: ftbert.Model, source: Any) -> None:
    """Bit for bit what the exported model had."""
    expected = open_checkpoint(source)
    for name in model.checkpoint.tensors:
        assert torch.equal(model.checkpoint.read(name), expected.read(name)), name


def test_real_file(real_file: Path) -> None:
    model = check(real_file)
    config = model.config
    assert (config.layers, config.heads, config.head_size, config.vocab) == (3, 12, 32, 30522)
    assert (config.layer_norm_eps, config.activation, config.positions) == (1e-12, "gelu", "absolute")


def test_real_file_without_names(real_file: Path, tmp_path: Path) -> None:
    same_weights(ftbert.load(anonymous(real_file, tmp_path / "a.onnx")), real_file)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, exporter: str, tmp_path: Path) -> None:
    reference = MODELS[name]()
    path = export(reference, tmp_path / "m.onnx", dynamo=EXPORTERS[exporter])
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
    reference = make_bert()
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


def test_head_is_left_out_with_a_word(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    reference = randomise(BertForSequenceClassification(BertConfig(**sizes, intermediate_size=96)))
    path = export(reference, tmp_path / "m.onnx", dynamo=False)
    with pytest.warns(UserWarning, match=r"m\.onnx: its task head is left out"):
        model = ftbert.load(path)
    assert model.config.pooler
    same_weights(model, reference.bert)


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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "layer_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match=r"(?s)does not fit the graph.*heads: the config says 4, the graph 2.*eps"):
        ftbert.load(folder)


def test_convert_by_script_and_command(small: Path, tmp_path: Path) -> None:
    for i, command in enumerate((["ftbert.converters.from_onnx"], ["ftbert", "convert"])):
        target = tmp_path / f"out{i}"
        subprocess.run([sys.executable, "-m", *command, str(small), str(target)], check=True, capture_output=True)
        assert {one.name for one in target.iterdir()} == {"config.json", "model.safetensors"}
        same_weights(ftbert.load(target), small)
    done = subprocess.run(
        [sys.executable, "-m", "ftbert.converters.from_onnx", str(tmp_path), str(tmp_path / "x")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "expected an .onnx file" in done.stderr and not (tmp_path / "x").exists()


# ---- what is refused -----------------------------------------------------------------------------------------------


class _Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def test_no_encoder_is_refused_with_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "conv.onnx"
    torch.onnx.export(_Convolution(), (torch.zeros(1, 3, 9, 9),), str(path), dynamo=False)
    with pytest.raises(ValueError, match=r"(?s)conv.onnx: no BERT-family encoder.*no embedding.*2 Conv, 1 Relu"):
        ftbert.load(path)


def test_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64)).eval()
    model.config.use_cache = False
    with pytest.raises(ValueError, match="no BERT-family encoder that ftbert can read"):
        ftbert.load(export(model, tmp_path / "gpt2.onnx", dynamo=False, attention="eager"))


def test_quantised_is_refused(small: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    quantization.quantize_dynamic(str(small), str(tmp_path / "q.onnx"))
    with pytest.raises(ValueError, match=r"q.onnx: .*it is quantised \(.*MatMulInteger.*export it in fp32"):
        ftbert.load(tmp_path / "q.onnx")


def test_missing_external_data_is_listed_at_once(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(str(export(make_bert(), tmp_path / "m.onnx", dynamo=False)))
    onnx.save(model, str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.bin", size_threshold=0)
    assert ftbert.load(tmp_path / "e.onnx").config.layers == 2
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


def test_reads_what_the_onnx_package_reads(small: Path) -> None:
    onnx = pytest.importorskip("onnx")
    theirs, ours = onnx.load(str(small)).graph, read_onnx(small)
    assert [(n.op_type, list(n.input), list(n.output)) for n in theirs.node] == [
        (n.type, n.inputs, n.outputs) for n in ours.nodes
    ]
    for tensor in theirs.initializer:
        expected = torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        assert torch.equal(ours.constants[tensor.name].read(), expected), tensor.name


def _outcome(path: Path) -> None:
    """A broken file opens, or is refused by name."""
    try:
        _, source, _ = from_onnx.open_onnx(path)
        for name in source.shapes():
            source.read(name)
    except ValueError as error:
        assert str(path) in str(error), error


def test_truncated_files_are_refused(small: Path, tmp_path: Path) -> None:
    data, path = small.read_bytes(), tmp_path / "cut.onnx"
    rng = random.Random(0)
    for length in [0, 1, 2, 3, 7, 100, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.onnx"):
            from_onnx.open_onnx(path)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_crash(small: Path, tmp_path: Path, seed: int) -> None:
    data, path = bytearray(small.read_bytes()), tmp_path / "flipped.onnx"
    # The weights are most of the bytes and cannot be told right from wrong: aim at the structure.
    weights = [one for one in read_onnx(small).constants.values() if one.bytes > 64]
    structure = [at for at in range(len(data)) if not any(one.start <= at < one.start + one.bytes for one in weights)]
    rng = random.Random(seed)
    for _ in range(100):
        broken = bytearray(data)
        for at in rng.sample(structure, rng.choice((1, 1, 1, 5, 50))):
            broken[at] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        _outcome(path)


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_refused(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "noise.onnx"
    for size in (1, 10, 1000, 100_000):
        path.write_bytes(random.Random(seed).randbytes(size))
        with pytest.raises(ValueError, match=r"noise\.onnx"):
            from_onnx.open_onnx(path)
