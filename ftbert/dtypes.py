"""The element types that ftbert computes and stores in, by their short names."""

from __future__ import annotations

import torch

# The core's words (csrc/core/types.cpp).
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP8, INT8 = torch.float8_e4m3fn, torch.int8
Q8_0 = torch.qint8  # stands for int8 in blocks with a scale each, of which torch has no tensors
MATRIX_DTYPES = DTYPES | {"e4m3": FP8, "int8": INT8, "q8_0": Q8_0}
STORED_DTYPES = MATRIX_DTYPES | {"q8_0": INT8}  # of the tensor with a matrix's numbers
EIGHT_BITS = {"fp8": FP8, "int8": INT8, "q8_0": Q8_0}  # users' words

_LOADED = DTYPES | EIGHT_BITS
_SPELLINGS = {
    "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8",
}  # fmt: skip


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """fp32, fp16, bf16, fp8, int8, q8_0 or the torch dtype itself; ValueError otherwise."""
    found = _LOADED.get(_SPELLINGS.get(dtype, dtype)) if isinstance(dtype, str) else dtype
    if found is None or found not in _LOADED.values():
        raise ValueError(f"dtype: expected fp32, fp16, bf16, fp8, int8 or q8_0, got {dtype!r}")
    return found


def users_word(dtype: torch.dtype) -> str:
    """The short name that `parse_dtype` reads."""
    return next(word for word, one in _LOADED.items() if one == dtype)


def told_dtype(dtype: torch.dtype) -> str:
    """For reports: torch's name, "float32", and q8_0's own."""
    return users_word(dtype) if dtype == Q8_0 else str(dtype).removeprefix("torch.")
