"""ftbert's own kernels for products, as the library lists them; none in a build without CUDA."""

from __future__ import annotations

import torch

from ftbert.dtypes import DTYPES
from ftbert.tuning import Product, described, tuner_module

_module = tuner_module()
VARIANTS: dict[str, list[str]] = dict(_module.own_kernels())
WORDS = {dtype: word for word, dtype in DTYPES.items()}


def supports(kernel: str, variant: str, product: Product, m: int) -> bool:
    """On this GPU."""
    gpu = torch.cuda.get_device_properties("cuda")
    return bool(_module.supports((10 * gpu.major + gpu.minor, gpu.multi_processor_count), kernel, variant, described(product, m)))
