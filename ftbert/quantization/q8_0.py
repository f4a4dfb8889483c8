"""Matrices in q8_0: int8 with a scale in fp16 for each 32 neighbours of a row. No texts are asked: what a product reads
is stored in blocks as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ftbert.caller import warn_caller
from ftbert.checkpoint import Checkpoint, ModelConfig, fits_8_bits
from ftbert.converters import check_target, open_checkpoint, write_folder
from ftbert.dtypes import Q8_0, users_word

BLOCK = 32
_LARGEST = 127


def q8_0_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, k] -> numbers int8 [n, k] and scales fp16 [n, k / 32], as llama.cpp makes them: a block's largest
    magnitude over 127, with which, before it is rounded to fp16, the others are divided and rounded, half away from
    0. ValueError where a number is not finite or too large for a scale."""
    rows, columns = matrix.shape
    blocks = matrix.view(rows, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(2, keepdim=True) / _LARGEST
    scales = scale.half()
    if not scales.isfinite().all():
        raise ValueError("holds numbers that are not finite, or too large for scales in fp16")
    inverse = torch.where(scale > 0, 1 / scale, 0.0).nan_to_num_(0.0, 0.0)  # of scales that fp16 rounds to 0
    scaled = blocks * inverse
    whole = scaled.trunc()
    # |x| + 0.5 would round 0.49999997 up; the rest is exact.
    whole += (scaled - whole).mul_(2).trunc_()
    return whole.to(torch.int8).view(rows, columns), scales.view(rows, columns // BLOCK)


def read_q8_0(checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor]:
    """The matrix `name` [n, k], as `q8_0_blocks` makes it: as it is stored where it is stored so. ValueError as there,
    naming it."""
    stored = checkpoint.read_blocks(name)
    if stored is not None and _is_usual(*stored):
        return stored
    try:
        return q8_0_blocks(checkpoint.read(name))
    except ValueError as error:
        raise ValueError(f"{checkpoint.source.where}: {name} {error}") from None


def _is_usual(numbers: Tensor, scales: Tensor) -> bool:
    """Whether `q8_0_blocks` can have made these."""
    return bool((scales.isfinite() & (scales >= 0)).all()) and int(numbers.min()) >= -_LARGEST


@dataclass
class _Blocks:
    """Both tensors of a matrix of `plain`; the scales are kept until they are read behind the numbers."""

    plain: Checkpoint
    name: str
    _scales: list[Tensor] = field(default_factory=list)

    def numbers(self, config: ModelConfig, parts: list[Tensor]) -> Tensor:
        made, scales = read_q8_0(self.plain, self.name)
        self._scales[:] = [scales]
        return made

    def scales(self, config: ModelConfig, parts: list[Tensor]) -> Tensor:
        return self._scales.pop() if self._scales else read_q8_0(self.plain, self.name)[1]


def convert_to_q8_0(
    source: str | Path | torch.nn.Module,
    target: str | Path,
    *,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    task: str | None = None,
) -> Path:
    """A folder as `convert` writes it, with the matrices of its layers in q8_0. Raises what `convert` and `in_q8_0` do,
    ValueError for a model in other 8 bits."""
    target = Path(target)
    check_target(target, source, force)
    checkpoint = open_checkpoint(source, revision=revision, token=token, task=task)
    if checkpoint.config.left_out:
        warn_caller(f"{checkpoint.source.where}: {checkpoint.config.left_out}")
    if checkpoint.config.encoder.eight_bits != "q8_0":
        if checkpoint.config.encoder.has_8_bits:
            where = checkpoint.source.where
            raise ValueError(f"{where}: is quantized already; convert the model that it was made from")
        checkpoint = in_q8_0(checkpoint)
    write_folder(checkpoint, checkpoint.stored_items(), source, target, force)
    return target


def in_q8_0(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with the matrices of its layers in q8_0, made as they are read. ValueError where none can be."""
    encoder = checkpoint.config.encoder
    names = [
        spec.name
        for spec in encoder.weight_specs()
        if spec.matrix and spec.name.startswith("layers.") and not fits_8_bits("q8_0", spec.shape)
    ]
    if not names:
        raise ValueError(f"{checkpoint.source.where}: no matrix of its layers could be stored in {users_word(Q8_0)}")
    made, tensors = dict(checkpoint.made), dict(checkpoint.tensors)
    for name in names:
        blocks = _Blocks(checkpoint, name)
        made |= {name: blocks.numbers, f"{name}.scale": blocks.scales}
        tensors |= {name: (), f"{name}.scale": ()}  # `blocks` reads them
    config = replace(checkpoint.config, encoder=encoder.stored_as(names, "q8_0"))
    return replace(checkpoint, config=config, tensors=tensors, made=made)
