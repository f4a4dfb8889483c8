"""Calibration, and checkpoints whose matrices are in 8 bits: files written, calls refused, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ftbert
from ftbert import cli
from ftbert.checkpoint import WORD_TABLE
from ftbert.converters import build_reference, open_checkpoint, source_modules
from ftbert.evaluation import SAMPLE_TEXTS, sequences_of
from ftbert.quantization import (
    LARGEST,
    Observed,
    best_scale,
    calibration_texts,
    observe,
    quantize,
    quantize_rows,
    rounded,
    stored_type,
    to_e4m3,
)

KINDS = ("fp8", "int8")
MATRICES = ("attention.qkv", "attention.out", "ffn.up", "ffn.down")


def half_steps(stored: torch.Tensor) -> torch.Tensor:
    """Half the distance from each E4M3 number to the next larger one: 3 bits behind the first, 2^-9 near zero."""
    return 2.0 ** (stored.float().abs().clamp_min(2.0**-6).log2().floor() - 4)


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e30])
def test_rows_come_back_within_half_a_step(size: float) -> None:
    matrix = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None] * size
    stored, scale = quantize_rows(matrix)
    error = (stored.float() - matrix / scale[:, None]).abs()
    assert (error <= half_steps(stored) * (1 + 1e-5)).all()
    assert torch.equal(stored.float().abs().amax(1), torch.full((64,), LARGEST))


def test_rows_of_zeros_and_of_numbers_below_every_scale() -> None:
    matrix = torch.zeros(3, 16)
    matrix[1, 3], matrix[2] = 5.0, 1e-45
    stored, scale = quantize_rows(matrix)
    assert scale.isfinite().all() and (scale > 0).all() and stored.float().isfinite().all()
    assert not stored[0].float().any() and torch.equal(stored[1].float() * scale[1], matrix[1])


def test_past_the_largest_number_is_the_largest() -> None:
    values = torch.tensor([460.0, 1e30, -1e30, 448.0, 0.0])
    assert to_e4m3(values, torch.tensor(1.0)).float().tolist() == [448.0, 448.0, -448.0, 448.0, 0.0]
    assert torch.equal(rounded(values / 4, torch.tensor(0.25)), values.clamp(-448, 448) / 4)


@pytest.mark.parametrize("rows", [8, 400])
def test_columns_make_up_for_each_other(rows: int) -> None:
    """Also where there are fewer rows than columns, and columns that no row has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 24, generator=generator) @ torch.randn(24, 200, generator=generator) + 3.0
    x[:, 5] = 0
    matrix = torch.randn(32, 200, generator=generator)
    matrix[7] = 0
    losses = []
    for stored, scale in (quantize_rows(matrix), quantize_rows(matrix, x.T @ x)):
        assert stored.float().isfinite().all() and not stored[7].float().any()
        losses.append(float((x @ (stored.float() * scale[:, None] - matrix).T).square().sum()))
    assert losses[1] < 0.5 * losses[0]
    nearest, untold = quantize_rows(matrix), quantize_rows(matrix, torch.eye(200))
    assert torch.equal(nearest[0].float(), untold[0].float())  # columns that have nothing to do with each other
    assert quantize_rows(matrix, torch.zeros(200, 200))[0].float().isfinite().all()


def seen_on_texts(folder: Path) -> dict[str, Observed]:
    checkpoint = open_checkpoint(folder)
    modules = {ours: names[0] for ours, names in source_modules(checkpoint.config).items()}
    batches = [(row[None], torch.ones_like(row)[None]) for row in sequences_of(ftbert.load(folder), SAMPLE_TEXTS)]
    return observe(build_reference(checkpoint, with_heads=False), modules, batches)


@pytest.fixture
def folder(tmp_path: Path, tiny_bert: Any) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    return Path(tiny_bert(path))


