// wgmma_persistent with the ending of turned_product.h, of 16-bit A and B.
#include "gemm/hopper/turned_persistent.cuh"

namespace ftbert {

void run_turned_persistent(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  if (p.a == DType::e4m3) return run_turned_e4m3(context, variant, p, data);
  p.c == DType::fp16 ? launch_turned<__half, half_t>(context, variant, p, data)
                     : launch_turned<__nv_bfloat16, bfloat16_t>(context, variant, p, data);
}

}  // namespace ftbert
