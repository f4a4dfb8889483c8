"""ftbert's own kernels for products, as the library lists them; none in a build without CUDA."""

from __future__ import annotations

from conftest import have_gpu

from ftbert.dtypes import DTYPES
from ftbert.formats import formats
from ftbert.gpus import Gpu
from ftbert.tuning import Product, described, tuner_module

_module = tuner_module()
VARIANTS: dict[str, list[str]] = dict(_module.own_kernels())
# Variants of mma_tile in which one block makes a tile. Those whose blocks divide k are for products that leave moments.
WHOLE_TILES = [variant for variant in VARIANTS.get("mma_tile", []) if " k" not in variant]
WORDS = {dtype: word for word, dtype in DTYPES.items()}


def supports(kernel: str, variant: str, product: Product, m: int) -> bool:
    """On this GPU."""
    return bool(_module.supports(Gpu.of("cuda"), kernel, variant, described(product, m)))


def tile_kernel() -> str:
    """The kernel of this GPU with a block for each tile of a 16-bit product, which defers norms and turns heads; or ""."""
    if not have_gpu():
        return ""
    asked = Product("fp16", 768, 768, True)
    return next(
        (k for k in ("wgmma_tile", "mma_tile") if any(supports(k, v, asked, 64) for v in VARIANTS.get(k, ()))), ""
    )


def multiplies(word: str) -> bool:
    """Whether this GPU, or the lesser one that it is held to, has products by matrices in this format."""
    return have_gpu() and Gpu.of("cuda").capability >= formats()[word].first_gpu


def have_warpgroups() -> bool:
    """Whether Hopper's kernels run on this GPU: it is one, this build has their code, and it is not held to a lesser GPU."""
    return have_gpu() and bool(Gpu.of("cuda").warpgroups)
