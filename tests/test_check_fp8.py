"""What 8 bits cost: the gates by dtype, the errors behind each layer, heads, and which model is compared with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import randomise
from own_kernels import multiplies
from stub_model import Mirror
from tokenizers_offline import folder_of, sentence_folder

import ftbert
from ftbert import cli, evaluation
from ftbert._library import build_info
from ftbert.cli import command
from ftbert.converters import build_reference, open_checkpoint
from ftbert.dtypes import MATRIX_DTYPES, parse_dtype
from ftbert.evaluation import SAMPLE_TEXTS, bench, check, parity
from ftbert.evaluation.errors import Difference, LayerError, costliest, head_agreements
from ftbert.evaluation.gates import GATES
from ftbert.evaluation.reference_model import reference_of
from ftbert.quantization import quantize, stored_type

FP8, INT8 = torch.float8_e4m3fn, torch.int8


def turned(cosine: float, row: int | None = None) -> Any:
    """Turns every state, or those of one text, so that it has this cosine with what it was. It is a rotation: vectors
    that are pooled of such states have it too."""

    def spoil(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        even, odd, sine = hidden[..., 0::2], hidden[..., 1::2], math.sqrt(1 - cosine**2)
        made = torch.stack((cosine * even - sine * odd, sine * even + cosine * odd), -1).flatten(-2)
        if row is None:
            return made
        hidden[row] = made[row]
        return hidden

    return spoil


@pytest.fixture
def on_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random ids pass for texts."""
    monkeypatch.setattr(parity, "reads_texts", lambda model: True)


def test_every_dtype_has_a_gate() -> None:
    assert set(GATES) == set(MATRIX_DTYPES.values())


