"""The tuner's products in 8 bits on a GPU: those of layers, and tables that name what does not run them."""

from __future__ import annotations

import pytest
import torch
from conftest import Place
from own_kernels import VARIANTS, WORDS, multiplies

from ftbert._library import load_library
from ftbert.checkpoint import ModelConfig
from ftbert.tuning import Bench, Product, Row, gemm_table, products, put_in_force, with_layers_in

load_library()


@pytest.fixture
def beside(place: Place) -> Place:
    if place.device == "cpu" or place.dtype == torch.float32:
        pytest.skip("for 16-bit streams on a GPU")
    return place


@pytest.fixture(params=["e4m3", "int8"])
def word(request: pytest.FixtureRequest) -> str:
    if not multiplies(request.param):
        pytest.skip(f"this GPU has no products in {request.param}")
    return str(request.param)


@pytest.mark.parametrize("m", [100, 2048])
@pytest.mark.parametrize("activation, gated", [("gelu", False), ("gelu_new", False), ("silu", True), ("gelu", True)])
def test_every_product_of_a_layer_has_right_kernels(
    beside: Place, word: str, m: int, activation: str, gated: bool
) -> None:
    layer = {
        "attention": {"heads": 12, "head_size": 64}, "attention_norm": {"eps": 1e-6},
        "ffn": {"inter": 3072, "activation": activation, "gated": gated}, "ffn_norm": {"eps": 1e-6},
    }  # fmt: skip
    around = {"vocab": 9, "hidden": 768, "embedding": 768, "positions": {"kind": "none", "rows": 9}}
    config = ModelConfig.from_json({**around, "layers": [layer]})
    asked = products(with_layers_in(word, config), WORDS[beside.dtype])
    assert len(asked) == 4 and all(product.scaled for product in asked)
    for product in asked:
        bench = Bench(product, m)
        assert bench.chosen().kernel in VARIANTS, product
        for one in bench.own():
            assert bench.error(one) < 0.08 and bench.microseconds(one) < 1000, (product, one.variant)


def test_a_row_without_an_algorithm_breaks_nothing(beside: Place, word: str) -> None:
    """Of cuBLASLt's proposals, which do not run these products, a table may name any."""
    asked = Product(f"{'byte_rows' if word == 'int8' else word} {word} {WORDS[beside.dtype]}", 768, 256, True)
    bench, device = Bench(asked, 300), torch.device("cuda", torch.cuda.current_device())
    rule = bench.chosen()
    try:
        for algorithm in (None, (1,) * 8):
            put_in_force(device, [Row(asked, 1, 512, algorithm)])
            assert (bench.chosen().kernel, bench.chosen().variant) == (rule.kernel, rule.variant)
    finally:
        gemm_table.install(device, again=True)
