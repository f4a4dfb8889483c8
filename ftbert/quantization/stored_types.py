"""The types of 8 bits that matrices are stored in."""

from __future__ import annotations

from ftbert.dtypes import Dtype, parse_dtype
from ftbert.quantization.e4m3 import E4M3
from ftbert.quantization.int8 import INT8
from ftbert.quantization.stored_type import StoredType

STORED_TYPES: dict[Dtype, StoredType] = {one.dtype: one for one in (E4M3, INT8)}


def stored_type(dtype: Dtype) -> StoredType:
    """By a user's word or torch's; ValueError for one that is not of 8 bits."""
    found = STORED_TYPES.get(parse_dtype(dtype))
    if found is None:
        names = " or ".join(one.name for one in STORED_TYPES.values())
        raise ValueError(f"dtype: models are quantized to {names}, got {dtype!r}")
    return found
