"""The benchmark's models in E4M3: plain rounding, and scales of inputs from some batches of random tokens. Real models
are quantized by `ftbert quantize`, on texts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ftbert.converters import open_checkpoint, source_modules, write_folder
from ftbert.evaluation import random_sequences
from ftbert.padded_batches import padded
from ftbert.quantization import best_scale, quantize_rows
from ftbert.tuning import in_e4m3

_BATCHES, _TEXTS, _LENGTH = 4, 8, 128
_ROWS = 64  # of a batch, that a scale is chosen by

_scales: WeakKeyDictionary[torch.nn.Module, dict[str, float]] = WeakKeyDictionary()
_folders: WeakKeyDictionary[torch.nn.Module, tempfile.TemporaryDirectory[str]] = WeakKeyDictionary()


def beside_e4m3(reference: Any) -> torch.dtype:
    """The type of the residual stream: fp16 for BERT, bf16 for modern models, whose files are in it."""
    return torch.float16 if reference.config.model_type == "bert" else torch.bfloat16


@torch.inference_mode()
def input_scales(reference: Any) -> dict[str, float]:
    """Of what each nn.Linear reads, by its name. reference: transformers' model in float32, on any device."""
    if reference in _scales:
        return _scales[reference]
    device = next(reference.parameters()).device
    largest: dict[str, float] = {}
    kept: dict[str, list[Tensor]] = {}

    def look(name: str, _: Any, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        largest[name] = max(largest.get(name, 0.0), float(rows.abs().max()))
        kept.setdefault(name, []).append(rows[:: max(1, len(rows) // _ROWS)].clone())

    with ExitStack() as hooks:
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear):
                hooks.callback(module.register_forward_pre_hook(partial(look, name)).remove)
        sequences = random_sequences(reference.config.vocab_size, [_LENGTH] * (_BATCHES * _TEXTS))
        for first in range(0, len(sequences), _TEXTS):
            ids, mask = padded(sequences[first : first + _TEXTS], "right", 0, device)
            reference(input_ids=ids, attention_mask=mask)
    _scales[reference] = {name: best_scale(torch.cat(rows), largest[name]) for name, rows in kept.items()}
    return _scales[reference]


@torch.inference_mode()
def quantized_folder(reference: Any) -> Path:
    """A folder as of `ftbert quantize`, written once; it lives as long as the reference."""
    if reference not in _folders:
        checkpoint = open_checkpoint(reference)
        encoder = in_e4m3(checkpoint.config.encoder)
        modules = source_modules(checkpoint.config)
        device, scales = next(reference.parameters()).device, input_scales(reference)
        matrices = {spec.name for spec in encoder.weight_specs() if spec.matrix and spec.stored}

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name in checkpoint.tensors:
                if name not in matrices:
                    yield name, checkpoint.read(name, beside_e4m3(reference))
                    continue
                stored, scale = quantize_rows(checkpoint.read(name).to(device))
                yield name, stored.cpu()
                yield f"{name}.scale", scale.cpu()
                yield f"{name.removesuffix('.weight')}.input.scale", torch.tensor([scales[modules[name][0]]])

        _folders[reference] = tempfile.TemporaryDirectory(prefix="ftbert-fp8-")
        made = replace(checkpoint, config=replace(checkpoint.config, encoder=encoder))
        write_folder(made, tensors(), reference, Path(_folders[reference].name, "model"), force=False)
    return Path(_folders[reference].name, "model")
