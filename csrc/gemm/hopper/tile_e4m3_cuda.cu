// wgmma_tile with A and B in E4M3, whose 128 elements are a row of a stage where 64 of 16 bits are. Scales and bias
// come behind the last step, when the parts of k have met. C is of 16 bits, or E4M3 with a scale.
#include "gemm/hopper/wgmma_tile.cuh"

namespace ftbert {
namespace {

template <class E, class C, Gate kGate, class Activations, class Shape>
using Scaled = Store<E, C, kGate, ScaledBias<E, Shape::kEights>, Activations, typename Shape::Staging>;

template <class E, class C>
void run_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  ScaledTileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    const auto launch = [&]<Gate kGate>(auto activations) {
      const StoreArguments<ScalesAndBias, decltype(activations)> arguments{
          {scales_of(p, data), data.bias}, activations, data.c, data.c_scale};
      launch_tile<e4m3_t, Shape, Scaled<E, C, kGate, decltype(activations), Shape>>(context, "kernel wgmma_tile", p,
                                                                                    data, arguments);
    };
    const Activation activation = p.epilogue.activation;
    p.epilogue.gate == Gate::pairs ? launch.template operator()<Gate::pairs>(AnyActivation{activation})
                                   : launch.template operator()<Gate::none>(GeluOrNone{activation});
  });
}

template <class E>
void run_bias_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::e4m3 ? run_type<E, e4m3_t>(context, variant, p, data) : run_type<E, E>(context, variant, p, data);
}

}  // namespace

void run_tile_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  data.bias_type(p) == DType::fp16 ? run_bias_type<__half>(context, variant, p, data)
                                   : run_bias_type<__nv_bfloat16>(context, variant, p, data);
}

}  // namespace ftbert
