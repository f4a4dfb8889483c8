// The products behind and ahead of a deferred norm (deferred_norm.h), on the kernel of wgmma_tile.cuh.
#include "gemm/gpu/endings/correct.cuh"
#include "gemm/gpu/endings/sum.cuh"
#include "gemm/hopper/other_endings.h"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

template <class E, class Shape>
using Corrected = Correct<E, Shape, Gate::none>;
template <class E, class Shape>
using CorrectedGates = Correct<E, Shape, Gate::pairs>;

template <class E, class Shape>
using Summing = ResidualSum<E, Shape, false>;
template <class E, class Shape>
using Keeping = ResidualSum<E, Shape, true>;

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

void run_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const MomentData& by = data.by_moments;
  SumArguments arguments{
      .add = by.add, .gamma_out = by.gamma, .moments = by.moments, .residual = by.residual, .c = data.c};
  if (p.epilogue.after == After::moments_beside) {
    arguments.kept = const_cast<void*>(by.residual);
    arguments.centred = p.epilogue.norm == NormKind::layer;
    return run_tile<Keeping>(context, "kernel keeping_product", variant, p, data, arguments);
  }
  arguments.gamma = by.pending.gamma ? by.pending.gamma : by.add;
  arguments.norm = by.pending;
  arguments.inverse = 1.0 / static_cast<double>(p.n);
  run_tile<Summing>(context, "kernel summing_product", variant, p, data, arguments);
}

}  // namespace ftbert
