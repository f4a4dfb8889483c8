"""The element types that ftbert computes and stores in, by their short names."""

from __future__ import annotations

import torch

Dtype = torch.dtype | str  # the name of a format (formats.py) where torch has no such tensors

# The core's words (csrc/core/types.cpp).
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP8, INT8, Q8_0 = torch.float8_e4m3fn, torch.int8, "q8_0"
NUMBERS = DTYPES | {"e4m3": FP8, "int8": INT8, "uint8": torch.uint8}  # of tensors
MATRIX_DTYPES: dict[str, Dtype] = {**DTYPES, "e4m3": FP8, "int8": INT8, "q8_0": Q8_0}  # by the core's format
EIGHT_BITS: dict[str, Dtype] = {"fp8": FP8, "int8": INT8, "q8_0": Q8_0}  # users' words

_LOADED: dict[str, Dtype] = {**DTYPES, **EIGHT_BITS}
_SPELLINGS = {
    "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8",
}  # fmt: skip


def parse_dtype(dtype: Dtype) -> Dtype:
    """fp32, fp16, bf16, fp8, int8, q8_0 or the torch dtype itself; ValueError otherwise."""
    found = _LOADED.get(_SPELLINGS.get(dtype, dtype)) if isinstance(dtype, str) else dtype
    if found is None or found not in _LOADED.values():
        raise ValueError(f"dtype: expected fp32, fp16, bf16, fp8, int8 or q8_0, got {dtype!r}")
    return found


def users_word(dtype: Dtype) -> str:
    """The short name that `parse_dtype` reads."""
    return next(word for word, one in _LOADED.items() if one == dtype)


def told_dtype(dtype: Dtype) -> str:
    """For reports: torch's name, "float32", or that of the format."""
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
