// wgmma_persistent with the ending of turned_product.h, of A and B in E4M3.
#include "gemm/hopper/turned_persistent.cuh"

namespace ftbert {

template <class T>
void run_turned_e4m3(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                     const Heads& heads, const HeadRules<T>& rules) {
  launch_turned<e4m3_t>(context, variant, product, data, heads, rules);
}

#define FTBERT_INSTANTIATE(T)                                                                                \
  template void run_turned_e4m3(const Context<Cuda>&, int, const Product&, const ProductData&, const Heads&, \
                                const HeadRules<T>&);
FTBERT_INSTANTIATE(half_t)
FTBERT_INSTANTIATE(bfloat16_t)

}  // namespace ftbert
