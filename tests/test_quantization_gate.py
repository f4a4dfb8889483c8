"""What quantization leaves as it is: outliers are found, a model that stays too far from float32 is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PLACES, Place
from safetensors.torch import load_file, save_file

import ftbert
from ftbert import cli
from ftbert.converters import build_reference, open_checkpoint
from ftbert.evaluation import SAMPLE_TEXTS
from ftbert.quantization import altered, calibration_texts, quantize, stored_type
from ftbert.quantization.vectors import TextVectors
from ftbert.text import TextSettings, Tokenizer

FAR = 3e6  # an entry beside which E4M3 keeps nothing of those near 1, nor a byte
KINDS = ("fp8", "int8")
OPPOSITE = torch.tensor([0.25, -0.25])
UP, DOWN = "encoder.layer.0.intermediate.dense", "encoder.layer.0.output.dense"


@pytest.fixture
def plant(tmp_path: Path, tiny_bert: Any) -> Callable[..., Path]:
    """plant("down", "up") -> a random BERT, in whose first layer these products read two entries far off, of which
    columns of opposite sign make nothing in float32; zeros would, which smoothing takes for no column at all."""

    def make(*products: str, **config: Any) -> Path:
        folder = Path(tiny_bert(tmp_path, **config))
        weights = load_file(folder / "model.safetensors")
        for one in (UP, DOWN):
            weights[f"{one}.weight"] *= 10  # so that the block counts beside the stream
        if "down" in products:
            weights[f"{UP}.bias"][3:5], weights[f"{DOWN}.weight"][:, 3:5] = FAR, OPPOSITE
            weights[f"{UP}.weight"][3:5] = 0
        if "up" in products:
            norm = "encoder.layer.0.attention.output.LayerNorm"
            weights[f"{norm}.weight"][5:7], weights[f"{norm}.bias"][5:7] = 0, FAR
            weights[f"{UP}.weight"][:, 5:7], weights[f"{DOWN}.bias"][5:7] = OPPOSITE, -FAR  # out of the stream again
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_is_left_out_and_nothing_else(plant: Any, tmp_path: Path, kind: str) -> None:
    result, asked = quantize(plant("down"), tmp_path / "fp8", dtype=kind), stored_type(kind).limits.asked
    assert list(result.kept) == ["layers.0.ffn.down.weight"] and result.matrices == 7
    assert result.kept["layers.0.ffn.down.weight"].startswith("calibration: mean cosine 0.")
    assert result.mean_cosine >= asked.mean and result.worst_cosine >= asked.worst
    stored, told = load_file(tmp_path / "fp8" / "model.safetensors"), open_checkpoint(tmp_path / "fp8").config.quantized
    assert stored["layers.0.ffn.down.weight"].dtype == torch.float32
    assert told["kept"] == result.kept and told["mean_cosine"] == result.mean_cosine


@pytest.mark.parametrize(("kind", "asked"), [("fp8", "0.9973 and 0.991"), ("int8", "0.9991 and 0.9955")])
def test_a_model_that_loses_too_much_is_refused_unless_that_is_asked_for(
    plant: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, asked: str
) -> None:
    folder, target = plant("up", "down", num_hidden_layers=1, intermediate_size=512), tmp_path / "fp8"
    with pytest.raises(ValueError, match=rf"too far .* expected are {asked}\. .*--keep.*--any-loss"):
        quantize(folder, target, dtype=kind)
    assert not target.exists()
    assert cli.main(["quantize", str(folder), str(target), "--dtype", kind, "--any-loss", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kept"] == {} and told["matrices"] == 4 and told["mean_cosine"] < 0.99
    assert len(set(told["worst_texts"])) == 5 and all(0 <= i < told["texts"] for i in told["worst_texts"])
    kept = quantize(folder, target, dtype=kind, keep=["layers.0.ffn"], force=True)
    assert set(kept.kept.values()) == {"asked for"} and kept.mean_cosine >= stored_type(kind).limits.asked.mean


def test_the_same_texts_give_the_same_file(
    plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where sums over inputs of one matrix at a time are in memory."""
    folder, found = plant("down"), []
    for most in (2 << 30, 2 << 30, 1):
        monkeypatch.setitem(quantize.__wrapped__.__globals__, "_GRAM_BYTES", most)  # type: ignore[attr-defined]
        quantize(folder, tmp_path / "fp8", force=True)
        found.append([(tmp_path / "fp8" / name).read_bytes() for name in ("model.safetensors", "config.json")])
    assert found[0] == found[1] == found[2]


def test_texts_of_many_tokens_that_no_calibration_leaves_out(plant: Any, tmp_path: Path) -> None:
    result = quantize(plant(), tmp_path / "fp8", [" ".join(SAMPLE_TEXTS), "", " ".join(reversed(SAMPLE_TEXTS))] * 2)
    assert result.measured == result.texts and result.mean_cosine > 0.9973


