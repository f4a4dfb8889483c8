"""GLiNER: `optimize` of the package's models, and their folders by `load`, against the package itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Place, has_bf16
from fake_hub import Hub
from gliner_models import LABELS, SHAPES, TEXTS, make_gliner

import ftbert
from ftbert.converters import convert
from ftbert.quantization import quantize

pytestmark = pytest.mark.filterwarnings("ignore:Sentence of length", "ignore:texts of more than")
EACH = [LABELS, LABELS[:1], ["world", "two spaces", "a"], LABELS, LABELS, ["b"], LABELS[2:]]


def entities(model: Any, threshold: float, labels: Any = LABELS, **how: Any) -> Any:
    return model.inference(TEXTS, labels, threshold=threshold, batch_size=3, **how)


def thresholds(model: Any) -> list[float]:
    """That leave some entities and none of which is near a score, so that rounding does not decide."""
    scores = sorted(one["score"] for text in entities(model, 0.0, multi_label=True, flat_ner=False) for one in text)
    assert len(scores) > 10
    gaps = [(after - before, (before + after) / 2) for before, after in zip(scores, scores[1:], strict=False)]
    middle = gaps[len(gaps) // 2 :]
    return [max(gaps)[1], max(middle)[1]]


def assert_same(got: Any, want: Any, allowed: float) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        bare = [[{key: one[key] for key in one if key != "score"} for one in text] for text in (ours, theirs)]
        assert bare[0] == bare[1]
        assert [one["score"] for one in ours] == pytest.approx([one["score"] for one in theirs], abs=allowed)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_folder_finds_what_the_package_finds(device: str, shape: str, tmp_path: Path) -> None:
    reference = make_gliner(tmp_path / "m", shape)
    model = ftbert.load(tmp_path / "m", device=device)
    for threshold in thresholds(reference):
        for how in ({}, {"flat_ner": False}, {"multi_label": True}):
            want = entities(reference, threshold, **how)
            assert any(want)
            got = model.predict_entities(TEXTS, LABELS, threshold=threshold, **how)
            assert_same(got, want, 1e-5 if device == "cpu" else 1e-4)
    # Batches and their neighbours change nothing, nor do labels of each text's own.
    alone = [model.predict_entities(text, LABELS, threshold=threshold) for text in TEXTS]
    assert_same(model.predict_entities(TEXTS, LABELS, threshold=threshold, max_tokens=50), alone, 1e-6)
    want = entities(reference, threshold, labels=EACH)
    assert_same(model.predict_entities(TEXTS, EACH, threshold=threshold), want, 1e-5 if device == "cpu" else 1e-4)


def test_windows_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gliner(tmp_path / "m", "token")
    model = ftbert.load(tmp_path / "m")
    want = model.predict_entities(TEXTS, EACH, threshold=0.2)
    assert any(want)
    monkeypatch.setattr("ftbert.text.entities._WINDOW", 2)
    assert_same(model.predict_entities(TEXTS, EACH, threshold=0.2), want, 1e-6)


@has_bf16
def test_in_sixteen_bits(place: Place, tmp_path: Path) -> None:
    """Probabilities of all runs of words, each label's."""
    make_gliner(tmp_path / "m", "no lstm")
    dtype = torch.bfloat16 if place.device == "cpu" else place.dtype
    every = {"threshold": 0.0, "flat_ner": False, "multi_label": True}
    exact, rounded = (
        [one for text in model.predict_entities(TEXTS, LABELS, **every) for one in text]
        for model in (ftbert.load(tmp_path / "m"), ftbert.load(tmp_path / "m", device=place.device, dtype=dtype))
    )
    places = [{(one["start"], one["end"], one["label"]): one["score"] for one in found} for found in (exact, rounded)]
    apart = [abs(score - places[1].get(key, 0.0)) for key, score in places[0].items()]
    assert len(apart) > 100
    assert sum(apart) / len(apart) < 2.0**-5


@pytest.mark.parametrize("shape", ["span", "token", "two encoders"])
def test_optimize(device: str, shape: str, tmp_path: Path) -> None:
    """The encoder, or both, of a live model; every call is computed."""
    model = make_gliner(tmp_path / "m", shape).to(device)
    limits = thresholds(model)
    want = [entities(model, threshold) for threshold in limits]
    assert ftbert.optimize(model) is model
    layer = model.model.token_rep_layer
    encoders = [layer.bert_layer.model, *([layer.labels_encoder.model] if shape == "two encoders" else [])]
    for threshold, expected in zip(limits, want, strict=True):
        assert_same(entities(model, threshold), expected, 1e-5 if device == "cpu" else 1e-4)
    assert all(encoder.forward.fallbacks == {} for encoder in encoders)


