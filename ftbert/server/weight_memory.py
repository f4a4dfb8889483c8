"""What a model's weights take in memory, known before they are read: --model-memory-limit."""

from __future__ import annotations

from math import prod

import torch

from ftbert.checkpoint import WORD_TABLE, Checkpoint
from ftbert.devices import stream_dtype
from ftbert.dtypes import INT8, MATRIX_DTYPES, Dtype, parse_dtype
from ftbert.loaded_types import has_own_dtype, types_of

_TABLE = (INT8, WORD_TABLE)  # becomes int8 with the layers


def check_weights(checkpoint: Checkpoint, device: torch.device, dtype: str | None, limit: int) -> None:
    """ValueError with the bytes that they would take, where these are more than `limit`. dtype: as of ftbert.load."""
    size = weight_bytes(checkpoint, device, dtype)
    if size > limit:
        raise ValueError(
            f"its weights would take {size} bytes of memory, more than {limit} (model-memory-limit): "
            "raise the limit, or serve it in a smaller dtype"
        )


def weight_bytes(checkpoint: Checkpoint, device: torch.device, dtype: str | None) -> int:
    """Of encoder and heads, on one device. dtype: as of ftbert.load. ValueError where `device` cannot serve it."""
    own = dtype == "auto" or (dtype is None and has_own_dtype(checkpoint))
    element, becomes = types_of(checkpoint, device, None if own else parse_dtype(dtype or "fp32"))
    stream = stream_dtype(device, element)
    encoder = {spec.name: spec for spec in checkpoint.config.encoder.weight_specs()}

    def loaded(name: str) -> Dtype:
        spec = encoder.get(name)
        if spec is None:  # of a head
            return stream
        if spec.stored in MATRIX_DTYPES:
            return MATRIX_DTYPES[spec.stored]
        if becomes is not None and ((spec.matrix and name.startswith("layers.")) or (becomes, name) == _TABLE):
            return becomes
        return element if spec.matrix else stream

    return sum(_bytes(prod(shape), loaded(name)) for name, shape in checkpoint.config.shapes().items())


def _bytes(numbers: int, dtype: Dtype) -> int:
    """q8_0 has a scale in 16 bits for each 32 numbers; those of whole rows, of other types, are left out."""
    return numbers * dtype.itemsize if isinstance(dtype, torch.dtype) else numbers * 34 // 32
