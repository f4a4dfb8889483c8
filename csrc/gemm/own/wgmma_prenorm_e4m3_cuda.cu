// wgmma_prenorm with A and B in E4M3, and with the norm in E4M3 where the next product reads that.
#include "gemm/own/wgmma_norm_launch.cuh"

namespace ftbert {
void run_prenorm_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  run_norm<ScaledShapes>(variant, p, data, [&]<class E, class Shape>() {
    if (data.norm.kind == NormKind::layer)
      launch_norm<E, Shape, LayerRule, SumMaps>(context, p, data);
    else if (data.norm.rounding == NormRounding::once)
      launch_norm<E, Shape, RmsRule<NormRounding::once>, SumMaps>(context, p, data);
    else
      launch_norm<E, Shape, RmsRule<NormRounding::before_gamma>, SumMaps>(context, p, data);
  });
}

}  // namespace ftbert
