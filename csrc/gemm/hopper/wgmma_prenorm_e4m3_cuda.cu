// wgmma_prenorm with A and B in E4M3, and with the norm in E4M3 where the next product reads that.
#include "gemm/hopper/wgmma_norm_launch.cuh"

namespace ftbert {
void run_prenorm_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  run_sum_and_norm<ScaledShapes>(context, variant, p, data);
}

}  // namespace ftbert
