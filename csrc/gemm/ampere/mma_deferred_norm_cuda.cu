// The products behind and ahead of a deferred norm (deferred_norm.h), on the kernel of mma_tile.cuh.
#include "gemm/ampere/mma_tile.cuh"
#include "gemm/ampere/other_endings.h"
#include "gemm/gpu/endings/correct.cuh"
#include "gemm/gpu/endings/sum.cuh"

namespace ftbert {

void run_mma_behind_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const CorrectArguments arguments = correct_arguments(p, data);
  p.epilogue.gate == Gate::pairs
      ? run_mma_tile<CorrectedGates>(context, "kernel corrected_product", variant, p, data, arguments)
      : run_mma_tile<Corrected>(context, "kernel corrected_product", variant, p, data, arguments);
}

void run_mma_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const SumArguments arguments = sum_arguments(p, data);
  p.epilogue.after == After::moments_beside
      ? run_mma_tile<Keeping>(context, "kernel keeping_product", variant, p, data, arguments)
      : run_mma_tile<Summing>(context, "kernel summing_product", variant, p, data, arguments);
}

}  // namespace ftbert
