// The product ahead of a deferred norm (deferred_norm.h), on the kernel of wgmma_tile.cuh.
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/endings/sum.cuh"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

template <class E, class Shape>
using Summing = ResidualSum<E, Shape, false>;
template <class E, class Shape>
using Keeping = ResidualSum<E, Shape, true>;

}  // namespace

void run_summing(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, const void* residual, const PendingNorm& norm, const float* gamma,
                 const DeferredMoments& moments) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const double inverse = 1.0 / static_cast<double>(product.n);
  const float* const pending = norm.gamma ? norm.gamma : add;
  const SumArguments arguments{add, pending, gamma, norm, moments, inverse, residual, data.c, nullptr, true};
  run_tile<Summing>(context, "kernel summing_product", variant, product, data, arguments);
}

void run_keeping(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, void* x, const float* gamma, bool centred, const DeferredMoments& moments) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const SumArguments arguments{add, nullptr, gamma, {}, moments, 0, x, data.c, x, centred};
  run_tile<Keeping>(context, "kernel keeping_product", variant, product, data, arguments);
}

}  // namespace ftbert