def test_observes_kept_tokens_alone(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    model, modules = build_reference(checkpoint, with_heads=False), source_modules(checkpoint.config)
    first = {ours: names[0] for ours, names in modules.items()}
    ids = torch.randint(5, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    padded = observe(model, first, [(ids, mask)])
    alone = observe(model, first, [(ids[::2], mask[::2]), (ids[1:2, :7], mask[1:2, :7])])
    for name, seen in padded.items():
        assert seen.count == alone[name].count == 31
        assert seen.largest == pytest.approx(alone[name].largest, rel=1e-5)
        torch.testing.assert_close(seen.mean, alone[name].mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written(folder: Path, tmp_path: Path, kind: str) -> None:
    word = stored_type(kind).word
    result = quantize(folder, tmp_path / kind, SAMPLE_TEXTS, dtype=kind, keep=["layers.0.ffn.down"])
    exact, stored = open_checkpoint(folder), load_file(tmp_path / kind / "model.safetensors")
    read = open_checkpoint(tmp_path / kind)
    specs = {spec.name: spec for spec in read.config.encoder.weight_specs()}
    depth = read.config.encoder.depth
    assert result.matrices == 4 * depth - 1 and result.kept == {"layers.0.ffn.down.weight": "asked for"}
    assert result.dtype == word == read.config.encoder.eight_bits
    assert {name for name, spec in specs.items() if spec.stored == word} == {
        f"layers.{i}.{part}.weight" for i in range(depth) for part in MATRICES
    } - {"layers.0.ffn.down.weight"} | ({WORD_TABLE} if kind == "int8" else set())
    for name, spec in specs.items():
        assert list(stored[name].shape) == spec.shape
        if name.endswith((".scale", ".input.smooth")):
            assert stored[name].dtype == torch.float32 and (stored[name] > 0).all()
        elif spec.stored:
            assert stored[name].dtype == stored_type(kind).dtype
            assert torch.equal(read.read(name, stored[name].dtype).float(), stored[name].float())
        else:
            assert torch.equal(stored[name], exact.read(name, exact.stored_dtype))
    assert sorted(stored) == sorted(specs)


def stored_and_exact(folder: Path, target: Path) -> Iterator[tuple[str, Tensor, Tensor, dict[str, Tensor]]]:
    """Of each matrix: its name, what is stored, its numbers before, all tensors."""
    exact, stored = open_checkpoint(folder), load_file(target / "model.safetensors")
    for spec in open_checkpoint(target).config.encoder.weight_specs():
        if spec.matrix and spec.stored:
            yield spec.name, stored[spec.name], exact.read(spec.name), stored


def test_weights_in_fp8_lose_less_than_the_nearest_numbers(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "fp8", SAMPLE_TEXTS)
    seen = seen_on_texts(folder)
    for name, weight, matrix, stored in stored_and_exact(folder, tmp_path / "fp8"):
        scale, nearest = stored[f"{name}.scale"], [part.float() for part in quantize_rows(matrix)]
        assert torch.equal(scale, nearest[1])
        off = [one * scale[:, None] - matrix for one in (weight.float(), nearest[0])]
        lost, most = (float(((one @ seen[name].gram) * one).sum()) for one in off)  # of products on these texts
        assert lost < most


def test_weights_in_int8_are_the_nearest_numbers_of_smoothed_ones(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "int8", SAMPLE_TEXTS, dtype="int8")
    for name, weight, matrix, stored in stored_and_exact(folder, tmp_path / "int8"):
        smooth, scale = stored[name.replace(".weight", ".input.smooth")], stored[f"{name}.scale"]
        assert smooth.log().mean().abs() < 1e-4 and smooth.max() / smooth.min() > 2
        off = (weight.float() * scale[:, None] - matrix / smooth).abs()
        assert (off <= 0.5001 * scale[:, None]).all() and (weight.abs().amax(1) == 127).all()


def test_scales_of_inputs_hold_what_calibration_saw(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "fp8", SAMPLE_TEXTS)
    scales = load_file(tmp_path / "fp8" / "model.safetensors")
    for name, seen in seen_on_texts(folder).items():
        scale = scales[name.replace(".weight", ".input.scale")]
        assert 0.5 * seen.largest <= float(scale) * LARGEST <= 2.1 * seen.largest  # nothing of it stands far out


@pytest.mark.parametrize(("kind", "name"), [("fp8", "weight.scale"), ("int8", "weight.scale"), ("int8", "input.smooth")])
def test_scales_that_are_none_are_named(folder: Path, tmp_path: Path, kind: str, name: str) -> None:
    quantize(folder, tmp_path / kind, SAMPLE_TEXTS, dtype=kind)
    file, name = tmp_path / kind / "model.safetensors", f"layers.0.ffn.up.{name}"
    for number in (0.0, -1.0, float("nan"), float("inf")):
        tensors = load_file(file)
        tensors[name][3] = number
        save_file(tensors, file)
        with pytest.raises(ValueError, match=f"{name}: scales are finite and above 0"):
            open_checkpoint(tmp_path / kind).read(name)


def test_no_product_of_fp8_on_the_cpu(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "fp8"
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SAMPLE_TEXTS), encoding="utf-8")
    assert cli.main(["quantize", str(folder), str(target), "--texts", str(texts), "--dtype", "fp8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dtype"] == "e4m3" and told["kept"] == {} and told["texts"] == len(SAMPLE_TEXTS)
    with pytest.raises(ValueError, match="stored in fp8. fp8 needs a GPU .*: load the model that it was made from"):
        ftbert.load(target)
    assert cli.main(["info", str(target), "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["products"] == "qkv, out, up, down of layers 0-1 in e4m3" and "fp8 needs a GPU" in model["runs"]
    with pytest.raises(ValueError, match="is quantized already; quantize the model that it was made from"):
        quantize(target, tmp_path / "again", SAMPLE_TEXTS)
    with pytest.raises(ValueError, match="take the model that they were made from"):
        build_reference(open_checkpoint(target), with_heads=False)


@pytest.mark.parametrize(
    ("kind", "inter", "parts", "words"),
    [("fp8", 40, ("up", "down"), "multiples of 16"), ("int8", 40, (), ""), ("int8", 12, ("down",), "fewer than 16")],
)
def test_matrices_that_no_product_takes_are_kept(
    folder: Path, tmp_path: Path, kind: str, inter: int, parts: tuple[str, ...], words: str
) -> None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size = inter  # the up-product's rows, the down-product's columns
    AutoModel.from_config(config).save_pretrained(folder)
    kept = quantize(folder, tmp_path / kind, SAMPLE_TEXTS, dtype=kind).kept
    assert kept.keys() == {f"layers.{i}.ffn.{one}.weight" for i in range(config.num_hidden_layers) for one in parts}
    assert all(words in why for why in kept.values())


def test_an_input_that_is_not_finite_is_named(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[next(name for name in weights if name.endswith("layer.0.intermediate.dense.bias"))][3] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match="layers.0.ffn.down.weight: what it multiplies is not finite"):
        quantize(folder, tmp_path / "fp8", SAMPLE_TEXTS)
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_failure_leaves_no_folder(folder: Path, tmp_path: Path, number: float) -> None:
    def left() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    before, target = left(), tmp_path / "fp8"
    for texts, keep, words in (
        ([], [], "0 with 0 tokens are too few"),
        (["one word"], [], "texts: 1 with .* tokens are too few"),
        (SAMPLE_TEXTS, ["layers.77"], "'layers.77' is nothing that would be quantized"),
        (SAMPLE_TEXTS, ["layer"], "'layer' is nothing that would be quantized"),
        (SAMPLE_TEXTS, ["layers"], "no matrix is left"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(folder, target, texts, keep=keep)
    weights = load_file(folder / "model.safetensors")
    weights[next(name for name in weights if name.endswith("layer.0.output.dense.weight"))][2, 3] = number
    save_file(weights, folder / "model.safetensors")
    for kind in KINDS:
        with pytest.raises(ValueError, match="layers.0.ffn.down.weight holds numbers that are not finite"):
            quantize(folder, target, SAMPLE_TEXTS, dtype=kind)
    with pytest.raises(ValueError, match="dtype: models are quantized to fp8 or int8, got 'bf16'"):
        quantize(folder, target, SAMPLE_TEXTS, dtype="bf16")
    assert left() == before


def test_the_texts_that_come_with_the_package(folder: Path, tmp_path: Path) -> None:
    texts = calibration_texts()
    assert len(texts) == len(set(texts)) > 100 and all(text == text.strip() != "" for text in texts)
    assert cli.main(["quantize", str(folder), str(tmp_path / "fp8")]) == 0
    assert (tmp_path / "fp8" / "model.safetensors").exists()


def test_the_best_scale() -> None:
    rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))

    def loss(scale: float) -> float:
        return float((rounded(rows, torch.tensor(scale)) - rows).square().sum())

    largest = float(rows.abs().max())
    found = best_scale(rows, largest)
    assert all(loss(found) <= loss(found * factor) for factor in (0.05, 0.25, 2**0.25, 2**-0.25, 64.0))
    assert best_scale(rows * 0, 0.0) == 1.0
