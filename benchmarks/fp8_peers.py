"""The peers of a run in fp8: packed PyTorch whose products are torch._scaled_mm, and everybody's 16 bits beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from encoder_peers import CompiledT5
from modern_peers import PackedModern
from peers import E4M3, EIGHT_BITS_LIMIT, FtbertPacked, PackedGraphAnySize, Peer
from quantized import beside_e4m3, input_scales
from torch import Tensor

from ftbert.quantization import LARGEST, quantize_rows, to_e4m3


class Scaled(NamedTuple):
    """A matrix in E4M3 [n, k], its scale [] or [1, n], and the scale [] of what it multiplies, if that is fixed."""

    data: Tensor
    scale: Tensor
    input: Tensor | None


class Products(NamedTuple):
    """What torch._scaled_mm leaves here: the type of its result, and whether it adds the bias."""

    result: torch.dtype
    bias: bool


class In16Bits(Peer):
    """In a run in 8 bits on a GPU, the same without it."""

    dtypes: ClassVar[Sequence[torch.dtype]] = (E4M3, torch.int8)

    def setup(self, reference: Any) -> None:
        self.dtype = beside_e4m3(reference)
        super().setup(reference)


class Ftbert16(In16Bits, FtbertPacked):
    name = "ftbert, packed, 16 bits"


class Packed16(In16Bits, PackedGraphAnySize):
    name = "packed PyTorch, 16 bits, CUDA graph"


class PackedModern16(In16Bits, PackedModern):
    name = "packed PyTorch, 16 bits, CUDA graph"


class CompiledT5In16Bits(In16Bits, CompiledT5):
    name = "torch.compile, 16 bits, CUDA graph"


class ScaledProducts(In16Bits):
    """The layers' products by torch._scaled_mm, with weights quantized before. by_rows: a scale for each row of
    weights, and for each token a scale that every call finds; else a scale for each matrix and a fixed scale for its
    input. What is multiplied is rounded in the kernel that torch.compile makes for the norm or the activation before
    it."""

    dtypes = (E4M3,)
    tolerance = EIGHT_BITS_LIMIT
    by_rows: ClassVar[bool] = False

    def setup(self, reference: Any) -> None:
        self.inputs = input_scales(reference)
        self.products = scaled_products(self.device, beside_e4m3(reference), self.by_rows)
        super().setup(reference)

    def matrix(self, weight: Tensor, reader: str) -> Scaled:
        if self.by_rows:
            data, scale = quantize_rows(weight)
            return Scaled(data, scale[None], None)
        scale = weight.float().abs().max() / LARGEST
        return Scaled(to_e4m3(weight.float(), scale), scale, torch.tensor(self.inputs[reader], device=self.device))

    def linear(self, x: Tensor, weight: Scaled, bias: Tensor | None) -> Tensor:
        rows, scale = x.float(), weight.input
        if scale is None:
            scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        a = (rows / scale).clamp(-LARGEST, LARGEST).to(E4M3)
        inside = bias if self.products.bias else None
        sums = torch._scaled_mm(
            a, weight.data.t(), scale_a=scale, scale_b=weight.scale, bias=inside, out_dtype=self.products.result,
            use_fast_accum=True,
        )  # fmt: skip
        return (sums if bias is None or self.products.bias else sums + bias).to(x.dtype)


def scaled_products(device: torch.device, dtype: torch.dtype, by_rows: bool) -> Products:
    """The most of them that torch computes on this device. RuntimeError: none."""
    a, b = torch.ones(48, 64, device=device).to(E4M3), torch.ones(32, 64, device=device).to(E4M3)
    shapes: tuple[Sequence[int], Sequence[int]] = ((48, 1), (1, 32)) if by_rows else ((), ())
    of_a, of_b = (torch.ones(shape, device=device) for shape in shapes)
    words = ""
    for found in (Products(dtype, True), Products(dtype, False), Products(torch.bfloat16, False)):
        bias = torch.ones(32, device=device, dtype=dtype) if found.bias else None
        try:
            got = torch._scaled_mm(a, b.t(), of_a, of_b, bias=bias, out_dtype=found.result, use_fast_accum=True)
            if float(got.float().mean()) == 64 + found.bias:
                return found
            words = "its sums are wrong"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            words = str(error).strip().splitlines()[0]
    raise RuntimeError(f"torch._scaled_mm: {words}")


class PackedTensorScales(ScaledProducts, PackedGraphAnySize):
    name = "packed PyTorch, fp8 scales of tensors, CUDA graph"


class PackedRowScales(ScaledProducts, PackedGraphAnySize):
    name = "packed PyTorch, fp8 scales of rows, CUDA graph"
    by_rows = True


class PackedModernTensorScales(ScaledProducts, PackedModern):
    name = PackedTensorScales.name


class PackedModernTensorScalesCudnn(PackedModernTensorScales):
    name = "packed PyTorch, fp8 scales of tensors, cuDNN attention, CUDA graph"
    cudnn = True


class PackedModernRowScales(ScaledProducts, PackedModern):
    name = PackedRowScales.name
    by_rows = True


FP8_PEERS: tuple[type[Peer], ...] = (
    Ftbert16, Packed16, PackedTensorScales, PackedRowScales, PackedModern16, PackedModernTensorScales,
    PackedModernTensorScalesCudnn, PackedModernRowScales, CompiledT5In16Bits,
)  # fmt: skip
