// wgmma_layernorm with A and B in E4M3, and with a copy of the result in E4M3 where the next product reads one.
#include "gemm/hopper/wgmma_norm_launch.cuh"

namespace ftbert {
void run_layernorm_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  FTBERT_CHECK(!data.copy || (data.copy_scale && data.copy != data.c),
               "wgmma_layernorm: expected a copy in e4m3 with a scale, in other memory than the result");
  run_norm<ScaledShapes>(variant, p, data, [&]<class E, class Shape>() {
    launch_norm<E, Shape, LayerRule, ResultMaps>(context, p, data);
  });
}

}  // namespace ftbert
