// The products behind and ahead of a deferred norm (deferred_norm.h) whose operands are E4M3, on the kernel of
// wgmma_tile.cuh.
#include "gemm/gpu/endings/correct.cuh"
#include "gemm/gpu/endings/sum.cuh"
#include "gemm/hopper/other_endings.h"
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {

void run_e4m3_behind_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  ScaledTileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    with_scaled_types(p, data, [&]<class E, class C>() {
      const auto launch = [&]<Gate kGate>() {
        launch_tile<e4m3_t, Shape, ScaledCorrected<E, C, kGate, Shape>>(context, "kernel corrected_product", p, data,
                                                                        correct_arguments(p, data));
      };
      p.epilogue.gate == Gate::pairs ? launch.template operator()<Gate::pairs>()
                                     : launch.template operator()<Gate::none>();
    });
  });
}

void run_e4m3_ahead_of_norm(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  ScaledTileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    const auto launch = [&]<class E>() {
      launch_tile<e4m3_t, Shape, ScaledSumming<E, Shape>>(context, "kernel summing_product", p, data,
                                                          sum_arguments(p, data));
    };
    p.c == DType::fp16 ? launch.template operator()<__half>() : launch.template operator()<__nv_bfloat16>();
  });
}

}  // namespace ftbert
