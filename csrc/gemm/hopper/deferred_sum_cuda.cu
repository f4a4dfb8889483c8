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

void run_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const MomentData& by = data.by_moments;
  if (p.epilogue.after == After::moments_beside) {
    void* const x = const_cast<void*>(by.residual);
    const bool centred = p.epilogue.norm == NormKind::layer;
    const SumArguments arguments{by.add, nullptr, by.gamma, {}, by.moments, 0, x, data.c, x, centred};
    return run_tile<Keeping>(context, "kernel keeping_product", variant, p, data, arguments);
  }
  const double inverse = 1.0 / static_cast<double>(p.n);
  const float* const pending = by.pending.gamma ? by.pending.gamma : by.add;
  const SumArguments arguments{by.add,  pending,     by.gamma, by.pending, by.moments,
                               inverse, by.residual, data.c,   nullptr,    true};
  run_tile<Summing>(context, "kernel summing_product", variant, p, data, arguments);
}

}  // namespace ftbert
