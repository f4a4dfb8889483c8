"""The benchmark's models in 8 bits: plain rounding, with what is known of inputs from some batches of random tokens.
Real models are quantized by `ftbert quantize`, on texts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ftbert.checkpoint import WORD_TABLE
from ftbert.converters import open_checkpoint, source_modules, write_folder
from ftbert.evaluation import random_sequences
from ftbert.padded_batches import padded
from ftbert.quantization import best_scale, int8_rows, int8_table, quantize_rows, smoothing
from ftbert.tuning import with_layers_in

_BATCHES, _TEXTS, _LENGTH = 4, 8, 128
_ROWS = 64  # of a batch, that a scale is chosen by


@dataclass(frozen=True)
class Seen:
    """Of what an nn.Linear reads: the largest absolute value of each column [k], some rows [rows, k]."""

    largest: Tensor
    rows: Tensor


_seen: WeakKeyDictionary[torch.nn.Module, dict[str, Seen]] = WeakKeyDictionary()
_scales: WeakKeyDictionary[torch.nn.Module, dict[str, float]] = WeakKeyDictionary()
_folders: WeakKeyDictionary[torch.nn.Module, tempfile.TemporaryDirectory[str]] = WeakKeyDictionary()


def beside_e4m3(reference: Any) -> torch.dtype:
    """The type of the residual stream: fp16 for BERT, bf16 for modern models, whose files are in it."""
    return torch.float16 if reference.config.model_type == "bert" else torch.bfloat16


def calibration_batches(reference: Any) -> list[tuple[Tensor, Tensor]]:
    """Random ids and masks, [batch, seq] each, on the model's device."""
    device = next(reference.parameters()).device
    sequences = random_sequences(reference.config.vocab_size, [_LENGTH] * (_BATCHES * _TEXTS))
    return [padded(sequences[i : i + _TEXTS], "right", 0, device) for i in range(0, len(sequences), _TEXTS)]


@torch.inference_mode()
def seen_inputs(reference: Any) -> dict[str, Seen]:
    """By the name of the nn.Linear. reference: transformers' model in float32, on any device."""
    if reference in _seen:
        return _seen[reference]
    largest: dict[str, Tensor] = {}
    kept: dict[str, list[Tensor]] = {}

    def look(name: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        most = rows.abs().amax(0)
        largest[name] = torch.maximum(largest.get(name, most), most)
        kept.setdefault(name, []).append(rows[:: max(1, len(rows) // _ROWS)].clone())

    with ExitStack() as hooks:
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear):
                hooks.callback(module.register_forward_pre_hook(partial(look, name)).remove)
        for ids, mask in calibration_batches(reference):
            reference(input_ids=ids, attention_mask=mask)
    _seen[reference] = {name: Seen(largest[name], torch.cat(rows)) for name, rows in kept.items()}
    return _seen[reference]


def input_scales(reference: Any) -> dict[str, float]:
    """Of what each nn.Linear reads, in E4M3."""
    if reference not in _scales:
        found = seen_inputs(reference).items()
        _scales[reference] = {name: best_scale(seen.rows, float(seen.largest.max())) for name, seen in found}
    return _scales[reference]


@torch.inference_mode()
def quantized_folder(reference: Any, dtype: torch.dtype) -> Path:
    """A folder as of `ftbert quantize`, in E4M3 or int8, written once; it lives as long as the reference."""
    if reference not in _folders:
        _folders[reference] = tempfile.TemporaryDirectory(prefix="ftbert-8-bits-")
    folder = Path(_folders[reference].name, str(dtype))
    if not folder.exists():
        checkpoint = open_checkpoint(reference)
        plain = checkpoint.config.encoder
        modules, device = source_modules(checkpoint.config), next(reference.parameters()).device
        int8 = dtype == torch.int8
        encoder = plain.stored_as([*modules, WORD_TABLE], "int8") if int8 else with_layers_in("e4m3", plain)
        parts = in_parts_of_int8 if int8 else in_parts_of_e4m3
        beside = torch.float32 if int8 and device.type == "cpu" else beside_e4m3(reference)
        matrices = {spec.name for spec in encoder.weight_specs() if spec.matrix and spec.stored}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in checkpoint.tensors:
                if name == WORD_TABLE and encoder.word_type != "model":
                    yield from int8_table(checkpoint.read(name)).tensors(name).items()
                    continue
                if name not in matrices:
                    yield name, checkpoint.read(name, beside)
                    continue
                found = parts(checkpoint.read(name).to(device), reference, modules[name][0])
                for part, tensor in found.items():
                    yield name.removesuffix("weight") + part, tensor.cpu()

        made = replace(checkpoint, config=replace(checkpoint.config, encoder=encoder))
        write_folder(made, tensors(), reference, folder, force=False)
    return folder


def in_parts_of_e4m3(matrix: Tensor, reference: Any, reader: str) -> dict[str, Tensor]:
    """The tensors that stand for a matrix [n, k] that `reader` multiplies by, by the ends of their names."""
    stored, scale = quantize_rows(matrix)
    return {"weight": stored, "weight.scale": scale, "input.scale": torch.tensor([input_scales(reference)[reader]])}


def in_parts_of_int8(matrix: Tensor, reference: Any, reader: str) -> dict[str, Tensor]:
    """As `in_parts_of_e4m3`, smoothed."""
    s = smoothing(matrix, seen_inputs(reference)[reader].largest)
    stored, scale = int8_rows(matrix * s)
    return {"weight": stored, "weight.scale": scale, "input.smooth": 1 / s}
