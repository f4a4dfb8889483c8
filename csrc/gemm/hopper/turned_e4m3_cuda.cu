// wgmma_persistent with the ending of turned_product.h, of A and B in E4M3.
#include "gemm/hopper/turned_persistent.cuh"

namespace ftbert {

void run_turned_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::fp16 ? launch_turned<e4m3_t, half_t>(context, variant, p, data)
                     : launch_turned<e4m3_t, bfloat16_t>(context, variant, p, data);
}

}  // namespace ftbert