@pytest.mark.parametrize(
    ("dtype", "cosine", "row", "passed"),
    [
        (FP8, 0.9971, None, True), (FP8, 0.9969, None, False), (FP8, 0.991, 3, True), (FP8, 0.989, 3, False),
        (INT8, 0.9991, None, True), (INT8, 0.9989, None, False), (INT8, 0.9955, 3, True), (INT8, 0.9945, 3, False),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("on_texts")
def test_the_mean_and_the_worst_text_decide(dtype: torch.dtype, cosine: float, row: int | None, passed: bool) -> None:
    result = check(Mirror(turned(cosine, row), dtype))
    right, left, _ = result.masks
    assert right.passed == result.passed == passed and left.passed
    assert right.min_cosine == pytest.approx(cosine, abs=1e-5) and right.max_abs_diff > 1e-3
    assert right.lowest[0].cosine == right.min_cosine and (row is None or right.lowest[0].text.startswith("sequence 3, "))
    assert right.lowest[0].text in str(result) and ("way around" in str(result)) != passed
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["masks"][0]["max_abs_diff_allowed"] is None


@pytest.mark.parametrize(
    ("dtype", "cosine", "passed"), [(FP8, 0.951, True), (FP8, 0.949, False), (INT8, 0.9901, True), (INT8, 0.9899, False)]
)
def test_random_ids_may_err_more(dtype: torch.dtype, cosine: float, passed: bool) -> None:
    result = check(Mirror(turned(cosine), dtype))
    assert result.passed == passed
    assert passed or f"--dtype {'int8' if dtype == INT8 else 'fp8'} --keep layers." in result.way_around


def test_not_a_number_is_no_pass() -> None:
    result = check(Mirror(lambda hidden, mask: hidden * float("nan"), FP8))
    assert not result.passed and "FAILED" in str(result)


def test_errors_behind_each_layer() -> None:
    result = check(Mirror(turned(0.96), FP8))
    assert [layer.name for layer in result.layers] == ["embeddings", "layers.0", "layers.1"]
    for layer in result.layers:
        assert layer.relative_error == pytest.approx(math.sqrt(2 - 2 * 0.96), rel=1e-4)
        assert layer.mean_cosine == pytest.approx(0.96, abs=1e-5) == layer.min_cosine
    assert not check(Mirror()).layers  # nothing else asks for them


def test_a_difference_comes_in_pieces() -> None:
    got, want = torch.randn(2, 50, 16, generator=torch.Generator().manual_seed(0))
    whole, pieces = Difference(), Difference()
    whole.add(got, want)
    for start in range(0, 50, 7):
        pieces.add(got[start : start + 7], want[start : start + 7])
    assert whole.relative == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-5)
    assert pieces.relative == pytest.approx(whole.relative) and pieces.cosines == pytest.approx(whole.cosines)
    assert pieces.largest == whole.largest == pytest.approx(float((got - want).abs().max()))
    for one in (torch.full((1, 16), float("nan")), want[:1]):
        pieces.add(one, want[:1])
    assert math.isnan(pieces.largest) and math.isnan(pieces.min_cosine) and math.isnan(pieces.relative)


@pytest.mark.usefixtures("on_texts")
def test_the_way_around_names_the_layer_that_adds_most() -> None:
    def layers(*errors: float) -> list[LayerError]:
        return [LayerError(f"layers.{i - 1}", error, 1.0, 1.0) for i, error in enumerate(errors)]

    assert costliest(layers(0.0, 0.03, 0.05, 0.07)) == "layers.2"  # as squares add up
    assert costliest(layers(0.0, 0.06, 0.05, 0.07)) == "layers.0"
    assert costliest(layers(0.5)) == ""
    words = check(Mirror(turned(0.9), FP8)).way_around
    assert "ftbert quantize MODEL DST --dtype fp8 --keep layers." in words and "--dtype fp16 or bf16" in words
    assert not check(Mirror(turned(0.9))).way_around


def test_texts_come_in_batches() -> None:
    texts = [f"text {'word ' * (i % 7)}" for i in range(70)]
    result = check(Mirror(), texts=texts)
    assert result.passed and result.masks[0].tokens == sum(len(text.split()) + 2 for text in texts)


def test_vectors_of_texts_have_the_gate_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ftbert.load(sentence_folder(tmp_path / "a"))
    monkeypatch.setattr(type(model), "dtype", FP8)
    found = check(model)
    assert found.passed and found.texts is not None and found.texts.mean_cosine_allowed == 0.997
    assert len(found.texts.lowest) == 3 and all(low.text in str(found) for low in found.texts.lowest[:1])
    exact = model.encode

    def spoiled(texts: list[str], **more: Any) -> Any:
        vectors = exact(texts, **more)
        at = texts.index(SAMPLE_TEXTS[2])
        vectors[at] = turned(0.98)(torch.from_numpy(vectors[at]), None).numpy()
        return vectors

    monkeypatch.setattr(model, "encode", spoiled)
    result = check(model)
    assert all(mask.passed for mask in result.masks) and not result.passed and result.texts is not None
    assert result.texts.lowest[0].text == SAMPLE_TEXTS[2] and repr(SAMPLE_TEXTS[2]) in str(result)


@pytest.mark.parametrize(
    ("task", "labels", "each"), [("sequence_classification", 3, False), ("token_classification", 4, True), ("sequence_classification", 1, False)]
)  # fmt: skip
def test_what_heads_decide(tmp_path: Path, task: str, labels: int, each: bool) -> None:
    model = ftbert.load(folder_of(tmp_path / "a", task=task, labels=labels))
    reference = model.reference()
    sequences = [torch.arange(5, 5 + n) for n in range(1, 31)]
    with torch.inference_mode():
        (same,) = head_agreements(model, reference, sequences, 0.99)
        reference.classifier.weight.neg_(), reference.classifier.bias.neg_()
        (other,) = head_agreements(model, reference, sequences, 0.99)
    assert same.passed and same.decisions == same.agreed and same.max_abs_diff < 1e-3 < other.max_abs_diff
    assert same.decisions == (0 if labels == 1 else sum(map(len, sequences)) if each else len(sequences))
    assert other.passed == (labels == 1) and other.agreed < max(1, other.decisions / 2)
    assert task in str(other) and ("FAILED" in str(other)) == (labels > 1)


def quantized_model(folder: Path) -> Any:
    """As far as a reference is concerned, what `load` makes of a quantized folder."""
    opened = open_checkpoint(folder)
    return SimpleNamespace(
        checkpoint=opened, config=opened.config.encoder, folder=folder, heads=[],
        reference=lambda: build_reference(opened, with_heads=False),
    )  # fmt: skip


def test_a_quantized_folder_is_compared_with_the_model_it_was_made_from(tmp_path: Path, tiny_bert: Any) -> None:
    plain = tiny_bert(tmp_path)
    quantize(plain, tmp_path / "fp8", SAMPLE_TEXTS, keep=["layers.0"])
    model = quantized_model(tmp_path / "fp8")
    with pytest.raises(ValueError, match="is quantized and does not hold .* --against PLAIN"):
        reference_of(model)
    exact = build_reference(open_checkpoint(plain), with_heads=False).state_dict()
    for name, tensor in reference_of(model, plain).state_dict().items():
        assert torch.equal(tensor, exact[name]), name
    from transformers import AutoModel

    other = AutoModel.from_pretrained(plain)
    with pytest.raises(ValueError, match="is another model than .*: other weights"):
        reference_of(model, randomise(other, seed=7))
    with pytest.raises(ValueError, match="is another model than .*: other layers"):
        reference_of(model, tiny_bert(tmp_path / "more", num_hidden_layers=3))


def test_bench_runs_transformers_in_16_bits_beside_fp8() -> None:
    assert bench(Mirror(turned(0.98), FP8), batch=4, longest=16, rounds=2).dtype == "float8_e4m3fn"
    with pytest.raises(RuntimeError, match="ftbert differs from transformers in float32 by .* of its size"):
        bench(Mirror(turned(0.8), FP8), batch=4, longest=16, rounds=2)


def test_the_command_hands_on_texts_and_the_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def record(model: Any, **given: Any) -> Any:
        calls.append(given)
        return check(Mirror(turned(0.9), FP8))

    monkeypatch.setattr(command, "load_model", lambda options: None)
    monkeypatch.setattr(evaluation, "check", record)
    (tmp_path / "texts.txt").write_text("one\ntwo\n", encoding="utf-8")
    arguments = ["check", "model", "--dtype", "fp8", "--texts", str(tmp_path / "texts.txt"), "--against", "plain"]
    assert cli.main([*arguments, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert calls == [{"texts": ["one", "two"], "against": "plain"}]
    assert not told["passed"] and len(told["layers"]) == 3 and "--keep" in told["way_around"]
    assert cli.main(arguments) == 1
    assert "FAILED: last_hidden_state against transformers" in capsys.readouterr().out


def test_without_a_gpu_for_fp8_the_error_says_what_works(
    tmp_path: Path, tiny_bert: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", str(tiny_bert(tmp_path)), "--dtype", "fp8"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "ftbert: error: " in err and "fp8" in err and "bf16" in err


def computes(word: str, device: str) -> bool:
    """Whether this machine does there."""
    if device == "cpu":
        return word == "int8" and build_info()["cpu_int8"] != "none"
    return multiplies("e4m3" if word == "fp8" else word)


@pytest.mark.parametrize(("word", "device"), [("fp8", "cuda"), ("int8", "cuda"), ("int8", "cpu")])
def test_the_whole_way(
    minilm_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    word: str,
    device: str,
) -> None:
    if not computes(word, device):
        pytest.skip(f"{device} does not compute in {word} here")
    monkeypatch.setenv("FTBERT_CACHE", str(tmp_path / "cache"))
    there = ["--device", device, "--dtype", word]
    assert cli.main(["check", str(minilm_folder), *there, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dtype"] == str(parse_dtype(word)).removeprefix("torch.") and told["passed"] and len(told["layers"]) == 7
    assert 0 < told["layers"][-1]["relative_error"] < 0.2 and told["texts"]["mean_cosine"] < 0.9999
    quantize(minilm_folder, tmp_path / word, dtype=word)
    assert cli.main(["check", str(tmp_path / word), *there]) == 1
    assert "--against PLAIN" in capsys.readouterr().err
    assert cli.main(["check", str(tmp_path / word), "--device", device, "--against", str(minilm_folder)]) == 0
    assert "passed" in capsys.readouterr().out
    assert cli.main(["info", str(tmp_path / word), *there, "--json"]) == 0
    assert f" in {stored_type(word).word}" in json.loads(capsys.readouterr().out)["model"]["products"]
