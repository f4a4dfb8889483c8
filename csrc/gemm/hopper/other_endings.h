// wgmma_tile's kernels with endings that are compiled in files of their own. No CUDA header.
#pragma once
#include "gemm/gpu/own.h"

namespace ftbert {

// gpu/deferred_norm.h.
void run_behind_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
void run_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
// The same of operands in E4M3.
void run_e4m3_behind_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
void run_e4m3_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);
// gpu/turned_product.h.
void run_turned_tile(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data);

}  // namespace ftbert
