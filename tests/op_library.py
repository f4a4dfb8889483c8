"""Loads the ops of single kernels, which no installed library has: libftbert_test.so, built of tests/ops/."""

from __future__ import annotations

from functools import cache

import torch

from ftbert._library import library_path, load_library


@cache
def load_test_ops() -> None:
    """Registers them under `torch.ops.ftbert`. OSError where `make test-build` has not built them
    beside the binding."""
    load_library()
    torch.ops.load_library(str(library_path().with_name("libftbert_test.so")))
