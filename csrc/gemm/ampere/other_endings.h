// mma_tile's kernels with endings that are compiled in files of their own. No CUDA header.
#pragma once
#include "gemm/gpu/own.h"

namespace ftbert {

// gpu/deferred_norm.h.
void run_mma_behind_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
void run_mma_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
// gpu/turned_product.h.
void run_mma_turned(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);

}  // namespace ftbert
