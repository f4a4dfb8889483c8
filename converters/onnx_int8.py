"""The matrices that an ONNX file stores in 8 bits as those of a checkpoint in int8: the file's integers and scales."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ftbert.checkpoint import Checkpoint, TensorSource, fits_8_bits, warn_caller
from ftbert.converters.onnx_integers import int8_rows
from ftbert.converters.onnx_source import OnnxSource


def with_int8(checkpoint: Checkpoint, source: OnnxSource) -> Checkpoint:
    """`checkpoint`, which was read from `source` as floats, and with it the same model in int8 where the file has a
    matrix of its layers so."""
    names = [
        spec.name
        for spec in checkpoint.config.encoder.weight_specs()
        if spec.matrix and spec.name.startswith("layers.") and not fits_8_bits("int8", spec.shape)
        and all(source.in_8_bits(part) for part in checkpoint.tensors[spec.name])
    ]  # fmt: skip
    return replace(checkpoint, in_int8=partial(_in_int8, checkpoint, source, names)) if names else checkpoint


def _in_int8(checkpoint: Checkpoint, source: OnnxSource, names: list[str]) -> Checkpoint:
    """With these matrices in int8. Warns where integers had to be rounded once more."""
    held: dict[str, torch.Tensor] = {}
    tensors = dict(checkpoint.tensors)
    rounded: dict[str, float] = {}
    for ours in names:
        parts = checkpoint.tensors[ours]
        for part in parts:
            found = source.in_8_bits(part)
            assert found is not None
            rows = int8_rows(*found)
            held[part], held[f"{part}.scale"] = torch.from_numpy(rows.values), torch.from_numpy(rows.scale)
            if rows.error:
                rounded[part] = rows.error
        smooth = f"{parts[0]}.smooth"
        held[smooth] = torch.ones(held[parts[0]].shape[1])
        tensors |= {f"{ours}.scale": tuple(f"{part}.scale" for part in parts), _input(ours): (smooth,)}
    if rounded:
        warn_caller(
            f"{source.where}: the integers of {len(rounded)} matrices less their zero points do not fit int8 and are "
            f"rounded once more, by up to {max(rounded.values()):.2%} of the largest weight in a row",
        )
    reason = "is not stored in 8 bits in the ONNX file"
    others = {spec.name: reason for spec in checkpoint.config.encoder.weight_specs()
              if spec.matrix and spec.name.startswith("layers.") and spec.name not in names}  # fmt: skip
    config = replace(
        checkpoint.config,
        encoder=checkpoint.config.encoder.stored_as(names, "int8"),
        quantized={"dtype": "int8", "kept": others},
    )
    return Checkpoint(config, _Int8Source(source, held), tensors, checkpoint.folder, checkpoint.made)


def _input(matrix: str) -> str:
    return f"{matrix.removesuffix('.weight')}.input.smooth"


class _Int8Source(TensorSource):
    """`held`, and of `plain` what is not among them."""

    def __init__(self, plain: TensorSource, held: dict[str, torch.Tensor]) -> None:
        self.where, self.files, self._plain, self._held = plain.where, plain.files, plain, held

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._plain.shapes() | {name: tuple(tensor.shape) for name, tensor in self._held.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._held[name].clone() if name in self._held else self._plain.read(name)
