// Which kernel runs a product where no table has a row for it. No CUDA header.
#pragma once
#include "gemm/own/own.h"
#include "gemm/product.h"

namespace ftbert {

// For operands aligned to 16 bytes; without a kernel: cuBLASLt's first proposal, and with residual_norm a product and
// then a LayerNorm. On other GPUs than Hopper, in float32 and where nothing of ours is expected to be faster: none.
OwnChoice guess_product(const Gpu& gpu, const Product& product);

}  // namespace ftbert
