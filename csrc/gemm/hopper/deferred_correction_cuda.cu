// The product behind a deferred norm (deferred_norm.h), on the kernel of wgmma_tile.cuh.
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/endings/correct.cuh"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

template <class E, class Shape>
using Corrected = Correct<E, Shape, Gate::none>;
template <class E, class Shape>
using CorrectedGates = Correct<E, Shape, Gate::pairs>;

}  // namespace

void run_corrected(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                   const float* add, const float* slope, const PendingNorm& norm, const DeferredMoments& cleared) {
  check_own(context, {&wgmma_tile, variant}, product, data);
  const double inverse = 1.0 / static_cast<double>(product.k);
  const CorrectArguments arguments{add, slope, norm, cleared, inverse, data.c, {product.epilogue.activation}};
  if (product.epilogue.gate == Gate::pairs)
    return run_tile<CorrectedGates>(context, "kernel corrected_product", variant, product, data, arguments);
  run_tile<Corrected>(context, "kernel corrected_product", variant, product, data, arguments);
}

}  // namespace ftbert
