"""The words of `info` on which products run in 8 bits, and why the others do not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_bert

import ftbert
from ftbert import cli
from ftbert.checkpoint import CheckpointConfig, told_products
from ftbert.converters import open_checkpoint
from ftbert.evaluation import SAMPLE_TEXTS
from ftbert.quantization import quantize

PARTS = ("qkv", "out", "up", "down")


def config_of(depth: int, **sizes: int) -> CheckpointConfig:
    return open_checkpoint(make_bert(num_hidden_layers=depth, **sizes)).config


def stored(config: CheckpointConfig, chosen: set[tuple[int, str]], word: str = "e4m3") -> CheckpointConfig:
    """With these matrices, by layer and name, in 8 bits."""
    layers = []
    for i, layer in enumerate(config.encoder.layers):
        words = {f"{part}_type": word for part in PARTS if (i, part) in chosen}
        attention: dict[str, Any] = {key: one for key, one in words.items() if key[:3] in ("qkv", "out")}
        ffn: dict[str, Any] = {key: one for key, one in words.items() if key not in attention}
        layers.append(replace(layer, attention=replace(layer.attention, **attention), ffn=replace(layer.ffn, **ffn)))
    return replace(config, encoder=replace(config.encoder, layers=tuple(layers)))


def named(words: str) -> set[tuple[int, str]]:
    """The matrices that such words stand for."""
    found = set()
    for parts, layers in re.findall(r"((?:[a-z]+, )*[a-z]+) of layers? (\d[\d, -]*\d|\d)", words):
        for run in layers.split(", "):
            first, _, last = run.partition("-")
            found |= {(i, part) for i in range(int(first), int(last or first) + 1) for part in parts.split(", ")}
    return found


@pytest.mark.parametrize("seed", range(8))
def test_every_matrix_is_told_once(seed: int) -> None:
    depth = 13
    drawn = torch.rand(depth, 4, generator=torch.Generator().manual_seed(seed)) < (seed + 1) / 9
    chosen = {(i, part) for i in range(depth) for j, part in enumerate(PARTS) if drawn[i, j]} | {(0, "qkv")}
    word = ("e4m3", "int8")[seed % 2]
    told = told_products(stored(config_of(depth), chosen, word))
    left = {(i, part) for i in range(depth) for part in PARTS} - chosen
    assert named(told["products"]) == chosen and named(told["kept"]) == left
    assert told["products"].endswith(f" in {word}") and told["kept"].endswith("pooler, heads (outside the layers)")


def test_why_a_matrix_is_kept() -> None:
    config = config_of(2, intermediate_size=40)
    config = stored(config, {(0, "qkv"), (1, "qkv"), (1, "out")})
    told = told_products(replace(config, quantized={"kept": {"layers.0.attention.out.weight": "its error was too large"}}))
    assert told["products"] == "qkv of layers 0-1, out of layer 1 in e4m3"
    assert "out of layer 0 (its error was too large)" in told["kept"]
    assert "up of layers 0-1 (40 rows and 64 columns are not both multiples of 16)" in told["kept"]
    config = stored(config_of(2, intermediate_size=12), {(0, "qkv")}, "int8")
    assert "down of layers 0-1 (12 columns are fewer than 16)" in told_products(config)["kept"]
    plainly = told_products(stored(config_of(1), {(0, "up")}))["kept"]
    assert plainly.startswith("qkv, out, down of layer 0 (left as it was when the model was quantized); ")


def test_a_plain_model_has_no_such_words() -> None:
    model = ftbert.load(make_bert())
    assert told_products(model.checkpoint.config) == {} and "kept" not in model.info()


def test_info_opens_a_model_once(
    tmp_path: Path, tiny_bert: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftbert.converters import open as opening

    quantize(tiny_bert(tmp_path), tmp_path / "fp8", SAMPLE_TEXTS, keep=["layers.1.ffn"])
    read, calls = opening.read_checkpoint, []
    monkeypatch.setattr(opening, "read_checkpoint", lambda *given: calls.append(given) or read(*given))
    assert cli.main(["info", str(tmp_path / "fp8")]) == 0
    shown = capsys.readouterr().out
    assert len(calls) == 1
    assert "qkv, out of layers 0-1, up, down of layer 0 in e4m3" in shown
    assert "up, down of layer 1 (asked for" in shown and re.search(r"runs +no: ", shown)
