// wgmma_persistent with the ending of turned_product.h, of 16-bit A and B.
#include "gemm/hopper/turned_persistent.cuh"

namespace ftbert {

template <class T>
bool turns_in_registers(const Heads& heads, const HeadRules<T>& rules) {
  const Norm<T>&q = rules.q_norm, &k = rules.k_norm;
  return rules.rotation && rules.rotation.dims == heads.size && !rules.rotation.interleaved && q.kind == k.kind &&
         q.rounding == k.rounding && q.kind != NormKind::layer && !q.beta && !k.beta;
}

template <class T>
void run_turned_persistent(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                           const Heads& heads, const HeadRules<T>& rules) {
  if (product.a == DType::e4m3) return run_turned_e4m3(context, variant, product, data, heads, rules);
  launch_turned<native_t<T>>(context, variant, product, data, heads, rules);
}

#define FTBERT_INSTANTIATE(T)                                                                                      \
  template bool turns_in_registers(const Heads&, const HeadRules<T>&);                                             \
  template void run_turned_persistent(const Context<Cuda>&, int, const Product&, const ProductData&, const Heads&, \
                                      const HeadRules<T>&);
FTBERT_INSTANTIATE(half_t)
FTBERT_INSTANTIATE(bfloat16_t)

}  // namespace ftbert