def test_what_the_older_folders_lack(tmp_path: Path) -> None:
    """A tokenizer and a config of the encoder: both are those of model_name."""
    reference = make_gliner(tmp_path / "m", "span")
    for path in (tmp_path / "m").glob("tokenizer*"):
        path.unlink()
    path = tmp_path / "m" / "gliner_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(said | {"encoder_config": None, "model_type": "gliner"}), encoding="utf-8")
    threshold = thresholds(reference)[1]
    want = entities(reference, threshold)
    assert_same(ftbert.load(tmp_path / "m").predict_entities(TEXTS, LABELS, threshold=threshold), want, 1e-5)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"labels_encoder": "x"}, "labels have an encoder of their own"),
        ({"labels_decoder": "gpt2"}, "a decoder writes the labels"),
        ({"relations_layer": "biaffine"}, "relations are scored too"),
        ({"span_mode": "conv_share"}, r"span_mode 'conv_share' is not supported \(only 'marker' or 'markerV0'"),
        ({"post_fusion_schema": "l2l-l2t"}, "attend to each other"),
        ({"fuse_layers": True}, "all layers are joined"),
        ({"subtoken_pooling": "mean"}, "a word is not its first token"),
        ({"words_splitter_type": "spacy"}, "cut by another package"),
        ({"model_type": "gliner_streaming_span"}, "another kind"),
        ({"max_width": 0}, "max_width 0: expected at least 1"),
        ({"hidden_size": 40}, "missing token_rep_layer.projection|the config asks for"),
        ({"num_rnn_layers": 2}, "missing rnn.lstm.bias_hh_l1|missing rnn.lstm"),
        ({"num_rnn_layers": 0}, "extra rnn.lstm"),
        ({"model_name": "nowhere", "encoder_config": None}, "nowhere"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    entry: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_gliner(tmp_path / "m", "span")
    path = tmp_path / "m" / "gliner_config.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(said | entry), encoding="utf-8")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        ftbert.load(tmp_path / "m")


def test_errors_name_what_is_wrong(tmp_path: Path, tiny_bert: Callable[..., Path]) -> None:
    make_gliner(tmp_path / "m", "no lstm")
    model = ftbert.load(tmp_path / "m")
    assert model.info()["heads"] == "entities by labels"
    with pytest.raises(ValueError, match="a GLiNER is not quantized by calibration"):
        quantize(tmp_path / "m", tmp_path / "int8", dtype="int8")
    with pytest.raises(ValueError, match="load the folder itself"):
        convert(tmp_path / "m", tmp_path / "converted")
    with pytest.raises(ValueError, match="gliner_config.json"):
        ftbert.load(tiny_bert(tmp_path / "bert")).predict_entities("x", ["y"])
    for labels in ([], [""], [1], [["a"], ["b"]], [["a"], "b"]):
        with pytest.raises(ValueError, match="labels: expected"):
            model.predict_entities("x", labels)
    with pytest.raises(TypeError, match="descriptions of labels"):
        model.predict_entities("x", {"a": "b"})
    with pytest.raises(ValueError, match="threshold must be a number from 0 to 1; got 2"):
        model.predict_entities("x", ["a"], threshold=2)
    with pytest.raises(ValueError, match="max_tokens must be a positive integer; got 0"):
        model.predict_entities("x", ["a"], max_tokens=0)
    with pytest.raises(TypeError, match=r"texts\[1\] must be a str"):
        model.predict_entities(["x", None], ["a"])
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="more than 20 words"):
        warnings.simplefilter("error")
        model.predict_entities("a " * 21, ["a"])


def test_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repository without config.json, whose tokenizer and encoder's config are in that of model_name; what is not
    computed is refused before weights are fetched."""
    reference, hub = make_gliner(tmp_path / "m", "no lstm"), Hub(monkeypatch, tmp_path)
    threshold = thresholds(reference)[1]
    want = entities(reference, threshold)
    said = json.loads((tmp_path / "m" / "gliner_config.json").read_text(encoding="utf-8"))
    said |= {"encoder_config": None, "model_name": "someone/backbone"}
    (hub.home / "gliner_config.json").write_text(json.dumps(said), encoding="utf-8")
    for path in [tmp_path / "m" / "pytorch_model.bin", *(tmp_path / "backbone").iterdir()]:
        (hub.home / path.name).write_bytes(path.read_bytes())
    (hub.home / "gliner_config.json").write_text(json.dumps(said | {"labels_decoder": "gpt2"}), encoding="utf-8")
    with pytest.raises(ValueError, match="someone/entities: labels_decoder 'gpt2' is not supported"):
        ftbert.load("someone/entities")
    assert not any("pytorch_model.bin" in brought for _, brought in hub.downloads)
    (hub.snapshot / "gliner_config.json").unlink()
    (hub.home / "gliner_config.json").write_text(json.dumps(said), encoding="utf-8")
    assert_same(ftbert.load("someone/entities").predict_entities(TEXTS, LABELS, threshold=threshold), want, 1e-5)
