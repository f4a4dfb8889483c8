// The products behind and ahead of a deferred norm (deferred_norm.h), on the kernel of wgmma_tile.cuh.
#include "gemm/gpu/endings/correct.cuh"
#include "gemm/gpu/endings/sum.cuh"
#include "gemm/hopper/other_endings.h"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {

void run_behind_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const CorrectArguments arguments = correct_arguments(p, data);
  p.epilogue.gate == Gate::pairs
      ? run_tile<CorrectedGates, TileShapes>(context, "kernel corrected_product", variant, p, data, arguments)
      : run_tile<Corrected, TileShapes>(context, "kernel corrected_product", variant, p, data, arguments);
}

void run_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const SumArguments arguments = sum_arguments(p, data);
  p.epilogue.after == After::moments_beside
      ? run_tile<Keeping>(context, "kernel keeping_product", variant, p, data, arguments)
      : run_tile<Summing>(context, "kernel summing_product", variant, p, data, arguments);
}

}  // namespace ftbert
