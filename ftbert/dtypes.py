"""The element types that ftbert computes and stores in, by their short names."""

from __future__ import annotations

import torch

# The core's words (csrc/core/types.cpp).
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FP8 = torch.float8_e4m3fn  # e4m3 to the core, fp8 to users
STORED_DTYPES = DTYPES | {"e4m3": FP8, "int8": torch.int8}  # of matrices

_LOADED = DTYPES | {"fp8": FP8}
_SPELLINGS = {
    "float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8",
}  # fmt: skip


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """fp32, fp16, bf16, fp8 or the torch dtype itself; ValueError otherwise."""
    found = _LOADED.get(_SPELLINGS.get(dtype, dtype)) if isinstance(dtype, str) else dtype
    if found is None or found not in _LOADED.values():
        raise ValueError(f"dtype: expected fp32, fp16, bf16 or fp8, got {dtype!r}")
    return found