def test_layers_that_share_weights(plant: Any, tmp_path: Path) -> None:
    from transformers import AlbertConfig, AlbertModel

    folder = plant()
    torch.manual_seed(0)
    AlbertModel(
        AlbertConfig(
            vocab_size=json.loads((folder / "config.json").read_text())["vocab_size"], embedding_size=32, hidden_size=64,
            num_hidden_layers=4, num_hidden_groups=2, num_attention_heads=2, intermediate_size=96,
        )
    ).save_pretrained(folder)  # fmt: skip
    result = quantize(folder, tmp_path / "fp8")
    layers = open_checkpoint(tmp_path / "fp8").config.encoder.layers
    assert result.matrices == 8 and [layer.weights_of for layer in layers] == [0, 0, 1, 1]
    assert all(layer.ffn.down_type == "e4m3" for layer in layers)


@pytest.mark.parametrize("pooling", ["cls", "max", "weightedmean"])
def test_measures_what_encode_gives(plant: Any, stated: Any, pooling: str) -> None:
    folder = stated(plant(), pooling)
    checkpoint = open_checkpoint(folder)
    tokenizer = Tokenizer(folder, TextSettings.from_folder(folder), checkpoint.config.encoder.max_seq)
    vectors = TextVectors.of(build_reference(checkpoint, with_heads=False), checkpoint, tokenizer)
    texts = SAMPLE_TEXTS[:9]
    rows = [torch.from_numpy(row) for row in tokenizer.encode_batch(texts, tokenizer.settings.default_prompt, 100)]
    want = ftbert.load(folder).encode(texts, max_length=100)
    np.testing.assert_allclose(vectors(rows).numpy(), want, atol=2e-5)


@pytest.fixture
def stated() -> Callable[[Path, str], Path]:
    """A folder of sentence-transformers, whose prompt is not pooled."""

    def make(folder: Path, pooling: str) -> Path:
        names = {"cls": "cls", "max": "max", "weightedmean": "weightedmean"}
        modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
        listed = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
                  for i, (path, kind) in enumerate(modules)]  # fmt: skip
        (folder / "1_Pooling").mkdir()
        (folder / "modules.json").write_text(json.dumps(listed))
        said = {"pooling_mode": names[pooling], "include_prompt": False}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
        prompts = {"prompts": {"passage": "a b: "}, "default_prompt_name": "passage"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        return folder

    return make


def test_a_classifier_is_measured_by_its_first_token(plant: Any) -> None:
    from transformers import AutoConfig, BertForSequenceClassification

    folder = plant()
    BertForSequenceClassification(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    tokenizer = Tokenizer(folder, TextSettings.from_folder(folder), checkpoint.config.encoder.max_seq)
    assert TextVectors.of(torch.nn.Identity(), checkpoint, tokenizer).pooling == "cls"


def test_an_altered_model_is_itself_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    x, weight = torch.randn(2, 4), model[0].weight
    want = model(x)
    with pytest.raises(ZeroDivisionError), altered(model, {"0.weight": torch.zeros(4, 4)}, {"0": lambda x: x * 2}):
        assert torch.equal(model(x), model[0].bias.expand(2, 4))
        raise ZeroDivisionError
    assert torch.equal(model(x), want) and model[0].weight is weight


def test_weights_of_another_quantized_model_are_refused(plant: Any, tmp_path: Path, tiny_bert: Any) -> None:
    quantize(plant("down"), tmp_path / "one")
    (tmp_path / "other").mkdir()
    quantize(tiny_bert(tmp_path / "other", intermediate_size=112), tmp_path / "two")
    weights = tmp_path / "one" / "model.safetensors"
    weights.write_bytes((tmp_path / "two" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"(?s)model\.safetensors.*layers\.0\.ffn\.down"):
        ftbert.load(tmp_path / "one")


@pytest.mark.parametrize("place", [place for place in PLACES if place.device == "cuda"][:1], ids=str, indirect=True)
def test_calibrates_alike_on_a_gpu(place: Place, plant: Any, tmp_path: Path) -> None:
    folder = plant("down")
    here, there = (quantize(folder, tmp_path / kind, device=kind) for kind in ("cpu", "cuda"))
    assert here.kept.keys() == there.kept.keys() and here.mean_cosine == pytest.approx(there.mean_cosine, abs=2e-4)
    stored = [load_file(tmp_path / kind / "model.safetensors") for kind in ("cpu", "cuda")]
    for name, one in stored[0].items():
        other = stored[1][name]
        if name.endswith("weight.scale"):
            torch.testing.assert_close(one, other)
        if one.dtype == torch.float8_e4m3fn:  # where numbers lie between two of E4M3's, rounding may differ
            assert (one.float() != other.float()).float().mean() < 0.05
    assert torch.get_float32_matmul_precision() == "highest" and len(calibration_texts()) == here.texts
