// wgmma_persistent with A and B in E4M3, whose 128 elements are a row of a stage where 64 of 16 bits are. Sums begin at
// zero; scales and bias come behind the last step. C is of 16 bits, or E4M3 with a scale.
#include "gemm/hopper/persistent_endings.cuh"

namespace ftbert {
namespace {

template <class E>
void run_bias_type(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  p.c == DType::e4m3 ? run_persistent<e4m3_t, E, e4m3_t>(context, variant, p, data)
                     : run_persistent<e4m3_t, E, E>(context, variant, p, data);
}

}  // namespace

void run_persistent_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  data.bias_type(p) == DType::fp16 ? run_bias_type<__half>(context, variant, p, data)
                                   : run_bias_type<__nv_bfloat16>(context, variant, p, data);
}

}  // namespace ftbert
