// mma_tile of operands in E4M3, which GPUs multiply so from 8.9 on.
#include "gemm/ampere/mma_tile.cuh"
#include "gemm/ampere/other_endings.h"

namespace ftbert {
namespace {

template <class E, class C, class Shape, Gate kGate, class Activations>
void launch(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  using Ending = Store<E, C, kGate, ScaledBias<E, Shape::kEights>, Activations, typename Shape::Staging>;
  const StoreArguments<ScalesAndBias, Activations> arguments{
      {scales_of(p, data), data.bias}, {p.epilogue.activation}, data.c, data.c_scale};
  launch_mma_tile<e4m3_t, Shape, Ending>(context, "kernel e4m3_mma_tile", p, data, arguments);
}

}  // namespace

void run_mma_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  with_scaled_types(p, data, [&]<class E, class C>() {
    MmaShapes::with(variant, [&](auto shape) {
      using Shape = decltype(shape);
      // As on Hopper another activation than GELU is applied to 16 bits (is_gelu_or_gate).
      if (p.epilogue.gate == Gate::pairs)
        launch<E, C, Shape, Gate::pairs, AnyActivation>(context, p, data);
      else
        launch<E, C, Shape, Gate::none, std::conditional_t<std::is_same_v<C, E>, AnyActivation, GeluOrNone>>(context, p,
                                                                                                             data);
    });
  });
}

}  // namespace ftbert
