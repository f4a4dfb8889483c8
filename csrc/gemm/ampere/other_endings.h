// mma_tile's kernels with endings that are compiled in files of their own. No CUDA header.
#pragma once
#include "gemm/gpu/own.h"

namespace ftbert {

// gpu/deferred_norm.h.
void run_mma_behind_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
void run_mma_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
// Of operands in E4M3, and of byte rows by int8 (gpu/int8_product_cuda.cu).
void run_mma_e4m3(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
void run_mma_int8(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
// gpu/turned_product.h.
void run_mma_turned(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);

}  // namespace ftbert
