"""Tuned GEMM tables, and the tuner that makes them. What computes needs `gemm_table` alone."""

from ftbert.tuning import gemm_table
from ftbert.tuning.c_calls import Algorithm
from ftbert.tuning.gemm_rows import WGMMA_TILE, WITH_LAYERNORM, WITH_NORM, WITH_PRENORM, Own, Product, Row, merge
from ftbert.tuning.gemm_table import Machine, described, in_force, put_in_force, tuner_module, user_table
from ftbert.tuning.product_bench import Bench, NothingProposed, Recording, choice_of, in_turns
from ftbert.tuning.product_tuner import (
    ProductTuner,
    buckets,
    products,
    products_of_shape,
    search,
    with_layers_in,
    without_norm,
)
from ftbert.tuning.run import Tuned, show, show_text, tune

__all__ = [
    "WGMMA_TILE", "WITH_LAYERNORM", "WITH_NORM", "WITH_PRENORM", "Algorithm", "Bench", "Machine", "NothingProposed",
    "Own", "Product", "ProductTuner", "Recording", "Row", "Tuned", "buckets", "choice_of", "described", "gemm_table",
    "in_force", "in_turns", "merge", "products", "products_of_shape", "put_in_force", "search",
    "show", "show_text", "tune", "tuner_module", "user_table", "with_layers_in", "without_norm",
]  # fmt: skip
