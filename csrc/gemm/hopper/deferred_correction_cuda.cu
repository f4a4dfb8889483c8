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

void run_behind_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const MomentData& by = data.by_moments;
  const CorrectArguments arguments{.add = by.add,
                                   .slope = by.slope,
                                   .norm = by.pending,
                                   .cleared = by.moments,
                                   .inverse = 1.0 / static_cast<double>(p.k),
                                   .c = data.c,
                                   .activations = {p.epilogue.activation}};
  if (p.epilogue.gate == Gate::pairs)
    return run_tile<CorrectedGates>(context, "kernel corrected_product", variant, p, data, arguments);
  run_tile<Corrected>(context, "kernel corrected_product", variant, p, data, arguments);
}

}  // namespace ftbert
