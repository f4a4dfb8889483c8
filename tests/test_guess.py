"""The kernel that runs where no table has a row: its choice on this GPU, and that it computes the product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from own_kernels import have_warpgroups

from ftbert.tuning import WGMMA_TILE, WITH_LAYERNORM, WITH_PRENORM, Bench, Product, Row, choice_of, gemm_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def no_table() -> Iterator[None]:
    device = torch.device("cuda", torch.cuda.current_device())
    gemm_table.install(device)
    gemm_table.put_in_force(torch.cuda.current_device(), [])
    yield
    gemm_table.install(device, again=True)


def on_hopper() -> None:
    if not have_warpgroups():
        pytest.skip("the products that are guessed are Hopper's")


@pytest.mark.parametrize("m", [1, 64, 200, 512, 1024])
@pytest.mark.parametrize(("n", "k"), [(2304, 768), (768, 3072), (384, 384)])
def test_few_rows_run_a_block_for_each_tile(n: int, k: int, m: int) -> None:
    """One wave at most, so that every block has a multiprocessor: what can defer a LayerNorm."""
    on_hopper()
    chosen = Bench(Product("fp16", n, k), m).chosen()
    assert chosen.kernel == WGMMA_TILE
    blocks = -(-m // chosen.tile_rows) * -(-n // chosen.tile_columns) * max(1, chosen.split_k)
    assert blocks <= torch.cuda.get_device_properties("cuda").multi_processor_count


def _said(words: Sequence[int]) -> list[int]:
    """Without two bytes of the fifth word, which cuBLASLt leaves as they were."""
    return [word & ~(0xFFFF << 16) if i == 4 else word for i, word in enumerate(words)]


@pytest.mark.parametrize(
    ("product", "m", "kernel"),
    [
        (Product("bf16", 2304, 768, True), 16384, "wgmma_persistent"),
        (Product("fp16", 4096, 1024, True, "gelu"), 1024, "wgmma_persistent"),
        (Product("fp16", 768, 768), 1100, WGMMA_TILE),
        (Product("fp16", 768, 768, True, layernorm=True), 4096, WITH_LAYERNORM),
        (Product("fp16", 768, 1152, layernorm=True), 4096, WITH_LAYERNORM),
        (Product("fp16", 768, 768, prenorm=True), 4096, WITH_PRENORM),
        (Product("bf16", 1024, 3072, prenorm=True), 16384, WITH_PRENORM),
        (Product("fp16", 2304, 768, False, "silu", gated=True), 16384, "wgmma_persistent"),
        (Product("fp16", 2304, 768, False, "silu", gated=True), 64, WGMMA_TILE),
        (Product("bf16", 4096, 2304), 512, WGMMA_TILE),
        (Product("bf16", 4096, 11008), 64, WGMMA_TILE),  # a large weight
        (Product("bf16", 4096, 11008), 77, ""),
        (Product("bf16", 4096, 11008), 128, ""),
        (Product("bf16", 4096, 11008), 192, ""),
        (Product("fp16", 12288, 4096), 8192, ""),
        (Product("fp16", 22016, 4096, False, "silu", gated=True), 128, WGMMA_TILE),
        (Product("bf16", 22016, 4096, False, "silu", gated=True), 512, ""),
        (Product("bf16", 22016, 4096, False, "silu", gated=True), 4096, "wgmma_persistent"),
        (Product("e4m3 e4m3 fp16", 2304, 768, True), 64, WGMMA_TILE),
        (Product("e4m3 e4m3 bf16", 768, 3072), 200, WGMMA_TILE),
        (Product("e4m3 e4m3 e4m3", 4096, 1024, True, "gelu"), 1, WGMMA_TILE),
        (Product("e4m3 e4m3 bf16", 12288, 4096), 77, WGMMA_TILE),  # a large weight
        (Product("e4m3 e4m3 e4m3", 20480, 4096, False, "gelu", gated=True), 77, "wgmma_persistent"),
        (Product("e4m3 e4m3 fp16", 2304, 768, True), 1024, "wgmma_persistent"),
        (Product("e4m3 e4m3 fp16", 2304, 768, True), 4096, "wgmma_persistent"),
        (Product("e4m3 e4m3 fp16", 768, 768, True, layernorm=True), 4096, WITH_LAYERNORM),
        (Product("e4m3 e4m3 bf16", 1024, 4096, True, layernorm=True), 16384, WITH_LAYERNORM),
        (Product("e4m3 e4m3 fp16", 768, 3072, prenorm=True), 16384, WITH_PRENORM),
        (Product("e4m3 e4m3 bf16", 1024, 1024, prenorm=True), 4096, WITH_PRENORM),
        (Product("e4m3 e4m3 e4m3", 3072, 768, True, "gelu"), 16384, "wgmma_persistent"),
        (Product("fp16", 2304, 768, True, "relu"), 4096, ""),  # the persistent one has none: cuBLASLt's
        (Product("fp16", 2300, 768, True), 4096, ""),
        (Product("fp32", 2304, 768, True), 4096, ""),
    ],
    ids=str,
)
def test_kernels_of_usual_products(product: Product, m: int, kernel: str) -> None:
    on_hopper()
    bench = Bench(product, m)
    chosen = bench.chosen()
    assert chosen.kernel == kernel and (kernel or _said(chosen.data) == _said(bench.first_proposal().data))


@pytest.mark.parametrize(
    ("product", "variant"),
    [
        (Product("fp16", 4096, 4096), "64x96 k2"),
        (Product("bf16", 12288, 4096), "64x48 half"),
        (Product("bf16", 20480, 4096, False, "gelu", gated=True), "64x96 half"),
    ],
    ids=str,
)
def test_large_weights_beside_some_rows(product: Product, variant: str) -> None:
    """With more of the weight on the way than the narrowest tile has."""
    on_hopper()
    for m in (9, 64):
        bench = Bench(product, m)
        assert bench.chosen().variant == variant
        assert bench.error(bench.chosen()) < 2**-7
    assert Bench(product, 65).chosen().kernel == (WGMMA_TILE if product.gated else "")


def test_a_row_that_found_nothing_better_is_followed() -> None:
    """With a LayerNorm it says: no product that contains it."""
    on_hopper()
    norm, plain = Product("fp16", 768, 768, True, layernorm=True), Product("fp16", 768, 768)
    gemm_table.put_in_force(torch.cuda.current_device(), [Row(norm, 1, 8192, None), Row(plain, 1, 8192, None)])
    bench = Bench(norm, 4096)
    assert choice_of(bench.chosen()) == choice_of(Bench(plain, 4096).first_proposal())
    assert Bench(norm, 9000).chosen().kernel == WITH_LAYERNORM


@pytest.mark.parametrize("m", [1025, 1090, 1700, 2048, 2177, 3000, 4500, 9000])
@pytest.mark.parametrize("behind", ["gelu", "layernorm", "prenorm", "gate"])
def test_what_is_guessed_is_right(m: int, behind: str) -> None:
    """On every GPU; at m whose last wave is computed in halves, and whose last tile is."""
    for dtype in ("fp16", "bf16"):
        for n, k in ((768, 768), (1536, 192), (1024, 2048)):
            activation = "none" if behind.endswith("norm") else "gelu"
            product = Product(dtype, n, k, True, activation, behind == "layernorm", behind == "gate", behind == "prenorm")
            bench = Bench(product, m)
            assert bench.error(bench.chosen()) <= 2 * bench.error(bench.first_proposal()) + 2**-8
